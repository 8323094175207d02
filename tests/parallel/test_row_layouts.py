"""Layouts and tables: who holds, computes and sends what."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import attndsl
from attndsl.errors import ArgumentError
from attndsl.parallel.comm_plan import figures_of, groups_for, table_of
from attndsl.parallel.cp_plan import mask_names, sight_key, sight_of, weighed
from attndsl.parallel.load_balance import _in_blocks, _Swaps, settled
from attndsl.parallel.plan_costs import Machine, Shape, costs_of
from attndsl.parallel.plan_report import report
from attndsl.parallel.row_layouts import (
    choose_layout,
    chunk_size,
    fetched_by,
    fixed_layout,
    load_of,
    step_cost,
)

DOCUMENTS = "tensor doc[kv_len]: int\nmask = causal() and doc[q] == doc[kv]"
SHAPE = Shape(1, 64, 8)


def demand(text, length, ranks, **captures):
    attention = attndsl.compile(text)
    sight = sight_of(attention, length, chunk_size(length, ranks), SHAPE, captures)
    return weighed(sight, SHAPE, Machine())


def documents(length, median):
    lengths = (torch.randn(length // 64, generator=torch.Generator().manual_seed(0)) * 1.2).exp()
    ends = (lengths * median).clamp(64, length // 4).int().cumsum(0)
    return torch.searchsorted(ends, torch.arange(length), right=True)


@pytest.mark.parametrize("length", [64, 509, 1024, 3072, 10000, 1 << 17])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_row_is_held_once(length, ranks):
    chunk = chunk_size(length, ranks)
    for name in ("contiguous", "head_tail"):
        layout = fixed_layout(name, length, ranks, chunk)
        rows = [n for rank in range(ranks) for a, b in layout.runs(rank) for n in range(a, b)]
        assert sorted(rows) == list(range(length))
        counts = [layout.rows(rank) for rank in range(ranks)]
        assert min(counts) > 0
        if length % (2 * ranks * 128) == 0:
            assert len(set(counts)) == 1
            assert all(a % 128 == 0 for rank in range(ranks) for a, _ in layout.runs(rank))


@pytest.mark.parametrize("ranks", [4, 5, 8])
def test_no_rank_is_without_rows(ranks):
    for length in range(ranks, 4 * ranks):
        for name in ("contiguous", "head_tail"):
            layout = fixed_layout(name, length, ranks, chunk_size(length, ranks))
            counts = [layout.rows(rank) for rank in range(ranks)]
            assert min(counts) > 0, (name, length, counts)
            assert sum(counts) == length


def test_all_processes_name_the_captures_of_a_mask_in_one_order():
    names = [f"{x}{n}" for n in range(3) for x in "zax"]
    text = "".join(f"param {name}: int\n" for name in names)
    text += "mask = causal() and q - kv < " + " + ".join(names)
    assert mask_names(attndsl.compile(text)) == tuple(sorted(names))


def test_what_rows_see_is_found_again_for_other_masks_alone():
    """The mask's text and numbers, elements of its tensors, and sizes that it may depend on."""
    doc = torch.arange(512) // 100

    def key(text, shape=SHAPE, **captures):
        return sight_key(attndsl.compile(text), 128, shape, captures)

    other = Shape(2, 32, 4, 64)
    assert key(DOCUMENTS, doc=doc) == key(DOCUMENTS, other, doc=doc.clone())
    assert key(DOCUMENTS, doc=doc) != key(DOCUMENTS, doc=doc // 2)
    assert key(DOCUMENTS, doc=doc) != key(DOCUMENTS, doc=doc.float())
    assert key("causal()") == key("causal()", other)
    assert key("causal()") != key("q > kv")
    window = "param n: int\nmask = causal() and q - kv < n"
    assert key(window, n=9) == key(window, other, n=np.int64(9)) != key(window, n=8)
    for text, changed in (
        ("q - kv < 9 * (h + 1)", Shape(1, 32, 8)), ("q - kv < heads", Shape(1, 32, 8)),
        ("q - kv < kv_heads", Shape(1, 64, 4)), ("q - kv < batch", Shape(2, 64, 8)),
        ("q - kv < head_dim", Shape(1, 64, 8, 64)),
    ):  # fmt: skip
        assert key(text) != key(text, changed), text
    by_batch = "tensor doc[batch, kv_len]: int\nmask = doc[0, q] == doc[0, kv]"
    assert key(by_batch, doc=doc[None]) != key(by_batch, other, doc=doc[None])


def test_auto_chooses_what_each_mask_needs():
    length, ranks = 1 << 16, 8
    for text, name in (
        ("causal()", "head_tail"), ("causal() and q - kv < 512", "contiguous"),
        ("true", "contiguous"),
    ):  # fmt: skip
        found = choose_layout("auto", length, ranks, [demand(text, length, ranks)])
        assert found.name == name, text


@pytest.mark.parametrize("length", [1 << 16, (1 << 16) + 128])
def test_balanced_documents(length):
    """Better than what is fixed, and not by fetching all keys; also where chunks are small."""
    ranks = 8
    asked = demand(DOCUMENTS, length, ranks, doc=documents(length, 2000))
    chunk = chunk_size(length, ranks)
    fixed = [fixed_layout(x, length, ranks, chunk) for x in ("contiguous", "head_tail")]
    found = choose_layout("auto", length, ranks, [asked])
    assert found.name == "balanced"
    load = load_of(found, asked)
    assert load.max() / load.mean() < 1.1
    assert load.sum() == asked.work.sum()
    assert step_cost(found, [asked]) < 0.8 * min(step_cost(x, [asked]) for x in fixed)
    assert fetched_by(found, asked).mean() < 0.2 * length
    held = [found.rows(rank) for rank in range(ranks)]
    assert max(held) - min(held) <= 128
    again = choose_layout("balanced", length, ranks, [asked])
    assert np.array_equal(found.owner, again.owner)


def test_layers_are_balanced_together():
    """Many causal layers outweigh a few windows, and the other way round."""
    length, ranks = 1 << 15, 4
    whole, local = (demand(x, length, ranks) for x in ("causal()", "causal() and q - kv < 256"))
    few = replace(whole, weight=1e-6)
    assert choose_layout("auto", length, ranks, [whole, local]).name == "head_tail"
    assert choose_layout("contiguous", length, ranks, []).name == "contiguous"
    cost = [
        step_cost(fixed_layout(x, length, ranks, chunk_size(length, ranks)), [few, local])
        for x in ("contiguous", "head_tail")
    ]
    assert cost[0] < cost[1]


@pytest.mark.parametrize("name", ["call", "kept"])
def test_nothing_takes_less_than_nothing(name):
    with pytest.raises(ArgumentError, match=f"{name} is -1"):
        Machine(**{name: -1})


def test_there_is_no_other_layout():
    with pytest.raises(ArgumentError, match="no layout 'zigzag'"):
        choose_layout("zigzag", 64, 2, [])


@pytest.mark.parametrize("text", ["causal()", "abs(q - kv) < 300", "kv < 200 or q >= kv + 700"])
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("name", ["contiguous", "head_tail"])
def test_ranks_send_what_others_read(text, group, name):
    """What one table says that it sends is what another one reads, and rows have all their keys."""
    length, ranks = 2000, 4
    asked = demand(text, length, ranks)
    layout = fixed_layout(name, length, ranks, chunk_size(length, ranks))
    tables = [table_of(layout, asked, rank, group) for rank in range(ranks)]
    places = [[n for a, b in layout.runs(rank) for n in range(a, b)] for rank in range(ranks)]
    mask = attndsl.compile(text).mask(length, length)[0, 0]
    for table in tables:
        got = set()
        for rank, runs in enumerate(table.reads):
            rows = [places[rank][n] for a, b in tables[rank].sends[table.rank] for n in range(a, b)]
            assert rows == [n for a, b in runs for n in range(a, b)]
            got |= set(rows)
        for part in table.parts:
            rows = mask[part.position : part.position + part.rows]
            wanted = set(rows.any(0).nonzero().flatten().tolist())
            assert wanted <= got
            assert wanted <= set(range(*part.keys))
            assert table.keys[0] <= part.keys[0] <= part.keys[1] <= table.keys[1] or not wanted
        assert sum(part.rows for part in table.parts) == sum(
            len(places[rank]) for rank in range(table.first, table.first + group)
        )


@pytest.mark.parametrize("call", [0.0, math.inf])
@pytest.mark.parametrize("name", ["contiguous", "head_tail"])
@pytest.mark.parametrize("text", ["causal() and q - kv < 300", "abs(q - kv) < 300", "causal()"])
def test_islands_have_what_waits(text, name, call):
    """Parts follow each other; each sees own rows or an island, whose pieces are what is sent."""
    length, ranks = 8192, 2
    asked = demand(text, length, ranks)
    layout = fixed_layout(name, length, ranks, chunk_size(length, ranks))
    tables = [table_of(layout, asked, rank, 1, call) for rank in range(ranks)]
    held = [[n for a, b in x.held for n in range(a, b)] for x in tables]
    for rank, table in enumerate(tables):
        rows = [p.position + n for p in table.parts for n in range(p.rows)]
        assert rows == held[rank]
        assert [p.row for p in table.parts] == [held[rank].index(p.position) for p in table.parts]
        for part in table.parts:
            keys = range(*part.keys)
            if part.island < 0:
                assert held[rank][part.own : part.own + len(keys)] == list(keys)
            else:
                low, high = table.islands[part.island].keys
                assert low <= keys.start <= keys.stop <= high
        for start, stop, source, at in (x for land in table.islands for x in land.pieces):
            sent = [held[source][n] for a, b in tables[source].sends[rank] for n in range(a, b)]
            some = held[rank] if source == rank else sent
            assert some[at : at + stop - start] == list(range(start, stop))


def test_what_sees_own_keys_alone_waits_for_nobody():
    """Of a window's rows those near another rank's are a call of their own, if that is worth it."""
    length, ranks = 16384, 2
    asked = demand("causal() and q - kv < 1024", length, ranks)
    layout = fixed_layout("contiguous", length, ranks, chunk_size(length, ranks))
    cut, whole = (table_of(layout, asked, 1, 1, call).parts for call in (60e-6, 1e-3))
    assert [(p.position, p.rows, p.island) for p in cut] == [(8192, 1024, 0), (9216, 7168, -1)]
    assert [(p.position, p.rows, p.island) for p in whole] == [(8192, 8192, 0)]


def test_figures():
    length, ranks = 4096, 4
    asked = demand("causal()", length, ranks)
    costs = costs_of(Machine(), SHAPE)
    layout = fixed_layout("contiguous", length, ranks, chunk_size(length, ranks))
    figures = figures_of(layout, asked, 1, costs, 0.0)
    assert figures.fetched.tolist() == [0, 1024, 2048, 3072]
    assert figures.rows.tolist() == [1024] * 4
    # Half of what an all-gather and a reduce-scatter of all keys would bring.
    assert figures.received.sum() == figures.gathered * ranks / 2
    assert figures.gathered == 3 * 1024 * 8 * 256 * (2 + 2 + 4)
    heads = figures_of(layout, asked, 4, costs, 0.0)
    assert heads.work.tolist() == [int(asked.work.sum()) // 4] * 4
    assert heads.fetched.tolist() == [3072] * 4
    assert groups_for(4, 64, 8) == (1, 2, 4)
    assert groups_for(3, 64, 8) == (1,)
    text = report(layout, [("one", figures), ("two", heads)])
    assert "keys fetched 0 1024 2048 3072 of 4096" in text
    assert "ranks exchange heads" in text


def test_many_ranks_in_words():
    length, ranks = 1 << 15, 32
    asked = demand("kv < 100", length, ranks)
    layout = fixed_layout("contiguous", length, ranks, chunk_size(length, ranks))
    text = report(layout, [("x", figures_of(layout, asked, 1, costs_of(Machine(), SHAPE), 0.0))])
    assert "and 16 more, 0 to 128" in text
    nothing = demand("kv > q + 100000", length, ranks)
    text = report(layout, [("x", figures_of(layout, nothing, 1, costs_of(Machine(), SHAPE), 0.0))])
    assert "dead ranks   0 1 2" in text


@pytest.mark.parametrize(("dear", "swaps"), [(True, False), (False, True)])
def test_rows_move_if_their_keys_cost_less_than_the_wait(dear, swaps):
    """One rank has twice the work of another, and each has all the keys that its rows see."""
    text = "tensor doc[kv_len]: int; doc[q] == doc[kv]"
    doc = torch.cat([torch.zeros(4096), 1 + torch.arange(4096) // 512]).int()
    found = demand(text, 8192, 2, doc=doc)
    key = found.tile * (1e4 if dear else 1e-4)
    found = replace(found, key=key, weight=3.0)
    layout = fixed_layout("contiguous", 8192, 2, found.chunk)
    owner = settled(layout.owner, 2, [found])
    assert np.array_equal(owner, layout.owner) != swaps
    assert step_cost(replace(layout, owner=owner), [found]) <= step_cost(layout, [found])


def test_swaps_count_as_layouts_are_costed():
    """Blocks of one chunk cost what the chunks do, of all layers."""
    found = replace(demand("causal()", 1 << 16, 4), weight=3.0, call=0.0)
    assert found.each > 1
    layout = fixed_layout("contiguous", 1 << 16, 4, found.chunk)
    edges = np.arange(len(layout.owner) + 1)
    state = _Swaps(layout.owner, 4, edges, [_in_blocks(found, edges)])
    assert float(state.cost.max()) == pytest.approx(step_cost(layout, [found]))
