"""What the gradients of captured tensors cost: backward with them, beside the backward without.

    python benchmarks/gradients.py [--shape 2x16x8192x128] [--cases gain,key_bias] [--flex]

Every row is one program on a causal mask, bf16. ``without_ms`` is its backward where nothing
captured requires grad, ``with_ms`` where all of it does, and ``cost`` their quotient. Programs that
capture nothing are beside the plain causal one: with dropout, and with weights that are a sigmoid.
The row of jvp has the forward, and the tangents of out and lse along q, k and v. ``copy_ms`` is how
long it takes to read and write a bias of all pairs once; the forwards of what surrounds a softmax
(sinks, dropout, sigmoid weights) are beside the plain one's. With --flex compiled FlexAttention
does the same beside it, where it runs at all; it adds one atomic a pair and captured element, so
that this takes seconds a call. Every figure is the median of CUDA events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Case:
    """A program, the shapes of what it captures, and FlexAttention's score function."""

    program: str
    sizes: Callable[[int, int], dict[str, tuple[int, ...]]]
    """By name: the shape of each float capture, from the numbers of heads and of rows."""
    flex: Callable[..., Any] | None
    """Of the score, b, h, q, kv, and the captures by their names; None for what it has not."""


CASES = {
    "gain": Case(
        "tensor gain[heads]: float; mask = causal(); score = gain[h] * score",
        lambda heads, rows: {"gain": (heads,)},
        lambda s, b, h, q, kv, gain: s * gain[h],
    ),
    "key_bias": Case(
        "tensor bias[heads, kv_len]: float; mask = causal(); score = score + bias[h, kv]",
        lambda heads, rows: {"bias": (heads, rows)},
        lambda s, b, h, q, kv, bias: s + bias[h, kv],
    ),
    "query_bias": Case(
        "tensor bias[heads, q_len]: float; mask = causal(); score = score + bias[h, q]",
        lambda heads, rows: {"bias": (heads, rows)},
        lambda s, b, h, q, kv, bias: s + bias[h, q],
    ),
    "sinks": Case(
        "tensor s[heads]: float; mask = causal(); sink = s[h]",
        lambda heads, rows: {"s": (heads,)},
        None,
    ),
    "relative": Case(
        "tensor rel[heads, n]: float; mask = causal(); score = score + rel[h, q - kv + kv_len]",
        lambda heads, rows: {"rel": (heads, 2 * rows)},
        lambda s, b, h, q, kv, rel: s + rel[h, q - kv + rel.shape[1] // 2],
    ),
    "full_bias": Case(
        "tensor bias[heads, q_len, kv_len]: float; mask = causal(); score = score + bias[h, q, kv]",
        lambda heads, rows: {"bias": (heads, rows, rows)},
        lambda s, b, h, q, kv, bias: s + bias[h, q, kv],
    ),
    "buckets": Case(
        "tensor t[32, heads]: float; mask = causal(); "
        "score = score + t[t5_bucket(q - kv, 32, 128), h]",
        lambda heads, rows: {"t": (32, heads)},
        None,
    ),
    "nested": Case(
        "tensor t[heads, n, n]: float; mask = causal(); score = score + t[h, q % n, kv % n]",
        lambda heads, rows: {"t": (heads, 64, 64)},
        lambda s, b, h, q, kv, t: s + t[h, q % t.shape[1], kv % t.shape[1]],
    ),
    "dropout": Case(
        "mask = causal(); weights = dropout(softmax(score), 0.1)", lambda heads, rows: {}, None
    ),
    "sigmoid": Case(
        "mask = causal(); weights = sigmoid(score) / kv_len", lambda heads, rows: {}, None
    ),
}
SURROUNDS = ("sinks", "dropout", "sigmoid")
"""Cases whose forward is measured too, beside that of the plain causal program."""
JVP = "jvp"
_ROUNDS = 3
"""How often two ways take turns."""
NAMES = (*CASES, JVP)
COLUMNS = [
    "case", "without_ms", "with_ms", "cost", "copy_ms", "plain_forward_ms", "forward_ms",
    "flex_without_ms", "flex_ms", "why",
]  # fmt: skip


def measure(
    name: str, shape: tuple[int, int, int, int], with_flex: bool, device: str = "cuda"
) -> dict[str, Any]:
    """One row."""
    import torch

    import attndsl

    batch, heads, rows, dim = shape
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn(batch, heads, rows, dim, device=device, dtype=torch.bfloat16) for _ in range(4)
    )
    found: dict[str, Any] = {"case": name, "shape": list(shape)}
    plain = attndsl.compile("causal()")
    if name == JVP:
        found["without_ms"], found["with_ms"] = medians(
            lambda: plain(q, k, v, return_lse=True),
            lambda: tangents(plain, (q, k, v), grad),
            device,
        )
        return found | {"cost": found["with_ms"] / found["without_ms"]}
    case = CASES[name]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    captures = {
        key: (1 + 0.1 * torch.randn(size, device=device)).requires_grad_()
        for key, size in case.sizes(heads, rows).items()
    }
    still = {key: x.detach() for key, x in captures.items()}
    attention = attndsl.compile(case.program)
    without = attention if captures else plain
    learned = [*leaves, *captures.values()]
    found["without_ms"], found["with_ms"] = medians(
        backward_of(without(q, k, v, **still), leaves, grad),
        backward_of(attention(q, k, v, **captures), learned, grad),
        device,
    )
    found["cost"] = found["with_ms"] / found["without_ms"]
    if name in SURROUNDS:
        with torch.no_grad():
            found["plain_forward_ms"], found["forward_ms"] = medians(
                lambda: plain(q, k, v), lambda: attention(q, k, v, **still), device
            )
    if name == "full_bias":
        other = torch.empty_like(still["bias"])
        found["copy_ms"] = median(lambda: other.copy_(still["bias"]), device)
    if with_flex and case.flex is not None:
        try:
            found |= flex(case, (q, k, v), captures, still, leaves, grad)
        except Exception as error:  # What it does not run is a finding, not the end of the table.
            found["why"] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def tangents(attention: Any, operands: tuple[Any, Any, Any], along: Any) -> Any:
    """The tangents of out and lse, where all operands move along ``along``."""
    import torch

    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, return_lse=True)

    return torch.func.jvp(call, operands, (along, along, along))[1]


