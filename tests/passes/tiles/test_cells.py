"""Conditions that are constant over cells of pairs are evaluated once a pair of cells."""

from __future__ import annotations

import pytest
import torch
from support.brute import call_of, lowered_of, true_kinds

from attndsl.backends.tiled import tile_kinds
from attndsl.backends.tiled.tile_kinds import grid_of, kinds_by_bounds
from attndsl.passes.tiles.cells import cells_of

LENGTHS = 150, 190
BLOCKS = torch.rand(1 << 12, generator=torch.Generator().manual_seed(0)).reshape(64, 64) < 0.3
WITHOUT_PAIRS = {
    "a map of blocks": "tensor m[r, c]: bool\nmask = m[q // 16, kv // 8]",
    "one apart a head": "tensor m[r, c]: bool\nmask = m[(q // 16 + h) % 9, kv // 8]",
    "with a shift": "tensor m[r, c]: bool\nmask = m[(q + 8) // 16, (kv >> 4) + 1]",
    "blocks in documents": "tensor t[c]: int\nmask = t[q // 32] * t[kv // 16] % 3 == 1",
    "tiles of a video": "mask = sta2d(4, 16, 2, 1) and ((q // 16 ^ kv // 16) & 2) == 0",
    "halves": "tensor m[r, c]: bool\nmask = m[q // 16, kv // 16] or (q < 64 and kv // 32 < 2)",
}
WITH_PAIRS = {
    "causal in blocks": "tensor m[r, c]: bool\nmask = m[q // 16, kv // 8] and q >= kv",
    "or near": "tensor m[r, c]: bool\nmask = m[q // 16, kv // 8] or abs(q - kv) < 3",
    "not": "tensor m[r, c]: bool\nmask = not (m[q // 16, kv // 8] or q < kv)",
    "jumps within cells": "tensor m[r, c]: bool\nmask = m[((q + 1) % 64 + 7) // 8, kv // 8]",
    "wraps": "tensor m[r, c]: bool\nmask = m[(q + 9223372036854775800) // 16 % 7, kv // 16]",
}


@pytest.mark.parametrize("name", [*WITHOUT_PAIRS, *WITH_PAIRS])
@pytest.mark.parametrize("offsets", [(0, 0), (-20, 37)])
def test_kinds_are_exact(
    name: str, offsets: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = lowered_of({**WITHOUT_PAIRS, **WITH_PAIRS}[name])
    captures = {"m": BLOCKS, "t": torch.arange(64) % 5}
    call = call_of(lowered, *LENGTHS, heads=2, offsets=offsets, **captures)
    if name in WITHOUT_PAIRS:
        monkeypatch.setattr(tile_kinds, "_tile_masks", None)
    for block_m, block_n in [(16, 16), (64, 32), (13, 7)]:
        found = kinds_by_bounds(lowered.sparsity, grid_of(call, block_m, block_n))
        assert torch.equal(found, true_kinds(lowered, call, block_m, block_n))


@pytest.mark.parametrize("mask", ["q >= kv", "q // 4 == kv // 8", "q % 16 >= kv // 32"])
def test_small_cells_are_not_worth_it(mask: str) -> None:
    assert not cells_of(lowered_of(f"mask = {mask}").program.mask)


def test_looked_up_positions_have_cells_too() -> None:
    lowered = lowered_of("tensor m[r, c]: bool\nmask = m[q // 16, kv // 8]")
    call = call_of(lowered, 100, 100, m=BLOCKS)
    index = torch.randint(0, 300, (100,), generator=torch.Generator().manual_seed(1))
    call = call._replace(q_index=index, kv_index=index.flip(0))
    found = kinds_by_bounds(lowered.sparsity, grid_of(call, 16, 32))
    assert torch.equal(found, true_kinds(lowered, call, 16, 32))
