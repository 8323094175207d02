"""Masks on both sides of any mask, pair by pair, and the keys that later queries see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.brute import call_of, lowered_of

import attndsl
from attndsl.backends.dense.interpret import LeafValues, evaluate
from attndsl.backends.tiled.tile_kinds import grid_of, kinds_by_segments
from attndsl.errors import ArgumentError
from attndsl.ir import const
from attndsl.passes.tiles.affine import why_not_affine
from attndsl.passes.tiles.mask_bounds import lower, upper
from attndsl.passes.tiles.retained_keys import projection
from attndsl.passes.tiles.tile_plan import DIRECTIONS, EMPTY, FORWARD, FULL, PARTIAL

AFFINE = [
    "q >= kv", "q - kv < 9", "kv < 3", "q // 8 == kv // 8", "(q - kv) % 3 == 0", "abs(q - kv) < 5",
    "kv % 7 == 0", "q < 20", "kv >= q - 4", "min(q, 30) >= kv",
]  # fmt: skip
OPAQUE = ["ids[q] == ids[kv]", "sin(float(kv)) > 0.2", "((q ^ kv) & 5) == 0", "q * kv % 5 == 1"]
CONDITIONS = st.sampled_from(AFFINE + OPAQUE)
MASKS = st.recursive(
    CONDITIONS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" and ", " or "]), inner).map(
            lambda x: f"({''.join(x)})"
        ),
        inner.map(lambda x: f"not ({x})"),
    ),
    max_leaves=5,
)
LENGTH = 60
IDS = torch.arange(2 * LENGTH) // 7 % 5


def live(mask, q_len=LENGTH, kv_len=LENGTH):
    """Which pairs are live, by torch."""
    positions = {
        "q": torch.arange(q_len).view(1, 1, -1, 1), "kv": torch.arange(kv_len).view(1, 1, 1, -1)
    }  # fmt: skip
    scope = LeafValues(
        positions, {}, {}, {"ids": IDS}, torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    )
    (found,) = evaluate((mask,), scope)
    return found.expand(1, 1, q_len, kv_len)[0, 0]


@settings(max_examples=60, deadline=None)
@given(MASKS)
def test_both_sides(text):
    mask = lowered_of(f"tensor ids[n]: int\nmask = {text}").program.mask
    if mask is None:
        return
    above, below = upper(mask), lower(mask)
    assert why_not_affine(above) is None
    assert why_not_affine(below) is None
    pairs = live(mask)
    assert bool((live(below) <= pairs).all())
    assert bool((pairs <= live(above)).all())


def test_what_sets_decide_is_its_own_bound():
    mask = lowered_of("causal() and (q - kv < 9 or kv < 3)").program.mask
    assert upper(mask) is mask
    assert lower(mask) is mask


def test_undecided_conditions():
    documents = lowered_of("tensor ids[n]: int\nmask = q >= kv and ids[q] == ids[kv]")
    mask = documents.program.mask
    assert lower(mask) is const(False)
    assert upper(mask) is lowered_of("q >= kv").program.mask
    negated = lowered_of(
        "tensor ids[n]: int\nmask = q >= kv and not ids[q] == ids[kv]"
    ).program.mask
    assert upper(negated) is upper(mask)
    score = lowered_of("mask = score > 0.5 or kv < 4").program.mask
    assert upper(score) is const(True)
    assert lower(score) is lowered_of("kv < 4").program.mask


@settings(max_examples=60, deadline=None)
@given(MASKS, st.integers(0, 50), st.integers(0, LENGTH))
def test_no_key_that_a_later_query_sees_is_left_out(text, next_q, keys):
    mask = lowered_of(f"tensor ids[n]: int\nmask = {text}").program.mask
    if mask is None:
        return
    found = projection(mask)
    ranges = found.ranges(next_q, keys, {})
    kept = {key for each in ranges for key in each}
    seen = live(mask, 2 * LENGTH, LENGTH)[next_q:, :keys].any(0).nonzero().flatten().tolist()
    assert set(seen) <= kept
    # Beyond some hundred rows these masks repeat themselves.
    if found.exact:
        assert kept == set(seen)
        assert sum(map(len, ranges)) == len(kept)


def test_programs():
    def kept(text, *, next_q=1000, kv_len=1000, **given):
        return str(attndsl.compile(text).retained(next_q, kv_len, **given))

    assert kept("causal()") == "keys 0 to 999; 1000 of 1000"
    assert kept("score") == "keys 0 to 999; 1000 of 1000"
    assert kept("sliding_window(64)") == "keys 937 to 999; 63 of 1000"
    assert kept("sliding_window(64) or kv < 4") == "keys 0 to 3, 937 to 999; 67 of 1000"
    assert kept("block_diagonal(64)") == "keys 960 to 999; 40 of 1000"
    assert kept("kv < 0") == "no key; 0 of 1000"
    assert (
        kept("kv % 100 == 0 and sliding_window(300)")
        == "keys 800 to 900 in steps of 100; 2 of 1000"
    )
    assert kept("kv >= kv_len - 3") == "keys 997 to 999; 3 of 1000"
    documents = "tensor doc[batch, kv_len]: int\nmask = document_causal(doc) and q - kv < 50"
    assert kept(documents) == "keys 951 to 999; 49 of 1000, at most"
    reach = "tensor reach[heads]: int\nmask = causal() and q - kv < reach[h]"
    assert kept(reach, heads=3, reach=torch.tensor([4, 50, 7])) == "keys 951 to 999; 49 of 1000"
    one = "tensor at[heads]: int\nmask = kv == at[h]"
    assert kept(one, heads=3, at=torch.tensor([4, 50, 5])) == "keys 4 to 5, 50; 3 of 1000"
    assert kept("param w: int\nmask = sliding_window(w)", w=11) == "keys 990 to 999; 10 of 1000"
    shifted = "tensor start[batch]: int\nmask = kv >= start[b]"
    assert kept(shifted, b=1, start=torch.tensor([0, 990])) == "keys 990 to 999; 10 of 1000"


def test_pages_without_kept_keys():
    kept = attndsl.compile("sliding_window(64) or kv < 4").retained(1000, 1000)
    assert kept.dead_pages(16) == tuple(range(1, 58))
    assert kept.dead_pages(1000) == ()
    assert len(kept) == 67
    assert 3 in kept
    assert 4 not in kept
    assert list(kept)[:5] == [0, 1, 2, 3, 937]
    assert kept.mask().nonzero().flatten().tolist() == list(kept)
    with pytest.raises(ArgumentError, match="page size is 0"):
        kept.dead_pages(0)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"next_q": -1}, "next_q is -1"),
        ({"kv_len": 1 << 30}, "kv_len is"),
        ({"heads": 3, "kv_heads": 2}, "heads is 3 and kv_heads is 2"),
        ({"b": True}, "b is True"),
        ({}, "the mask reads w, and it is not given"),
    ],
)
def test_bad_input(given, match):
    attention = attndsl.compile("param w: int\nmask = sliding_window(w)")
    with pytest.raises(ArgumentError, match=match):
        attention.retained(**{"next_q": 5, "kv_len": 5, **given})


def test_questions_do_not_run_out_of_operations():
    attention = attndsl.compile("natten2d(64, 64, 7, 7)")
    assert len({str(attention.retained(n, 4096)) for n in range(2000, 4000, 5)}) > 100


@settings(max_examples=60, deadline=None)
@given(MASKS)
def test_formulas_bound_the_tiles_of_any_mask(text):
    """Tiles that are left out have no live pair, FULL ones no dead pair, whatever is looked up."""
    lowered = lowered_of(f"tensor ids[n]: int\nmask = {text}")
    mask, sparsity = lowered.program.mask, lowered.sparsity
    if mask is None:
        return
    call = call_of(lowered, LENGTH, LENGTH, ids=IDS)
    grid = grid_of(call, 8, 16)
    pairs = live(mask)
    for direction in DIRECTIONS.values():
        loop = sparsity.loop(direction, 8, 16, False, False, bounded=True)
        if loop.listed is not None:
            continue
        kinds = kinds_by_segments(loop, direction, sparsity, grid)[0, 0]
        for i in range(kinds.shape[0]):
            for j in range(kinds.shape[1]):
                tile = pairs[8 * i : 8 * i + 8, 16 * j : 16 * j + 16]
                assert kinds[i, j] != EMPTY or not tile.any()
                assert kinds[i, j] != FULL or tile.all()


def test_a_tree_is_full_below_its_context():
    text = """
tensor context[batch]: int
tensor lengths[batch]: int
tensor ancestor[q_len, n]: bool
mask = kv < lengths[b] and (kv < context[b] or ancestor[q, max(kv - context[b], 0)])
"""
    lowered = lowered_of(text)
    captures = {
        "context": torch.tensor([70, 0]), "lengths": torch.tensor([78, 5]),
        "ancestor": torch.ones(8, 8, dtype=torch.bool),
    }  # fmt: skip
    grid = grid_of(call_of(lowered, 8, 100, batch=2, **captures), 8, 16)
    assert lowered.sparsity.loop(FORWARD, 8, 16, False, False).listed is not None
    loop = lowered.sparsity.loop(FORWARD, 8, 16, False, False, bounded=True)
    kinds = kinds_by_segments(loop, FORWARD, lowered.sparsity, grid)
    assert kinds[0, 0, 0].tolist() == [FULL] * 4 + [PARTIAL, EMPTY, EMPTY]
    assert kinds[1, 0, 0].tolist() == [PARTIAL] + [EMPTY] * 6
