"""What ``explain`` says first, to people who never think of tiles, and its advice in numbers."""

from __future__ import annotations

import re

import pytest
import torch

import attndsl

DOC = "tensor doc[batch, kv_len]: int; mask = causal() and doc[b, q] == doc[b, kv]"
GLOBAL = "tensor wide[kv_len]: bool; mask = abs(q - kv) < 32 or wide[q] or wide[kv]"
EXACT = "with the same result"
BEFOREHAND = "Nothing is computed beforehand."


def first(text, **arguments):
    return attndsl.compile(text).explain(**arguments).split("\n")[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("score = softcap(score, 5.0)", "All of the work of dense attention: there is no mask."),
        ("mask = q < 0 and false", "No work: the mask is never true, and every output is 0."),
        (
            "mask = score > 0.5",
            "All of the work of dense attention: the mask depends on the scores, so that no tile "
            "can be left out.",
        ),
        ("causal()", f"Tiles whose pairs are all masked out cost nothing. {BEFOREHAND}"),
        (
            "param near: int; causal() and q - kv < near",
            "Each query sees a limited number of keys: the work grows with the length, and not "
            f"with its square. {BEFOREHAND}",
        ),
        (
            "tensor n[batch]: int; valid_keys(n)",
            f"Tiles whose pairs are all masked out cost nothing. {BEFOREHAND}",
        ),
        (
            DOC,
            "Tiles whose pairs are all masked out cost nothing. The tiles are found on the device "
            "at each call, from doc.",
        ),
        (
            f"param far: float; tensor x[kv_len]: float; {DOC} and x[q] < x[kv] * far",
            "Tiles whose pairs are all masked out cost nothing. The tiles are found on the device "
            "at each call, from x, doc and far.",
        ),
        (
            "mask = causal() and score > 0.5",
            "Tiles whose pairs are all masked out cost nothing. The tiles are found on the device "
            "at each call, from the positions. A condition on the scores leaves out no tile.",
        ),
    ],
)
def test_without_lengths_it_says_what_kind_of_saving(text, sentence):
    assert first(text) == sentence


@pytest.mark.parametrize(
    ("text", "lengths", "given", "share"),
    [
        ("causal()", (8192, 8192), {}, "About 51 %"),
        ("causal() and q - kv < 64", (32768, 32768), {}, "Less than 1 %"),
        ("causal() and q - kv < 1024", (65536, 65536), {}, "About 2 %"),
        ("mask = kv < q + 100", (64, 64), {}, "All"),
        ("mask = kv > q + 100", (64, 64), {}, "No work at these lengths: no pair takes part."),
        ("mask = kv != 3 or q < 128", (128, 128), {}, "All"),
        (DOC, (4096, 4096), {"doc": torch.arange(4096)[None] // 100}, "About 5 %"),
    ],
)
def test_with_lengths_it_says_how_much(text, lengths, given, share):
    said = first(text, q_len=lengths[0], kv_len=lengths[1], **given)
    assert said.startswith(share)
    assert said.endswith("from doc." if given else BEFOREHAND)
    assert (EXACT in said) == (" %" in share)


def test_the_share_is_that_of_the_visited_tiles():
    shown = attndsl.compile("causal()").explain(q_len=1024, kv_len=1024)
    (live,) = re.findall(r"live +(.*)% of 8 x 16 tiles", shown)
    assert shown.startswith(f"About {round(float(live))} % of the work")


def test_positions_that_are_looked_up_change_how_tiles_are_found():
    told = attndsl.compile("causal()")
    lengths = {"q_len": 256, "kv_len": 256}
    assert BEFOREHAND in told.explain(**lengths, q_offset=3).split("\n")[0]
    entries = told.explain(**lengths, kv_lengths=torch.tensor([20, 256])).split("\n")[0]
    assert BEFOREHAND in entries


TABLE = "tensor table[heads, 32]: float\nscore = score + table[h, "


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{TABLE}t5_bucket(q - kv, 32, 128)]", True),
        (f"{TABLE}t5_bucket_causal(max(q - kv, 0), 32, 128)]\nmask = causal()", True),
        (f"{TABLE}clamp(q - kv, -15, 15) + 16]", False),
        (f"{TABLE}t5_bucket(2 * q - kv, 32, 128)]", False),
        ("tensor near[heads, 2 * kv_len]: float\nscore = score + rel_bias(near)", False),
    ],
)
def test_parts_that_are_looked_up_by_distance_are_told_of(text, told):
    shown = attndsl.compile(text).explain(q_len=256, kv_len=256).split("\n")
    found = [line for line in shown if "by distance" in line]
    assert len(found) == told
    assert not found or "table[h, " in found[0]


