"""Ranges of keys by reader, held to maps of bools."""

from __future__ import annotations

import numpy as np
import pytest

import attndsl
from attndsl.parallel.row_layouts import fetched_by, fixed_layout, load_of
from attndsl.parallel.workload import demand_from, meetings, needs_of, own_needs, union


def map_of(spans, readers, tiles):
    found = np.zeros((readers, tiles), bool)
    for reader, start, stop in zip(*spans, strict=True):
        assert not found[reader, max(0, start - 1) : stop + 1].any()
        found[reader, start:stop] = True
    return found


@pytest.mark.parametrize("number", [0, 1, 7, 300])
def test_unions_are_apart_and_ascend(number):
    rng = np.random.default_rng(number)
    reader, start = rng.integers(0, 9, number), rng.integers(0, 90, number)
    stop = np.maximum(start + rng.integers(-3, 12, number), 0)
    spans = union(reader, start, stop)
    wanted = np.zeros((9, 101), bool)
    for r, a, b in zip(reader, start, stop, strict=True):
        wanted[r, a:b] = True
    assert (spans.start < spans.stop).all()
    assert np.array_equal(map_of(spans, 9, 101), wanted)
    assert sorted(zip(*spans, strict=True)) == list(zip(*spans, strict=True))
    some = spans.of(2, 5)
    assert set(some.reader.tolist()) <= {2, 3, 4}
    columns = wanted[2:5].any(0).nonzero()[0]
    assert some.hull() == ((columns[0], columns[-1] + 1) if len(columns) else (0, 0))


def test_a_range_without_keys_asks_for_none():
    """What a rank sends is the hull of what others ask for."""
    spans = union(np.array([0, 0, 1]), np.array([2, 5, 3]), np.array([2, 7, 3]))
    assert [x.tolist() for x in spans] == [[0], [5], [7]]
    assert spans.of(0, 1).hull() == (5, 7)
    assert spans.of(1, 2).hull() == (0, 0)


def test_ranges_meet_where_both_are():
    rng = np.random.default_rng(1)
    one = rng.integers(0, 200, 40)
    lengths = rng.integers(0, 30, 40)
    cuts = np.sort(rng.choice(240, 20, replace=False))
    other = cuts[::2], cuts[1::2]
    found = meetings((one, one + lengths), other)
    wanted = [
        (i, j, max(a, c), min(a + n, d))
        for i, (a, n) in enumerate(zip(one, lengths, strict=True))
        for j, (c, d) in enumerate(zip(*other, strict=True))
        if max(a, c) < min(a + n, d)
    ]
    kept = found[2] < found[3]
    assert list(zip(*(x[kept] for x in found), strict=True)) == wanted


@pytest.mark.parametrize("length", [2048, 1999])
@pytest.mark.parametrize("text", ["causal()", "abs(q - kv) < 300", "kv < 200 or q >= kv + 700"])
def test_what_ranks_compute_and_fetch_is_what_rows_see(text, length):
    """Counted tile by tile."""
    ranks, chunk, grain = 4, 128, 64
    attention = attndsl.compile(text)
    reach = attention.reach(length, length, grain, grain)
    demand = demand_from(reach, chunk, 1.0, 1.0)
    layout = fixed_layout("head_tail", length, ranks, chunk)
    live = np.zeros((len(reach.work), len(reach.work)), bool)
    for row, some in enumerate(live):
        for start, stop in reach.ranges(row):
            some[start // grain : -(-stop // grain)] = True
    owner = layout.owner.repeat(chunk // grain)[: len(live)]
    size = np.minimum(grain, length - np.arange(len(live)) * grain)
    work, fetched, own = [], [], []
    for rank in range(ranks):
        seen = live[owner == rank].any(0)
        work.append(reach.work[owner == rank].sum())
        fetched.append(size[seen & (owner != rank)].sum())
        own.append(size[seen & (owner == rank)].sum())
    assert load_of(layout, demand).tolist() == work
    assert fetched_by(layout, demand).tolist() == fetched
    needs = needs_of(demand, layout.owner)
    assert own_needs(demand, layout.owner, np.arange(ranks), needs).tolist() == own
