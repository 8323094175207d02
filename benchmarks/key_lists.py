"""Attention over lists of keys: forward, backward, and what the lists themselves cost (GPU).

    python benchmarks/key_lists.py [--cases REGEX] [--device cuda] [--quick] [--output FILE]

Lists are random and sorted, those of a causal case of earlier keys. Operations are those of listed
pairs, or of causal pairs where lists are of single keys: two products forward, five backward.
``forward_ms`` and ``backward_ms`` are of whole calls, ``given_ms`` of a forward whose list is a map
of bools that an earlier call has found the tiles of: the rest is what a new list costs.
``error`` is the largest distance of some rows of the output from those of plain torch in fp64,
relative to the largest element. ``flex_ms`` and ``flex_backward_ms`` are FlexAttention's, compiled,
with the lists as a BlockMask.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import attndsl

import common

if TYPE_CHECKING:
    from collections.abc import Callable

DIM, ROUNDS, CALLS = 128, 5, 10
_CHECKED_ROWS = 3


@dataclass(frozen=True)
class Case:
    """Lists of one kind, and their shape."""

    name: str
    heads: int
    kv_heads: int
    length: int
    keys: int
    """Keys of a block; 1 where lists are of single keys."""
    queries: int
    """Queries that share a list."""
    listed: int
    """Elements of a list."""
    causal: bool = False
    alike: bool = False
    """True if pairs of neighbouring lists share most elements."""

    @property
    def condition(self) -> str:
        """The mask, with ``chosen`` for the list."""
        rows = "b, q" if self.keys == 1 else f"b, hkv, q // {self.queries}"
        key = "kv" if self.keys == 1 else f"kv // {self.keys}"
        return f"{'causal() and ' * self.causal}{key} in chosen[{rows}, :]"

    @property
    def pairs(self) -> float:
        """Pairs of positions that count, of all heads."""
        if self.keys == 1:
            return self.heads * self.length**2 / 2
        return float(self.heads * self.length * self.listed * self.keys)


CASES = (
    Case("video, 64 x 64", 16, 16, 32768, 64, 64, 64),
    Case("video, 64 x 64, neighbours alike", 16, 16, 32768, 64, 64, 64, alike=True),
    Case("video, 64 x 64, long", 16, 16, 109632, 64, 64, 64),
    Case("video, 128 x 128", 16, 16, 32768, 128, 128, 32),
    Case("blocks of 128 a query", 64, 4, 32768, 128, 1, 16, causal=True),
    Case("2048 tokens a query", 16, 16, 16384, 1, 1, 2048, causal=True),
)
TINY = (Case("tiny blocks", 4, 2, 64, 8, 8, 3), Case("tiny tokens", 4, 2, 48, 1, 1, 9, causal=True))


def lists_of(case: Case, device: str) -> torch.Tensor:
    """(1, kv heads, rows, listed), or (1, rows, listed) where all heads share them."""
    dice = torch.Generator(device).manual_seed(1)
    rows, blocks = case.length // case.queries, case.length // case.keys
    ends = torch.arange(1, rows + 1, device=device)[:, None] * case.queries
    first = torch.arange(blocks, device=device) * case.keys
    found = []
    for _ in range(1 if case.keys == 1 else case.kv_heads):
        drawn = torch.rand(rows, blocks, device=device, generator=dice)
        if case.alike:
            drawn = drawn[::2].repeat_interleave(2, 0)[:rows] + 0.15 * drawn
        if case.causal:
            drawn = torch.where(first >= ends, -1.0, drawn)
        best = drawn.topk(case.listed)
        found.append(torch.where(best.values < 0, -1, best.indices).sort(-1).values)
    return torch.stack(found) if case.keys == 1 else torch.stack(found)[None]


def map_of(case: Case, chosen: torch.Tensor) -> torch.Tensor:
    """Bools in place of the lists."""
    blocks = case.length // case.keys
    places = torch.where(chosen < 0, blocks, chosen)
    found = torch.zeros(*chosen.shape[:-1], blocks + 1, dtype=torch.bool, device=chosen.device)
    return found.scatter_(-1, places, True)[..., :blocks].contiguous()


def milliseconds(call: Callable[[], object], device: str, quick: bool) -> float:
    """Median time of a call among several."""
    calls, times = 1 if quick else CALLS, []
    for turn in range(2 if quick else ROUNDS + 1):
        if device == "cpu":
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            times.append((time.perf_counter() - begin) * 1e3 / calls)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        if turn:
            times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def error_of(case: Case, chosen: torch.Tensor, tensors: list[torch.Tensor], out: Any) -> float:
    """See ``error`` above."""
    q, k, v = tensors
    live = map_of(case, chosen)
    worst = 0.0
    for head in {0, case.heads - 1}:
        own = head * case.kv_heads // case.heads
        for row in torch.linspace(0, case.length - 1, _CHECKED_ROWS).long().tolist():
            blocks = live[0, row] if case.keys == 1 else live[0, own, row // case.queries]
            there = blocks.repeat_interleave(case.keys)
            if case.causal:
                there = there & (torch.arange(case.length, device=q.device) <= row)
            score = k[0, own].double() @ q[0, head, row].double() * DIM**-0.5
            weights = score.masked_fill(~there, -torch.inf).softmax(0).nan_to_num(0.0)
            wanted = weights @ v[0, own].double()
            largest = wanted.abs().max().clamp(min=1e-6)
            worst = max(worst, float((out[0, head, row] - wanted).abs().max() / largest))
    return worst


def flex(case: Case, chosen: torch.Tensor, tensors: list[torch.Tensor], grad: torch.Tensor,
         quick: bool) -> dict[str, float]:  # fmt: skip
    """FlexAttention's times, for lists of blocks that it can have."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    numbers = torch.full(chosen.shape[:-1], case.listed, dtype=torch.int32, device=chosen.device)
    order = torch.zeros(*chosen.shape[:-1], case.length // case.keys, dtype=torch.int32,
                        device=chosen.device)  # fmt: skip
    order[..., : case.listed] = chosen
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(numbers), torch.zeros_like(order), numbers, order,
        BLOCK_SIZE=(case.queries, case.keys), seq_lengths=(case.length, case.length),
    )  # fmt: skip
    attend: Any = torch.compile(flex_attention, dynamic=False)

    def call() -> torch.Tensor:
        found: torch.Tensor = attend(*tensors, block_mask=mask)
        return found

    with torch.no_grad():
        forward = milliseconds(call, "cuda", quick)
    both = milliseconds(lambda: torch.autograd.grad(call(), tensors, grad), "cuda", quick)
    return {"flex_ms": forward, "flex_backward_ms": both - forward}