def advice(text, length, **given):
    shown = attndsl.compile(text).explain(q_len=length, kv_len=length, **given).split("\n")
    return [line for line in shown if "cheaper" in line and "PARTIAL" in line]


def test_smaller_tiles_are_advised_in_numbers_that_are_so():
    wide = torch.arange(8192) % 1000 == 0
    (line,) = advice(GLOBAL, 8192, wide=wide)
    then, now = re.findall(r"([\d.]+)% of the pairs, in place of ([\d.]+)%", line)[0]
    program = attndsl.compile(GLOBAL)
    for told, blocks in ((then, (32, 32)), (now, (128, 64))):
        kinds = program.tiles(8192, 8192, *blocks, wide=wide).kinds
        assert told == f"{100 * float((kinds != 0).float().mean()):.2f}"


@pytest.mark.parametrize("text", ["causal()", "mask = kv != q % 2 * 2000", "q - kv < 5000"])
def test_smaller_tiles_are_not_advised_where_they_leave_out_little(text):
    assert advice(text, 1024) == []


def test_what_is_evaluated_is_named():
    told = attndsl.compile("q * kv % 5 < 3").explain(q_len=64, kv_len=64)
    assert "'q * kv % 5 < 3' is evaluated in all undecided tiles: comparisons of q and kv" in told


@pytest.mark.parametrize(
    ("dims", "shape", "condition", "told"),
    [
        ("batch, heads, tiles", (1, 1, 2), "kv // 64 in c[b, h, q // 64, :]",
         "blocks of 64 keys, one for each batch entry, head and 64 queries"),
        ("tokens", (128,), "causal() and kv in c[token, :]", "keys, one for each query"),
        ("batch, kv_heads, q_len", (1, 1, 128), "kv // 16 not in c[b, hkv, q, :]",
         "blocks of 16 keys, one for each batch entry, key head and query"),
        ("heads", (1,), "q - kv in c[0, :]", "values of q - kv, one for all"),
        ("some, parts", (1, 4), "kv in c[h // 2, token // 32, :]",
         "keys, one for each 2 heads and 32 queries"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_lengths", [False, True])
def test_lists_of_keys_are_told_of(dims, shape, condition, told, has_lengths):
    program = attndsl.compile(f"tensor c[{dims}, n]: int; mask = {condition}")
    call = {"q_len": 128, "kv_len": 128, "c": torch.zeros(*shape, 3).int()}
    shown = program.explain(**call if has_lengths else {}).split("\n")
    assert [line for line in shown if "list " in line] == [f"  list       c: {told}"]
    assert not any("undecided" in line for line in shown) or "q - kv" in condition


def test_lookups_of_blocks_are_told_from_those_of_pairs():
    head = "tensor m[heads, a, c]: bool; mask = "
    for condition, way in (
        ("m[h, q // 64, kv // 32]", "cells (64 queries x 32 keys have one value)"),
        ("m[h, q, kv]", "evaluation (m[...] is looked up by both positions)"),
    ):
        assert f"{condition}: {way}" in attndsl.compile(head + condition).explain()
