"""The measured figures in README.md and pages of docs/, from the result files.

python benchmarks/table.py           # print them
python benchmarks/table.py --write   # put them between the marks of each file
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import decoding
import summary

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
_OF_GRADIENTS = (
    "A backward without and with the gradients of captured tensors. The rows `dropout` and "
    "`sigmoid` compare the plain causal program with a program that has these, and show both "
    "forwards. The row `jvp` compares the forward with one that makes tangents of out and lse "
    "along q, k and v too. Times are in ms, bf16"
)
_OF_ODD = "Odd shapes and the next larger multiples. Times are in ms, bf16"
_GRADIENTS = {
    "case": "case", "without_ms": "without", "with_ms": "with", "cost": "quotient",
    "plain_forward_ms": "forward without", "forward_ms": "with",
    "flex_without_ms": "FlexAttention without", "flex_ms": "with",
}  # fmt: skip
_ODD = {
    "what": "odd", "case": "mask", "direction": "", "odd_ms": "odd", "even_ms": "even",
    "cost": "quotient",
}  # fmt: skip
_START = {
    "program": "program", "system": "system", "device": "device", "cache": "caches",
    "first_output_ms": "first output, ms", "first_step_ms": "first step, ms",
    "context_ms": "CUDA context, ms", "import_torch_ms": "import torch, ms",
}  # fmt: skip
_STEP = {
    "attention": "attention", "step_ms": "step, ms", "tokens_per_second": "tokens a second",
    "peak_gb": "peak memory, GB",
}  # fmt: skip
_GENERATION = {
    "implementation": "implementation", "batch": "batch", "context": "context",
    "tokens_per_s": "tokens a second", "ms_per_step": "step, ms",
}  # fmt: skip
_TRAINING = {
    "model": "model", "attention": "attention", "step_ms": "step, ms",
    "ratio": "SDPA's step / this one", "peak_gb": "peak memory, GB",
}  # fmt: skip
_COSTS = {
    "case": "program", "direction": "direction", "ms": "measured, ms",
    "predicted_ms": "predicted, ms", "ratio": "measured / predicted",
}  # fmt: skip
_BUNDLES = {
    "program": "program", "with": "with", "forward_s": "forward, s", "backward_s": "backward, s",
    "compiled": "compiled",
}  # fmt: skip
_TILES = {
    "case": "mask", "plan_ms": "closed form, ms", "find_ms": "lists, ms",
    "flex_compiled_ms": "create_block_mask, compiled, ms", "flex_eager_length": "eager: length",
    "flex_eager_ms": "eager, ms",
}  # fmt: skip
_CALLS = {
    "program": "program", "call_us": "call, us", "with_grad_us": "with grad, us",
    "with_backward_us": "with backward, us",
}  # fmt: skip
_IN_GRAPHS = {
    "model": "model", "attention": "attention", "guards": "guards",
    "forward_us": "forward, us", "backward_us": "backward, us", "above_us": "above SDPA, us",
}  # fmt: skip
_OF_SHORT = "device time of one call in a CUDA graph"
_SHORT = {
    "name": "shape", "program": "program", "direction": "direction",
    "attndsl_device": "attndsl, us", "cudnn_device": "cuDNN, us", "fa2_device": "FA-2, us",
    "flex_device": "FlexAttention, us", "limit_us": "limit, us", "attndsl_eager": "eager, us",
    "best_eager": "best eager peer / attndsl",
}  # fmt: skip
_TUNED = {
    "name": "shape", "direction": "direction", "chosen_us": "as chosen, us",
    "tuned_us": "as `tune` finds, us", "gain": "as chosen / as `tune` finds",
}  # fmt: skip
_ON_CPUS = {
    "case": "mask or score", "direction": "direction", "S": "length", "attndsl_ms": "attndsl, ms",
    "sdpa_ms": "SDPA, ms",
}  # fmt: skip
FAR = 100
"""Quotient from which on a time is said in words too."""
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


def far(results: dict[str, Any], shape: tuple[int, ...]) -> str:
    """In words, the times of other systems that are far from attndsl's; empty if none is."""
    found = [
        f"{COLUMNS[key]}'s {row['direction']} takes {row[f'{key}_ms'] / row['attndsl_ms']:.0f} "
        f"times as long at `{row['case']}`."
        for row in results["rows"]
        if tuple(row[size] for size in SHAPE) == shape
        for key in COLUMNS
        if key != "attndsl" and row.get(f"{key}_ms") and row["attndsl_ms"]
        if row[f"{key}_ms"] > FAR * row["attndsl_ms"]
    ]
    return " ".join(found)


