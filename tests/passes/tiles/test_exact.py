"""Quasi-affine masks: kinds by closed form and by evaluation equal brute force everywhere."""

from __future__ import annotations

import pytest
import torch
from support.brute import call_of, lowered_of, true_kinds

from attndsl.backends.tiled.tile_kinds import grid_of, kinds_by_bounds, kinds_by_segments
from attndsl.passes.tiles.plan import DIRECTIONS

PRELUDE = [
    "causal()", "causal_lower_right()", "sliding_window(37)", "local_window(20)", "prefix_lm(50)",
    "dilated(100, 4)", "strided(30, 40)", "block_diagonal(50)", "block_causal(48)",
    "global_tokens(20)", "natten2d(20, 10, 5, 3)", "sta2d(4, 16, 2, 1)", "sta3d(2, 2, 16, 1, 2, 1)",
    "block_diffusion(64, 16)", "where(q >= kv, true, kv < 3)", "q // 16 == kv // 16 and q >= kv",
    "not (q - kv > 5)", "abs(q - kv) <= 9 or kv % 64 == 0", "((q ^ 5) & 8) == 0 and kv < 100",
    "(q << 1) > kv >> 1", "q < 0", "q >= 0",
]  # fmt: skip


@pytest.mark.parametrize("mask", PRELUDE)
@pytest.mark.parametrize("offsets", [(0, 0), (37, 5)])
def test_prelude_masks(mask: str, offsets: tuple[int, int]) -> None:
    lowered = lowered_of(f"mask = {mask}")
    shifted = offsets != (0, 0)
    for (q_len, kv_len), (block_m, block_n) in [
        ((200, 200), (64, 32)),
        ((128, 300), (16, 128)),
        ((257, 65), (32, 48)),
    ]:
        call = call_of(lowered, q_len, kv_len, offsets=offsets)
        grid = grid_of(call, block_m, block_n)
        wanted = true_kinds(lowered, call, block_m, block_n)
        assert torch.equal(kinds_by_bounds(lowered.sparsity, grid), wanted)
        for direction in DIRECTIONS.values():
            loop = lowered.sparsity.loop(direction, block_m, block_n, shifted, False)
            if loop.listed is None:
                found = kinds_by_segments(loop, direction, lowered.sparsity, grid)
                assert torch.equal(found, wanted), direction.name