def row_of(case: Case, device: str, quick: bool) -> dict[str, Any]:
    """The figures of a case."""
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    options = {"device": device, "dtype": dtype, "requires_grad": True}
    tensors = [
        torch.randn(1, heads, case.length, DIM, **options)
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    ]
    grad, chosen = torch.randn_like(tensors[0]).detach(), lists_of(case, device)
    dims = "batch, q_len, n" if case.keys == 1 else "batch, kv_heads, rows, n"
    attention = attndsl.compile(f"tensor chosen[{dims}]: int\nmask = {case.condition}")
    looked_up = case.condition.replace(" in chosen[", "@").replace(", :]", "")
    key, _, rows = looked_up.rpartition(" and ")[2].partition("@")
    by_map = f"{'causal() and ' * case.causal}chosen[{rows}, {key}]"
    given = attndsl.compile(f"tensor chosen[{dims}]: bool\nmask = {by_map}")
    out = attention(*tensors, chosen=chosen)
    row: dict[str, Any] = {
        "case": case.name, "program": f"mask = {case.condition}",
        "error": error_of(case, chosen, [x.detach() for x in tensors], out.detach()),
    }  # fmt: skip
    live = map_of(case, chosen)
    with torch.no_grad():
        forward = milliseconds(lambda: attention(*tensors, chosen=chosen), device, quick)
        row["given_ms"] = milliseconds(lambda: given(*tensors, chosen=live), device, quick)

    def step() -> object:
        return torch.autograd.grad(attention(*tensors, chosen=chosen), tensors, grad)

    backward = milliseconds(step, device, quick) - forward
    work = 4 * case.pairs * DIM
    row |= {
        "forward_ms": forward, "forward_tflops": work / forward / 1e9,
        "backward_ms": backward, "backward_tflops": 2.5 * work / backward / 1e9,
    }  # fmt: skip
    if device != "cpu" and min(case.keys, case.queries) >= 128 and not case.causal:
        row |= flex(case, chosen, tensors, grad, quick)
    return row


def main(arguments: list[str] | None = None) -> int:
    """Print the figures, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", default="", help="of names that this is found in (a pattern)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(arguments)
    rows = []
    for case in TINY if asked.device == "cpu" else CASES:
        if re.search(asked.cases, case.name):
            rows.append(row_of(case, asked.device, asked.quick))
            print(" ".join(f"{name} {_told(x)}" for name, x in rows[-1].items()), flush=True)
    if rows and (asked.output is not None or not asked.quick):
        print(common.write("key_lists", asked.device, rows, asked.output))
    return int(any(not row["error"] < 0.02 for row in rows))


def _told(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"'{value}'"


if __name__ == "__main__":
    raise SystemExit(main())
