"""What operands cost that are views of (batch, length, heads, dim) memory, beside contiguous ones.

    python benchmarks/layouts.py [--quick] [--output FILE]

Packed projections make such views, and outputs and gradients lie in memory as their inputs. Each
row is one direction of one shape, bf16, 16384 tokens and 2048 features; ``cost`` is the time with
views over the time with contiguous operands. Both take turns in one process, so that a GPU that
gets warm slows both down. Every figure is a median of CUDA events. ``--quick`` measures the short
lengths alone, once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS, FEATURES = 16384, 2048
LENGTHS, HEAD_DIMS, MASKS = (1024, 8192), (64, 128), ("causal", "full")
PROGRAMS = {"causal": "causal()", "full": "score"}
ROUNDS = 5
COLUMNS = ["mask", "head_dim", "length", "direction", "contiguous_ms", "views_ms", "cost"]


@dataclass(frozen=True)
class Case:
    """One shape and mask."""

    mask: str
    batch: int
    heads: int
    length: int
    head_dim: int


def cases(quick: bool) -> list[Case]:
    """What is measured, in order."""
    lengths = LENGTHS[:1] if quick else LENGTHS
    return [
        Case(mask, TOKENS // length, FEATURES // head_dim, length, head_dim)
        for mask, head_dim, length in product(MASKS, HEAD_DIMS, lengths)
    ]


def measure(case: Case, rounds: int, device: str = "cuda") -> list[dict[str, Any]]:
    """A row for each direction."""
    import torch

    import attndsl

    attention = attndsl.compile(PROGRAMS[case.mask])
    shape = (case.batch, case.length, case.heads, case.head_dim)
    views = [
        torch.randn(shape, device=device, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)
    ]
    runs = {
        "contiguous": _directions(attention, [x.contiguous() for x in views]),
        "views": _directions(attention, views),
    }
    rows = []
    for place, direction in enumerate(("forward", "backward")):
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, own in times.items():
                own.append(median(runs[name][place], device))
        found = {f"{name}_ms": statistics.median(own) for name, own in times.items()}
        facts = {"mask": case.mask, "head_dim": case.head_dim, "length": case.length}
        cost = found["views_ms"] / found["contiguous_ms"]
        rows.append({**facts, "direction": direction, **found, "cost": cost})
    return rows


def _directions(
    attention: Any, operands: list[Any]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Forward and backward; the output's gradient lies in memory as the output."""
    import torch

    leaves = [x.detach().requires_grad_() for x in operands]
    out = attention(*leaves)
    grad = torch.randn_like(out)

    def forward() -> object:
        with torch.no_grad():
            return attention(*leaves)

    return forward, lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def median(call: Callable[[], object], device: str) -> float:
    """Median milliseconds of ``call``; on CPUs, where only tests measure, those of one."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=200, return_mode="median"))


def main() -> int:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short lengths, one round")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    for case in cases(options.quick):
        for row in measure(case, 1 if options.quick else ROUNDS):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
        path = common.write("layouts", "cuda", rows, options.output)
        torch.cuda.empty_cache()
    common.print_table(rows, COLUMNS)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
