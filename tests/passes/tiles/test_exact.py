"""Quasi-affine masks: kinds by closed form and by evaluation equal brute force everywhere."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from brute import Masks, call_of, lowered_of, true_kinds
from hypothesis import given, settings
from hypothesis import strategies as st

from attndsl.backends.tiling import grid_of, kinds_by_bounds, kinds_by_segments, segment_kinds
from attndsl.passes.tiles.plan import DIRECTIONS, FULL

BLOCKS = (16, 32, 48, 64, 128, 256)
LENGTHS = (1, 17, 30, 128, 190, 200, 257, 400)
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


COUNTS: Counter[str] = Counter()


def check_random_mask(seed: int) -> None:
    """One mask at two sizes, offsets and directions."""
    dice = random.Random(seed)
    lowered = lowered_of(Masks(seed).mask())
    if lowered.sparsity.mask is None:
        return
    assert lowered.sparsity.not_affine is None
    block_m, block_n = dice.choice(BLOCKS), dice.choice(BLOCKS)
    offsets = dice.choice([(0, 0), (0, 0), (5, 0), (100, 7), (-20, 300)])
    direction = dice.choice(list(DIRECTIONS.values()))
    loop = lowered.sparsity.loop(direction, block_m, block_n, offsets != (0, 0), False)
    COUNTS["listed" if loop.listed else "closed"] += 1
    for _ in range(2):
        call = call_of(
            lowered, dice.choice(LENGTHS), dice.choice(LENGTHS), offsets=offsets,
            n=dice.choice([0, 5, 64, 100, 300]),
        )  # fmt: skip
        grid = grid_of(call, block_m, block_n)
        wanted = true_kinds(lowered, call, block_m, block_n)
        if loop.listed is None:
            found = kinds_by_segments(loop, direction, lowered.sparsity, grid)
            # What kernels loop over may differ in ragged tiles only, and only with more care.
            used = segment_kinds(loop, direction, grid, (1, 1))
            used = used if direction.along == "kv" else used.transpose(2, 3)
            assert not ((used == 0) & (wanted != 0)).any()
            assert not ((used == FULL) & (wanted != FULL)).any()
        else:
            found = kinds_by_bounds(lowered.sparsity, grid)
        assert torch.equal(found, wanted)


# A fifth of a minute each; what differs between them is the seed alone.
@pytest.mark.parametrize(
    "share", [0, *(pytest.param(share, marks=pytest.mark.slow) for share in range(1, 8))]
)
def test_2000_random_masks(share: int) -> None:
    for seed in range(share, 2000, 8):
        check_random_mask(seed)
    assert COUNTS["closed"] > COUNTS["listed"]


@settings(max_examples=30, deadline=None)
@given(st.integers(10_000, 1 << 40))
def test_other_random_masks(seed: int) -> None:
    check_random_mask(seed)
