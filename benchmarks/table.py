"""The tables of measured figures in README.md and docs/benchmarks.md, from the result files.

python benchmarks/table.py           # print them
python benchmarks/table.py --write   # put them between the marks in both files
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures: begin (benchmarks/table.py --write) -->", "<!-- figures: end -->"
COLUMNS = {
    "attndsl": "attndsl",
    "deterministic": "deterministic",
    "flex": "FlexAttention",
    "cudnn": "cuDNN",
    "fa2": "FA-2",
    "fa4": "FA-4",
}
_PORTABLE = "The portable Triton kernels on the same kind of machine (`backend='triton'`):"
_OF_GRADIENTS = (
    "Backward without and with the gradients of what is captured (dropout, sigmoid: of the plain "
    "program and of these, whose forwards are beside; jvp: the forward, and with tangents of out "
    "and lse along q, k and v)"
)
_GRADIENTS = {
    "case": "learned", "without_ms": "without", "with_ms": "with", "cost": "quotient",
    "plain_forward_ms": "forward without", "forward_ms": "with",
    "flex_without_ms": "FlexAttention without", "flex_ms": "with",
}  # fmt: skip
_ODD = {
    "what": "odd", "case": "mask", "direction": "", "odd_ms": "odd", "even_ms": "even",
    "cost": "quotient",
}  # fmt: skip
SHAPE = ("B", "H", "Hkv", "S", "D")
DIRECTIONS = {"forward": "forward", "backward": "backward"}


def shapes(results: dict[str, Any]) -> list[tuple[int, ...]]:
    """The shapes measured, in the order of the file."""
    found = [tuple(row[key] for key in SHAPE) for row in results["rows"]]
    return list(dict.fromkeys(found))


def table(results: dict[str, Any], shape: tuple[int, ...]) -> str:
    """Median milliseconds at one shape, a row a case; a dash where a system cannot run it."""
    rows = {
        (row["case"], row["direction"]): row
        for row in results["rows"]
        if tuple(row[key] for key in SHAPE) == shape
    }
    # Columns that nothing was measured in at this shape are none.
    columns = [
        (direction, key)
        for direction in DIRECTIONS
        for key in COLUMNS
        if any(
            row.get(f"{key}_ms") is not None
            for (_, found), row in rows.items()
            if found == direction
        )
    ]
    head = ["ms", *(f"{DIRECTIONS[d]}: {COLUMNS[key]}" for d, key in columns)]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for case in dict.fromkeys(case for case, _ in rows):
        cells = [_ms(rows.get((case, d), {}).get(f"{key}_ms")) for d, key in columns]
        lines.append([case, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def size(shape: tuple[int, ...]) -> str:
    """A shape in words."""
    batch, heads, kv_heads, length, dim = shape
    grouped = f" on {kv_heads} kv heads" if kv_heads != heads else ""
    return f"Batch {batch}, {heads} heads{grouped}, length {length}, head dim {dim}, bf16"


def conditions(results: dict[str, Any]) -> str:
    """Machine, date and versions of a result file."""
    versions = results["versions"]
    cudnn = versions["cudnn"]
    return (
        f"{results['machine']}; {results['date']}; torch {versions['torch']}, "
        f"Triton {versions['triton']}, cuDNN {cudnn // 10000}.{cudnn // 100 % 100}."
    )


def caption(results: dict[str, Any], shape: tuple[int, ...]) -> str:
    """What was measured, on what, with which versions."""
    return f"{size(shape)}, on one {conditions(results)}"


def figures(results: dict[str, Any] | None, most: int | None = None) -> str:
    """Tables with captions, of the first ``most`` shapes."""
    if results is None:
        return "No results are committed: `make bench` on a machine with a GPU writes them."
    parts = [f"{caption(results, s)}\n\n{table(results, s)}" for s in shapes(results)[:most]]
    return "\n\n".join(parts)


def costs(name: str, title: str, columns: dict[str, str]) -> str:
    """A result file whose rows are a case and the times of two ways, and their quotient."""
    results = load(name)
    if results is None:
        return ""
    lines = [list(columns.values()), ["---"] * len(columns)]
    for row in results["rows"]:
        lines.append([x if isinstance(x := row.get(key), str) else _ms(x) for key in columns])
    head = f"{title}, in ms, bf16, on one {results['machine']}; {results['date']}:"
    return f"{head}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def load(name: str) -> dict[str, Any] | None:
    """Committed results of benchmarks/attention.py, if any."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def replace(text: str, part: str) -> str:
    """``text`` with ``part`` between the marks.

    Raises:
        ValueError: It has not both marks, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the marks {BEGIN!r} and {END!r} are missing")
    return f"{before}{BEGIN}\n\n{part}\n\n{END}{after}"


def targets() -> dict[Path, str]:
    """What stands between the marks of each file."""
    names = ("sparse_attention", "attention", "deterministic", "other_shapes", "wide_heads")
    hopper = [load(name) for name in names]
    portable = [load("portable"), load("portable_sparse")]
    return {
        ROOT / "README.md": figures(hopper[0], most=1),
        ROOT / "docs" / "benchmarks.md": "\n\n".join(
            [
                *map(figures, hopper),
                costs("gradients", _OF_GRADIENTS, _GRADIENTS),
                costs("odd_shapes", "Odd shapes beside the next larger multiple", _ODD),
                _PORTABLE,
                *map(figures, portable),
            ]
        ),
    }


def main() -> None:
    """Print the tables, or write them into the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="change README.md and docs")
    options = parser.parse_args()
    for path, part in targets().items():
        if options.write:
            path.write_text(replace(path.read_text("utf-8"), part), "utf-8")
        else:
            print(f"{path.relative_to(ROOT)}:\n\n{part}\n")


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
