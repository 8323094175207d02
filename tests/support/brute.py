"""Kinds of tiles by looking at every pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.backends.base import Call
from attndsl.backends.dense.interpret import evaluate
from attndsl.backends.tiled.tile_kinds import Grid, grid_of
from attndsl.passes.evaluate import Environment
from attndsl.passes.evaluate import evaluate as value_of
from attndsl.pipeline import lower
from attndsl.source import Source

if TYPE_CHECKING:
    from attndsl.passes.lowered import Lowered
    from attndsl.passes.tiles.tile_plan import Segment


def lowered_of(text: str) -> Lowered:
    return lower(Source(text), {})


def call_of(
    lowered: Lowered,
    q_len: int,
    kv_len: int,
    *,
    batch: int = 1,
    heads: int = 1,
    offsets: tuple[int, int] = (0, 0),
    **captures: torch.Tensor | int,
) -> Call:
    """A call without q, k and v to speak of."""
    q, k = torch.empty(batch, heads, q_len, 1), torch.empty(batch, heads, kv_len, 1)
    sizes = {"batch": batch, "heads": heads, "kv_heads": heads, "head_dim": 1}
    sizes |= {"q_len": q_len, "kv_len": kv_len}
    program = lowered.program
    tensors = {t.name: captures[t.name] for t in program.tensors}
    params = {p.name: captures[p.name] for p in program.params}
    return Call(q, k, k, 1.0, sizes, tensors, params, *offsets)  # type: ignore[arg-type]


def true_kinds(lowered: Lowered, call: Call, block_m: int, block_n: int) -> torch.Tensor:
    """0 where no pair of a tile is live, 2 where all are, 1 otherwise."""
    grid: Grid = grid_of(call, block_m, block_n)
    sparsity, (rows, columns) = lowered.sparsity, grid.shape
    batch = call.q.shape[0] if sparsity.by_batch else 1
    heads = call.q.shape[1] if sparsity.by_head else 1
    q_len, kv_len = call.q.shape[2], call.k.shape[2]
    kinds = torch.full((batch, heads, rows, columns), 2, dtype=torch.int8)
    if sparsity.mask is None:
        return kinds
    (live,) = evaluate((sparsity.mask,), grid.scope)
    live = live.expand(batch, heads, q_len, kv_len)
    for i in range(rows):
        for j in range(columns):
            tile = live[:, :, i * block_m : (i + 1) * block_m, j * block_n : (j + 1) * block_n]
            tile = tile.flatten(2)
            kinds[:, :, i, j] = tile.any(2).to(torch.int8) + tile.all(2).to(torch.int8)
    return kinds


def visited(segments: tuple[Segment, ...], known: dict[str, int]) -> list[int]:
    """Indices of the tiles of a plan's segments, in their order."""
    found: list[int] = []
    for segment in segments:
        if segment.guard is None or value_of(segment.guard, Environment(known)):
            bounds = (value_of(x, Environment(known)) for x in (segment.start, segment.stop))
            found += range(*map(int, bounds), segment.step)
    return found
