"""Quasi-affine masks: kinds by closed form and by evaluation equal brute force everywhere."""

from __future__ import annotations

import pytest
import torch
from support.brute import call_of, lowered_of, true_kinds, visited

from attndsl.backends.emit.loops import turn_of
from attndsl.backends.tiled.tile_kinds import grid_of, kinds_by_bounds, kinds_by_segments
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.tiles.tile_plan import BACKWARD_KV, DIRECTIONS

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


@pytest.mark.parametrize("mask", [*PRELUDE, "kv >= q", "kv >= q and kv - q < 90"])
@pytest.mark.parametrize("offsets", [(0, 0), (37, 5)])
def test_owners_that_take_turns_know_of_each_other(mask: str, offsets: tuple[int, int]) -> None:
    """A turn that never comes would hang: owners count exactly those that visit a tile."""
    sparsity = lowered_of(f"mask = {mask}").sparsity
    sizes = [((200, 200), (64, 32)), ((128, 300), (16, 128)), ((257, 65), (32, 48))]
    for (q_len, kv_len), (block_m, block_n) in [*sizes, ((500, 300), (64, 128))]:
        loop = sparsity.loop_in_turn(BACKWARD_KV, block_m, block_n, offsets != (0, 0), False)
        if loop.listed is not None:
            assert not loop.visitors
            continue
        known = {"q_len": q_len, "kv_len": kv_len, "$q_offset": offsets[0], "heads": 3}
        known |= {"$kv_offset": offsets[1], "h": 1, "b": 1}
        queries, keys = -(-q_len // block_m), -(-kv_len // block_n)
        turns: dict[int, list[int]] = {query: [] for query in range(queries)}
        for key in reversed(range(keys)) if loop.descending else range(keys):
            own = {**known, "$tile": key, "$tiles": queries, "$whole": q_len // block_m}
            seen = [*visited(loop.full, own), *visited(loop.partial, own)]
            assert len(set(seen)) == len(seen)
            for query in seen:
                along = {**known, "$tile": query, "$tiles": keys, "$own": key}
                turns[query].append(int(evaluate(turn_of(loop), Environment(along))))
        assert all(found == list(range(len(found))) for found in turns.values())
        for query, found in turns.items():
            along = {**known, "$tile": query, "$tiles": keys}
            assert len(visited(loop.visitors, along)) == len(found)


@pytest.mark.parametrize(
    ("mask", "two_sided", "one_way"),
    [
        ("causal()", False, True), ("kv >= q", False, True), ("sliding_window(1024)", True, True),
        ("prefix_lm(1000)", False, True), ("q % 1000 < kv", False, False),
    ],
)  # fmt: skip
def test_owners_that_take_turns_go_one_way(mask: str, two_sided: bool, one_way: bool) -> None:
    sparsity = lowered_of(f"mask = {mask}").sparsity
    loop = sparsity.loop_in_turn(BACKWARD_KV, 64, 128, False, False)
    assert (loop.two_sided, bool(loop.full)) == (two_sided, one_way)
    single = sparsity.loop_in_turn(BACKWARD_KV, 64, 128, False, False, peeled=False)
    assert not single.full
