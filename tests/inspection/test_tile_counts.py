"""Counts of tiles: those of the maps, for lengths that no map is made for."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.call.options import Location
from attndsl.errors import ArgumentError
from attndsl.inspection import tile_search
from attndsl.passes.tiles.tile_plan import FULL, PARTIAL

CLOSED = (
    "score",
    "causal()",
    "causal() and q - kv < 100",
    "(q - kv) % 3 == 0 and causal()",
    "q // 96 == kv // 96",
    "abs(q // 32 - kv // 32) <= 2 and abs(q % 32 - kv % 32) <= 2",
    "q - kv > 5000",
    "tensor n[heads]: int; mask = causal() and q - kv < n[h]",
)
LISTED = (
    "tensor doc[batch, kv_len]: int; mask = causal() and doc[b, q] == doc[b, kv]",
    "tensor keep[heads, kv_len]: bool; mask = causal() and keep[h, kv]",
    "tensor keep[q_len, kv_len]: bool; mask = keep[q, kv]",
)
MAKERS = {
    "n": lambda heads, length: torch.arange(heads) * 77,
    "doc": lambda heads, length: torch.arange(2 * length).reshape(2, length) // 50,
    "keep": lambda heads, length: torch.rand(length, length) < 0.001,
}


def _asked(text, q_len, kv_len):
    attention = attndsl.compile(text)
    decls = attention.lowered.program.tensors
    captures = {decl.name: MAKERS[decl.name](3, kv_len) for decl in decls}
    if "keep[heads" in text:
        captures = {"keep": torch.rand(3, kv_len) < 0.01}
    return attention, captures


def _counted(attention, q_len, kv_len, block_m, block_n, captures, **options):
    call = attention.call_of_lengths(captures, q_len, kv_len, 2, 3, location=Location(**options))
    return tile_search.count_tiles(attention.lowered, call, block_m, block_n)


def _mapped(attention, q_len, kv_len, block_m, block_n, captures, **options):
    kinds = attention.tiles(
        q_len, kv_len, block_m, block_n, 2, 3, **options, **captures
    ).kinds  # fmt: skip
    counts = (int((kinds == kind).sum()) for kind in (FULL, PARTIAL))
    return tile_search.TileCounts(*kinds.shape[2:], kinds.numel(), *counts)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("text", [*CLOSED, *LISTED])
def test_counts_are_those_of_the_map(text, few, monkeypatch):
    if few:
        monkeypatch.setattr(tile_search, "_TILES_AT_ONCE", 16)
    for q_len, kv_len, block_m, block_n in ((512, 512, 32, 64), (512, 768, 64, 16), (96, 96, 1, 1)):
        if "keep[q_len" in text and q_len != kv_len:
            continue
        asked = *_asked(text, q_len, kv_len), q_len, kv_len, block_m, block_n
        attention, captures, *sizes = asked
        found = _counted(attention, *sizes, captures)
        assert found == _mapped(attention, *sizes, captures)


@pytest.mark.parametrize("text", [*CLOSED, *LISTED])
def test_ragged_lengths(text):
    for lengths in ((499, 499), (0, 300), (300, 0), (1, 301), (301, 1)):
        if "keep[q_len" in text and lengths[0] != lengths[1]:
            continue
        attention, captures = _asked(text, *lengths)
        found = _counted(attention, *lengths, 64, 32, captures)
        assert found == _mapped(attention, *lengths, 64, 32, captures)


def test_positions(monkeypatch):
    monkeypatch.setattr(tile_search, "_TILES_AT_ONCE", 16)
    attention = attndsl.compile("causal() and q - kv < 100")
    sizes = 256, 512, 32, 32
    index = torch.arange(256).flip(0)
    for options in ({"q_offset": 131}, {"kv_offset": torch.tensor(40)}, {"q_index": index}):
        assert _counted(attention, *sizes, {}, **options) == _mapped(
            attention, *sizes, {}, **options
        )


@pytest.mark.parametrize(
    ("q_len", "kv_len"),
    [(10_000_000, 10_000_000), (9_999_999, 10_000_001), (1, 10_000_000), (10_000_000, 100)],
)
def test_long_calls_are_counted_quickly(q_len, kv_len, quickest):
    attention = attndsl.compile("causal() and q - kv < 1024")
    shown = []
    assert quickest(lambda: shown.append(attention.explain(q_len=q_len, kv_len=kv_len))) < 2.0
    assert f"\n  live       0.0{1 if q_len > 1 else 0}% of " in shown[0]


def test_work_of_a_long_call():
    shown = attndsl.compile("causal()").explain(q_len=1 << 23, kv_len=1 << 23)
    assert "live       50.00% of 65536 x 131072 tiles: 50.00% FULL, 0.00% PARTIAL" in shown
    assert "dense: 1.801e+04 and 6.305e+04" in shown


def test_what_cannot_be_counted_is_said():
    length = 3_000_000
    attention = attndsl.compile("tensor doc[kv_len]: int; mask = doc[q] == doc[kv]")
    shown = attention.explain(q_len=length, kv_len=length, doc=torch.zeros(length).int())
    assert "live       not counted: there are 1098656250 tiles, and no closed form: doc" in shown
    assert shown.endswith("ask with larger block_m and block_n, or shorter lengths")
    with pytest.raises(ArgumentError, match="2147483648 queries") as caught:
        attndsl.compile("causal()").explain(q_len=1 << 31, kv_len=1)
    assert "below 1073741824" in caught.value.hint


def test_masks_that_are_evaluated_are_not_counted_for_hours():
    attention = attndsl.compile("(q * kv) % 7 < 3")
    assert "no closed form" in attention.explain(q_len=1 << 20, kv_len=1 << 20)


def test_captures_may_have_the_names_of_arguments():
    attention = attndsl.compile("tensor device[heads]: int\nmask = q - kv < device[h]")
    found = attndsl.verify(attention, 8, 8, heads=2, device=torch.tensor([1, 2]))
    assert found.tiles == found.live == 6
