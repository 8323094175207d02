"""What a shape that is a multiple of nothing costs, beside the next larger multiple.

    python benchmarks/odd_shapes.py [--cases full,causal,bias,mask]

Each row is an odd shape and an even one on the same program, bf16, forward and backward through
``attndsl.scaled_dot_product_attention``; ``cost`` is the quotient of their times. The last cases
give it an ``attn_mask`` (heads, queries, keys), a bf16 bias or random bools. Beside it is what
torch's own does with both. Every figure is the median of CUDA events.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import common

Shape = tuple[int, int, int, int, int]
"""Batch, heads, query length, key length, head dim."""
PAIRS: dict[str, tuple[Shape, Shape]] = {
    "length 2047": ((4, 16, 2047, 2047, 128), (4, 16, 2048, 2048, 128)),
    "head dim 72": ((4, 16, 2048, 2048, 72), (4, 16, 2048, 2048, 80)),
    "key length 4095": ((2, 16, 4096, 4095, 128), (2, 16, 4096, 4096, 128)),
}
"""Odd and even shapes by what is odd."""
CASES = ("full", "causal", "bias", "mask")
COLUMNS = [
    "case",
    "what",
    "direction",
    "odd_ms",
    "even_ms",
    "cost",
    "torch_odd_ms",
    "torch_even_ms",
]


def measure(case: str, what: str) -> list[dict[str, Any]]:
    """A row for each direction."""
    import torch

    import attndsl

    functions = {
        "": attndsl.scaled_dot_product_attention,
        "torch_": torch.nn.functional.scaled_dot_product_attention,
    }
    rows = [{"case": case, "what": what, "direction": d} for d in ("forward", "backward")]
    for prefix, function in functions.items():
        for name, shape in zip(("odd", "even"), PAIRS[what], strict=True):
            times = time_of(function, shape, case)
            for row, found in zip(rows, times, strict=True):
                row[f"{prefix}{name}_ms"] = found
    for row in rows:
        row["cost"] = row["odd_ms"] / row["even_ms"]
    return rows


def time_of(function: Any, shape: Shape, case: str) -> tuple[float, float]:
    """Milliseconds of the forward and of the backward."""
    import torch
    from triton.testing import do_bench

    batch, heads, q_len, kv_len, dim = shape
    q, k, v = (
        torch.randn(batch, heads, length, dim, device="cuda", dtype=torch.bfloat16)
        for length in (q_len, kv_len, kv_len)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    added = None
    if case in ("bias", "mask"):
        added = torch.randn(heads, q_len, kv_len, device="cuda", dtype=torch.bfloat16)
        added = added > -1 if case == "mask" else added

    def forward() -> Any:
        return function(q, k, v, attn_mask=added, is_causal=case == "causal")

    def without_gradients() -> None:
        with torch.no_grad():
            forward()

    out = forward()
    grad = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, leaves, grad, retain_graph=True)

    first, second = (
        float(do_bench(run, warmup=50, rep=200, return_mode="median"))
        for run in (without_gradients, backward)
    )
    return first, second


def main() -> int:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    cases = options.cases.split(",")
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        parser.error(f"there is no case {unknown[0]}; there are: {', '.join(CASES)}")
    import torch

    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    for case in cases:
        for what in PAIRS:
            for row in measure(case, what):
                rows.append(row)
                print(json.dumps(row), file=sys.stderr, flush=True)
            path = common.write("odd_shapes", "cuda", rows, options.output)
    common.print_table(rows, COLUMNS)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
