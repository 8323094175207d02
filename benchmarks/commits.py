"""Kernels of two commits by turns on one GPU: what a change costs.

    git worktree add ../before COMMIT
    pip install --no-deps --target ../COMMIT ../before
    pip install --no-deps --target ../now .
    python benchmarks/commits.py ../COMMIT ../now [--cases causal,alibi] [--rounds 3]

Each folder has one installed package, and its name stands in the result. Every round measures all
rows with the one and with the other, each in a process of its own, as ``attention.py`` measures its
column ``attndsl``. In the next round the other comes first. A first process of each, whose figures
are left out, compiles. ``before_ms`` and ``after_ms`` are medians of the rounds, and ``change`` is
their ratio. ``spread`` is the largest difference between two rounds of one folder, as a share of
the smaller: a change within the spread is none.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

import attention
import common
import worker

CASES = "full,causal,softcap,documents1000"
SHAPES = "2x16x8192x64,2x16x8192x128"
NAMES = ("before", "after")
COLUMNS = ["case", "direction", "B", "H", "S", "D", "before_ms", "after_ms", "change", "spread"]
WORKER = Path(attention.__file__)

Key = tuple[str, tuple[int, ...], str]


def measured(folder: Path, cells: list[worker.Cell], quick: bool) -> dict[Key, float | str]:
    """What processes that import the package of ``folder`` find: ms, or why there are none."""
    rest = os.environ.get("PYTHONPATH")
    paths = os.pathsep.join([str(folder.resolve()), *([rest] if rest else [])])
    answers = worker.measured(
        WORKER, cells, ["--quick"] * quick, environ={**os.environ, "PYTHONPATH": paths}
    )
    return {_key(cell): found["why"] if "why" in found else found["ms"] for cell, found in answers}


def row_of(
    key: Key, rounds: dict[str, list[float | str]], folders: dict[str, Path]
) -> dict[str, Any]:
    """A row of the table, from what each round found of the two folders."""
    case, (batch, heads, kv_heads, length, dim), direction = key
    row: dict[str, Any] = {
        "case": case, "direction": direction, "B": batch, "H": heads, "Hkv": kv_heads, "S": length,
        "D": dim, **{name: folder.name for name, folder in folders.items()},
    }  # fmt: skip
    spreads = []
    for name in NAMES:
        times = [found for found in rounds[name] if isinstance(found, float)]
        whys = [found for found in rounds[name] if isinstance(found, str)]
        row[f"{name}_ms"] = statistics.median(times) if times and not whys else None
        if whys:
            row[f"{name}_why"] = whys[0]
        elif times:
            spreads.append(max(times) / min(times) - 1)
    if None not in (row["before_ms"], row["after_ms"]):
        row |= {"change": row["after_ms"] / row["before_ms"], "spread": max(spreads)}
    return row


def main() -> int:
    """Parse the command line, measure, print and write; 1 if a row has no figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="folder with the installed package")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("--cases", default=CASES, help="comma-separated")
    parser.add_argument("--shapes", default=SHAPES, help="BxHxSxD, comma-separated")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="short timings")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    folders = dict(zip(NAMES, (options.before, options.after), strict=True))
    for folder in folders.values():
        if not (folder / "attndsl" / "__init__.py").is_file():
            parser.error(f"{folder} has no package attndsl: pip install --target {folder} ...")
    unknown = set(options.cases.split(",")) - set(attention.CASES)
    if unknown:
        parser.error(f"there is no case {min(unknown)}; there are: {', '.join(attention.CASES)}")
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}: a change is seen in one round or more")
    try:
        shapes = [attention.parse_shape(text) for text in options.shapes.split(",")]
    except ValueError as error:
        parser.error(str(error))
    cells = [
        {"column": "attndsl", "case": case, "shape": list(shape), "direction": direction}
        for shape, case in product(shapes, options.cases.split(","))
        for direction in attention.DIRECTIONS
    ]
    found: dict[Key, dict[str, list[float | str]]] = {
        _key(cell): {name: [] for name in NAMES} for cell in cells
    }
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds + 1):
        # Who comes second meets a warmer GPU.
        turns = list(folders.items())[:: 1 if number % 2 else -1]
        for name, folder in turns:
            print(f"round {number} of {options.rounds}: {name}", flush=True)
            for key, result in measured(folder, cells, options.quick or not number).items():
                if number:
                    found[key][name].append(result)
        if number:
            rows = [row_of(key, rounds, folders) for key, rounds in found.items()]
            common.write("commits", "cuda", rows, options.output)
    common.print_table(rows, COLUMNS)
    for row in rows:
        for name in NAMES:
            if f"{name}_why" in row:
                print(f"{name}, {row['case']} {row['direction']}: {row[f'{name}_why']}")
    return int(any(row["before_ms"] is None or row["after_ms"] is None for row in rows))


def _key(cell: worker.Cell) -> Key:
    return cell["case"], tuple(cell["shape"]), cell["direction"]


if __name__ == "__main__":
    sys.exit(main())
