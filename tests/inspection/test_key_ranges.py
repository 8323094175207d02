"""Which keys rows see, held to the map of the tiles."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.errors import ArgumentError

DOC = torch.arange(700) // 130
TEXTS = {
    "causal()": {},
    "causal() and q - kv < 90": {},
    "causal() and q - kv < 64 * (h + 1)": {},
    "causal() and (q - kv < 64 or kv < 10)": {},
    "dilated(200, 3)": {},
    "block_diffusion(kv_len // 2, 32)": {},
    "kv > q + 1000": {},
    "true": {},
    "natten2d(20, 35, 5, 5)": {},
    "tensor doc[kv_len]: int\nmask = causal() and doc[q] == doc[kv]": {"doc": DOC},
    "tensor n[batch]: int\nmask = kv < n[b]": {"n": torch.tensor([100, 650])},
    "tensor x[q_len, kv_len]: bool\nmask = x[q, kv]": {
        "x": torch.rand(700, 700, generator=torch.Generator().manual_seed(0)) < 0.0005
    },
}


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("block", [(128, 128), (64, 32), (100, 77)])
def test_all_live_tiles_are_within_reach(text, block):
    attention, captures = attndsl.compile(text), TEXTS[text]
    reach = attention.reach(700, 700, *block, heads=3, captures=captures)
    live = attention.tiles(700, 700, *block, heads=3, captures=captures).kinds != 0
    # A closed form may visit one tile more in a row at ragged ends.
    assert 0 <= int(reach.work.sum() - live.sum()) <= live.shape[0] * live.shape[1] * live.shape[2]
    assert reach.maps == live.shape[0] * live.shape[1]
    for row, columns in enumerate(live.flatten(0, 1).any(0)):
        seen = {n // block[1] for a, b in reach.ranges(row) for n in range(a, b)}
        assert set(columns.nonzero().flatten().tolist()) <= seen
        assert all(a < b <= 700 for a, b in reach.ranges(row))


def test_a_million_keys_take_no_map():
    reach = attndsl.compile("causal() and q - kv < 1024").reach(1 << 20, 1 << 20)
    assert reach.ranges(100) == ((11776, 12928),)
    assert str(reach) == "73692 of 67108864 tiles of 128 queries x 128 keys are live"
    assert reach.starts.nbytes < 1 << 20


def test_bounds_stand_in_where_there_are_too_many_pairs(monkeypatch):
    from attndsl.inspection import key_ranges as module

    attention = attndsl.compile("tensor x[n, m]: bool\nmask = q >= kv and x[q % 7, kv % 7]")
    x = torch.zeros(7, 7, dtype=torch.bool)
    exact = attention.reach(600, 600, x=x)
    monkeypatch.setattr(module, "_MOST_PAIRS", 1)
    sound = attention.reach(600, 600, x=x)
    assert int(exact.work.sum()) <= int(sound.work.sum())
    monkeypatch.setattr(module, "_MOST_TILES", 1)
    with pytest.raises(ArgumentError, match="25 tiles to look at"):
        attention.reach(600, 600, x=x)


LOOKED_UP = {
    "tensor doc[kv_len]: int\nmask = causal() and doc[q] == doc[kv]": {"doc": DOC},
    "tensor doc[batch, kv_len]: int\nmask = doc[b, q] == doc[b, kv]": {
        "doc": torch.stack([DOC, torch.arange(700) // 40])
    },
    "tensor w[kv_len]: float\nmask = causal() and (w[kv] > 0.99 or q - kv < 9 * (h + 1))": {
        "w": torch.rand(700, generator=torch.Generator().manual_seed(0))
    },
    "tensor w[kv_len]: float\nmask = w[kv] + w[q] > 1.99": {
        "w": torch.rand(700, generator=torch.Generator().manual_seed(1))
    },
    "tensor doc[kv_len]: int\nmask = doc[q] > doc[kv]": {"doc": torch.zeros(700).long()},
    "tensor doc[kv_len]: int\nmask = doc[q] >= doc[kv]": {"doc": torch.zeros(700).long()},
}


@pytest.mark.parametrize("text", LOOKED_UP)
@pytest.mark.parametrize("block", [(4, 4), (5, 3), (64, 64), (700, 1), (1, 700), (1000, 1000)])
def test_squares_leave_out_what_a_map_leaves_out(text, block, monkeypatch):
    """Tiles looked at from large squares to small ones, and some at once, as in a whole map."""
    from attndsl.backends.tiled import live_tiles
    from attndsl.inspection import key_ranges as module

    attention, captures = attndsl.compile(text), LOOKED_UP[text]
    monkeypatch.setattr(module, "_MOST_PAIRS", 1)
    found = []
    for sparse, together in ((0.0, 1 << 22), (1.0, 1 << 22), (1.0, 999)):
        monkeypatch.setattr(live_tiles, "_SPARSE", sparse)
        monkeypatch.setattr(module, "_TILES_AT_ONCE", together)
        found.append(attention.reach(700, 700, *block, heads=2, captures=captures))
    for reach in found[1:]:
        assert reach.work.tolist() == found[0].work.tolist()
        for rows, wanted in ((reach.starts, found[0].starts), (reach.stops, found[0].stops)):
            assert rows.tolist() == wanted.tolist()
    live = attention.mask(700, 700, heads=2, captures=captures).flatten(0, 1).any(0)
    for row in range(len(found[0].work)):
        seen = torch.zeros(700, dtype=torch.bool)
        for start, stop in found[0].ranges(row):
            seen[start:stop] = True
        assert not (live[row * block[0] : (row + 1) * block[0]].any(0) & ~seen).any()


def test_no_rows():
    attention = attndsl.compile("causal()")
    assert attention.reach(0, 10).work.shape == (0,)
    assert attention.reach(10, 0).ranges(0) == ()
    with pytest.raises(ArgumentError, match="block_m"):
        attention.reach(10, 10, 0)
