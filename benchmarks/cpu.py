"""The CPU backend beside torch's scaled_dot_product_attention, on the same tensors.

    python benchmarks/cpu.py [--quick] [--output FILE]

Everything is measured in one process, turn by turn, so that what else runs on the machine costs
both alike; milliseconds, the median of several turns. SDPA gets ``is_causal`` where that says it,
and a dense bool or float mask where not, made beforehand. The last row is a step of one query over
a cache that grows, on one thread; SDPA does it without a mask. ``difference`` is the greatest
distance of the outputs and gradients, so that no figure is that of a wrong result.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attndsl

import common

if TYPE_CHECKING:
    from collections.abc import Callable

    Tensors = tuple[torch.Tensor, ...]

COLUMNS = ["case", "direction", "S", "attndsl_ms", "sdpa_ms", "speedup", "difference"]
BATCH, HEADS, DIM = 1, 4, 64
LENGTHS = range(200, 700)
"""Of a cache that grows."""


@dataclass(frozen=True)
class Case:
    """One program, and how SDPA says the same."""

    name: str
    program: str
    length: int
    forward_only: bool = False
    mask: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    """Of query and key positions: SDPA's mask; None for ``is_causal``."""


CASES = (
    Case("causal", "causal()", 2048, forward_only=True),
    Case("causal", "causal()", 2048),
    Case("causal", "causal()", 4096),
    Case(
        "window256",
        "causal() and q - kv < 256",
        8192,
        mask=lambda q, kv: (q >= kv) & (q - kv < 256),
    ),
    Case(
        "documents1000",
        "causal() and q // 1000 == kv // 1000",
        8192,
        mask=lambda q, kv: (q >= kv) & (q // 1000 == kv // 1000),
    ),
    Case(
        "dilated1024x4",
        "dilated(1024, 4)",
        4096,
        mask=lambda q, kv: (q >= kv) & (q - kv < 1024) & ((q - kv) % 4 == 0),
    ),
    Case(
        "alibi",
        "mask = causal(); score = score + alibi()",
        2048,
        mask=lambda q, kv: torch.where(
            q >= kv, -torch.exp2(-2.0 * torch.arange(1, 5).view(4, 1, 1)) * (q - kv), -torch.inf
        ),
    ),
)


def milliseconds(calls: list[Callable[[], object]], turns: int) -> list[float]:
    """Median time of each call, one after the other in each turn."""
    found: list[list[float]] = [[] for _ in calls]
    for turn in range(turns + 1):
        for call, times in zip(calls, found, strict=True):
            begin = time.perf_counter()
            call()
            if turn:  # the first one warms up
                times.append((time.perf_counter() - begin) * 1e3)
    return [statistics.median(times) for times in found]


def row(case: Case, turns: int) -> dict[str, Any]:
    """Times of one case, and how far its results are from SDPA's."""
    shape = (BATCH, HEADS, case.length, DIM)
    q, k, v = (torch.randn(shape, requires_grad=not case.forward_only) for _ in range(3))
    seed = torch.randn(shape)
    attention = attndsl.compile(case.program, backend="cpu")
    mask = None
    if case.mask is not None:
        mask = case.mask(torch.arange(case.length)[:, None], torch.arange(case.length))

    def ours() -> Tensors:
        return results(attention(q, k, v))

    def theirs() -> Tensors:
        return results(sdpa(q, k, v, attn_mask=mask, is_causal=mask is None))

    def results(out: torch.Tensor) -> Tensors:
        if case.forward_only:
            return (out,)
        return (out, *torch.autograd.grad(out, (q, k, v), seed))

    pairs = zip(ours(), theirs(), strict=True)
    difference = max(float((a - b).detach().abs().max()) for a, b in pairs)
    attndsl_ms, sdpa_ms = milliseconds([ours, theirs], turns)
    direction = "forward" if case.forward_only else "forward and backward"
    return {
        **_shape(case.name, direction, case.length),
        "attndsl_ms": attndsl_ms,
        "sdpa_ms": sdpa_ms,
        "speedup": sdpa_ms / attndsl_ms,
        "difference": difference,
    }


def _shape(case: str, direction: str, length: int) -> dict[str, Any]:
    """What a row says beside its figures."""
    return {
        "case": case,
        "direction": direction,
        "dtype": "fp32",
        "B": BATCH,
        "H": HEADS,
        "Hkv": HEADS,
        "S": length,
        "D": DIM,
        "backend": "cpu",
        "threads": torch.get_num_threads(),
    }


def growing_cache(program: str, turns: int) -> dict[str, Any]:
    """Times of one query over a cache that is one key longer each time, ms a step."""
    room = max(LENGTHS)
    q = torch.randn(BATCH, HEADS, 1, DIM)
    k, v = torch.randn(2, BATCH, HEADS, room, DIM)
    attention = attndsl.compile(program, backend="cpu")

    def ours(length: int) -> torch.Tensor:
        return attention(q, k[:, :, :length], v[:, :, :length], q_offset=length - 1)

    def theirs(length: int) -> torch.Tensor:
        return sdpa(q, k[:, :, :length], v[:, :, :length])

    def steps(call: Callable[[int], object]) -> Callable[[], None]:
        def every() -> None:
            for length in LENGTHS:
                call(length)

        return every

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        difference = float((ours(room) - theirs(room)).abs().max())
        both = milliseconds([steps(ours), steps(theirs)], turns)
    torch.set_num_threads(threads)
    ours_ms, sdpa_ms = (ms / len(LENGTHS) for ms in both)
    return {
        **_shape("growing cache", "forward", room),
        "threads": 1,
        "attndsl_ms": ours_ms,
        "sdpa_ms": sdpa_ms,
        "speedup": sdpa_ms / ours_ms,
        "difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few turns")
    parser.add_argument("--output", type=Path, help="result file")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        turns = 3 if options.quick else 21 if case.length <= 2048 else 7
        rows.append(row(case, turns))
        common.write("cpu", "cpu", rows, options.output)
    rows.append(growing_cache("causal()", 3 if options.quick else 21))
    common.write("cpu", "cpu", rows, options.output)
    common.print_table(rows, COLUMNS)


if __name__ == "__main__":
    main()