def figures(results: dict[str, Any] | None, most: int | None = None) -> str:
    """Tables with captions, of the first ``most`` shapes."""
    if results is None:
        return "No results are committed: `make bench` on a machine with a GPU writes them."
    parts: list[str] = []
    for shape in shapes(results)[:most]:
        parts += [caption(results, shape), table(results, shape), far(results, shape)]
    return "\n\n".join(part for part in parts if part)


def tables(name: str) -> str:
    """A table for each shape of a result file of benchmarks/attention.py."""
    results = load(name)
    if results is None:
        return ""
    parts = [f"`{name}.json`: times in ms, on one {conditions(results)}"]
    for shape in shapes(results):
        parts += [f"{size(shape)}:", table(results, shape), far(results, shape)]
    return "\n\n".join(part for part in parts if part)


def rows(name: str, title: str, columns: dict[str, str]) -> str:
    """A table with a line for each row of a result file, ``columns`` of it by their headings.

    The device of a row that was measured elsewhere than the others is its machine.
    """
    results = load(name)
    if results is None:
        return ""
    lines = [list(columns.values()), ["---"] * len(columns)]
    for row in results["rows"]:
        if len(columns.keys() & row.keys()) > 1:  # The line of ceilings has a name alone.
            own = row | ({"device": row["machine"]} if "machine" in row else {})
            lines.append([_cell(own.get(key)) for key in columns])
    head = f"`{name}.json`: {title}; one {results['machine']}, {results['date']}."
    return f"{head}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def folded(heading: str, *parts: str) -> str:
    """A section whose tables are shown when a reader opens them."""
    inside = "\n\n".join(part for part in parts if part)
    head = "<details>\n<summary>Show the tables</summary>"
    return f"### {heading}\n\n{head}\n\n{inside}\n\n</details>"


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


def sections() -> list[str]:
    """All tables of docs/benchmarks.md, folded."""
    return [
        folded(summary.BESIDE_FLEX, tables("sparse_attention")),
        folded(summary.BESIDE_FA4, tables("attention")),
        folded(summary.DETERMINISTIC, tables("deterministic")),
        folded(summary.OTHER_SHAPES, tables("other_shapes")),
        folded(summary.WIDE_HEADS, tables("wide_heads")),
        folded(summary.GRADIENTS, rows("gradients", _OF_GRADIENTS, _GRADIENTS)),
        folded(summary.ODD_SHAPES, rows("odd_shapes", _OF_ODD, _ODD)),
        folded(
            summary.SHORT_SHAPES,
            rows("short", _OF_SHORT, _SHORT),
            rows("short_tune", f"tiles that are chosen, and measured ones; {_OF_SHORT}", _TUNED),
        ),
        folded(summary.DECODING, decoding.decode_tables(load(decoding.DECODE))),
        folded(summary.SERVING, decoding.serving_tables(load(decoding.SERVING))),
        folded(summary.PORTABLE, tables("portable"), tables("portable_sparse")),
        folded(
            summary.OTHER_FILES,
            rows("start_cuda", "the start of a process on a GPU", _START),
            rows("start_cpu", "the start of a process on a CPU", _START),
            rows("gpt", "a training step of a GPT of 124 M parameters", _STEP),
            generation(),
            rows("training", "training steps of five models", _TRAINING),
            rows("costs", "programs beside a model of their cost", _COSTS),
            rows("sparsity", "the tiles of masks of 1048576 rows", _TILES),
            rows("call_overhead", "a call without its kernel", _CALLS),
            rows("graph_overhead", "a compiled layer without its kernels", _IN_GRAPHS),
            rows("cpu", "the CPU backend and SDPA, fp32, 4 heads, head dim 64", _ON_CPUS),
        ),
    ]


def generation() -> str:
    """Tokens a second of ``generate``, for docs/huggingface.md."""
    title = (
        "`generate` with a random model of the shape of Llama 3.2 1B, in bf16, with a static cache "
        "and compiled steps"
    )
    return rows("huggingface_speed", title, _GENERATION)


def targets() -> dict[Path, str]:
    """What stands between the marks of each file."""
    decode, serving = load(decoding.DECODE), load(decoding.SERVING)
    short = decoding.in_short(decode)
    return {
        ROOT / "README.md": "\n\n".join([figures(load("sparse_attention"), most=1), short]),
        ROOT / "docs" / "decoding.md": decoding.points(decode),
        ROOT / "docs" / "serving.md": decoding.points(serving),
        ROOT / "docs" / "deployment.md": rows(
            "bundles",
            "the first forward and backward of a fresh process, from the import of "
            "attndsl on; 16 heads, 4096 rows, D128",
            _BUNDLES,
        ),
        ROOT / "docs" / "huggingface.md": generation(),
        ROOT / "docs" / "dev" / "kernels.md": decoding.of_memory(decode, serving),
        ROOT / "docs" / "benchmarks.md": "\n\n".join([summary.summary(load), *sections()]),
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


def _cell(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int) else _ms(value)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