def flex(
    case: Case,
    operands: tuple[Any, Any, Any],
    captures: dict[str, Any],
    still: dict[str, Any],
    leaves: list[Any],
    grad: Any,
) -> dict[str, float]:
    """FlexAttention's backward without and with gradients of what is captured."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    rows = operands[0].shape[2]
    blocks = create_block_mask(lambda b, h, q, kv: q >= kv, None, None, rows, rows, device="cuda")
    compiled = torch.compile(flex_attention)

    def out(given: dict[str, Any]) -> Any:
        def score(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
            return case.flex(s, b, h, q, kv, **given)

        return compiled(*operands, score_mod=score, block_mask=blocks)

    return {
        "flex_without_ms": median(backward_of(out(still), leaves, grad), "cuda"),
        "flex_ms": median(backward_of(out(captures), [*leaves, *captures.values()], grad), "cuda"),
    }


def backward_of(out: Any, leaves: list[Any], grad: Any) -> Callable[[], object]:
    """What computes the gradients of ``leaves``."""
    import torch

    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def medians(
    first: Callable[[], object], second: Callable[[], object], device: str
) -> tuple[float, float]:
    """Median milliseconds of both, by turns: a GPU that gets warm slows down."""
    rounds = [(median(first, device), median(second, device)) for _ in range(_ROUNDS)]
    times = zip(*rounds, strict=True)
    return statistics.median(next(times)), statistics.median(next(times))


def median(call: Callable[[], object], device: str) -> float:
    """Median milliseconds of ``call``; on CPUs, where only tests measure, those of one."""
    if device == "cpu":
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3
    from triton.testing import do_bench

    return float(do_bench(call, warmup=100, rep=300, return_mode="median"))


def main() -> int:
    """Parse the command line, measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(NAMES), help="comma-separated")
    parser.add_argument("--shape", default="2x16x8192x128", help="BxHxSxD")
    parser.add_argument("--flex", action="store_true", help="FlexAttention beside it: minutes")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    names = options.cases.split(",")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"there is no case {unknown[0]}; there are: {', '.join(NAMES)}")
    try:
        batch, heads, length, dim = map(int, options.shape.split("x"))
    except ValueError:
        parser.error(f"a shape is BxHxSxD, as 2x16x8192x128, not {options.shape}")
    import torch

    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    for name in names:
        row = measure(name, (batch, heads, length, dim), options.flex)
        rows.append(row)
        print(json.dumps(row), file=sys.stderr, flush=True)
        path = common.write("gradients", "cuda", rows, options.output)
        torch.cuda.empty_cache()
    common.print_table(rows, [column for column in COLUMNS if any(column in row for row in rows)])
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
