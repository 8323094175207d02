"""What a call says of a larger one is checked: nothing is guessed."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.call import prepared
from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError

Q, K = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 10, 8)
PLAIN = "causal()"
KEY_HEADS = "score = score + hkv"
SLOPES = "tensor t[heads]: float\nscore = score * t[h]"
NEXT = "tensor t[heads]: float\nscore = score * t[(h + 1) % heads]"
NAMED = "tensor t[n]: float\nscore = score * t[h]"
ROWS = "tensor t[q_len]: float\nscore = score * t[q]"
PAST = "tensor t[q_len]: float\nscore = score * t[max(q - 1, 0)]"
DOUBLE = "tensor t[2 * kv_len]: float\nscore = score * t[kv]"
DROPPED = "weights = dropout(softmax(score), 1.0 / (kv_len + 1))"
CASES = {
    "offset alone": (PLAIN, {"h_offset": 4}, ArgumentError, "h_offset is 4, and heads is not"),
    "entry alone": (PLAIN, {"b_offset": 1}, ArgumentError, "b_offset is 1, and batch is not given"),
    "too far": (PLAIN, {"h_offset": 5, "heads": 8, "kv_heads": 4}, ArgumentError, "heads is 8"),
    "entries too far": (PLAIN, {"b_offset": 2, "batch": 3}, ArgumentError, "batch is 3"),
    "too few": (PLAIN, {"heads": 3}, ArgumentError, "heads is 3"),
    "rows too far": (PLAIN, {"q_offset": 5, "q_len": 10}, ArgumentError, "q_len is 10"),
    "rows before": (PLAIN, {"q_offset": -1, "q_len": 10}, ArgumentError, "q_offset=-1"),
    "rows by tensor": (
        PLAIN, {"q_offset": torch.tensor(5), "q_len": 10}, ArgumentError, "q_offset has values",
    ),
    "more rows than there are": (
        PLAIN, {"q_offset": torch.tensor(0), "q_len": 5}, ArgumentError, "the call has 6 queries",
    ),
    "indices of none": (
        PLAIN, {"kv_index": torch.zeros(10, dtype=torch.int32), "kv_len": 0}, ArgumentError,
        "the call has 10 keys",
    ),
    "rows by index": (
        PLAIN, {"q_index": torch.tensor([0, 1, 2, 3, 4, 10]), "q_len": 10}, ArgumentError,
        "q_index has values from 0 to 10",
    ),
    "keys too far": (PLAIN, {"kv_len": 9}, ArgumentError, "kv_len is 9"),
    "a float": (PLAIN, {"q_len": 12.5}, ArgumentError, "q_len is 12.5"),
    "a bool": (PLAIN, {"heads": True}, ArgumentError, "heads is True"),
    "a tensor": (PLAIN, {"h_offset": torch.tensor(1), "heads": 8}, ArgumentError, "h_offset is"),
    "negative": (PLAIN, {"b_offset": -1, "batch": 4}, ArgumentError, "b_offset is -1"),
    "key heads alone": (PLAIN, {"kv_heads": 4}, ArgumentError, "kv_heads is 4, and heads is not"),
    "key heads left out": (KEY_HEADS, {"heads": 8}, ArgumentError, "kv_heads is not given"),
    "no multiple": (PLAIN, {"heads": 9, "kv_heads": 4}, ArgumentError, "heads is 9 and kv_heads"),
    "other groups": (PLAIN, {"heads": 12, "kv_heads": 4}, ArgumentError, "the whole call has 3"),
    "within a group": (
        PLAIN, {"heads": 8, "kv_heads": 2, "h_offset": 3}, ArgumentError, "from head 3 on",
    ),
    "neither": (
        SLOPES, {"heads": 8, "kv_heads": 4, "t": torch.ones(6)}, ShapeError, "t has 6 elements",
    ),
    "others looked up": (
        NEXT, {"heads": 8, "kv_heads": 4, "t": torch.ones(4)}, ArgumentError, "others than 'h'",
    ),
    "of no size": (
        NAMED, {"heads": 8, "kv_heads": 4, "t": torch.ones(4)}, ArgumentError, "declare that dim",
    ),
    "other rows": (
        PAST, {"q_offset": 3, "q_len": 10, "t": torch.ones(6)}, ArgumentError, "others than 'q'",
    ),
    "an expression": (
        DOUBLE, {"kv_len": 15, "kv_offset": 5, "t": torch.ones(20)}, ShapeError, "which is 30",
    ),
    "lengths and length": (
        PLAIN, {"kv_lengths": torch.tensor([3, 4]), "kv_len": 10}, ArgumentError, "both given",
    ),
    "lengths and index": (
        PLAIN, {"kv_lengths": torch.tensor([3, 4]), "kv_index": torch.arange(10)}, ArgumentError,
        "kv_lengths and kv_index",
    ),
    "lengths of floats": (PLAIN, {"kv_lengths": torch.ones(2)}, DTypeError, "no int tensor"),
    "a list": (PLAIN, {"kv_lengths": [3, 4]}, DTypeError, "no int tensor"),
    "lengths of others": (PLAIN, {"kv_lengths": torch.tensor([3])}, ShapeError, "kv_lengths has"),
    "lengths elsewhere": (
        PLAIN, {"kv_lengths": torch.ones(2, dtype=torch.int32, device="meta")}, DeviceError, "meta",
    ),
    "too long": (PLAIN, {"kv_lengths": torch.tensor([3, 11])}, ArgumentError, "from 3 to 11"),
    "negative lengths": (
        PLAIN, {"kv_lengths": torch.tensor([-1, 1])}, ArgumentError, "k has room for 10 keys",
    ),
    "dropout of lengths": (
        DROPPED, {"kv_lengths": torch.tensor([3, 1]), "seed": 1}, UnsupportedError, "depends on",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_is_refused(name):
    text, options, kind, words = CASES[name]
    attention = attndsl.compile(text)
    with pytest.raises(kind, match=words) as refusal:
        attention(Q, K, K, **options)
    assert refusal.value.hint


GOOD = {
    "all of it": {"heads": 4, "kv_heads": 2, "batch": 2, "q_len": 6, "kv_len": 10},
    "no offsets": {"heads": 16, "kv_heads": 8, "batch": 3, "q_len": 9, "kv_len": 11},
    "key heads derived": {"heads": 8, "h_offset": 4},
    "half a group": {"heads": 8, "kv_heads": 2, "h_offset": 2},
    "one key head": {"heads": 8, "kv_heads": 1, "h_offset": 4},
    "keys repeated": {"heads": 4, "kv_heads": 1},
}


@pytest.mark.parametrize("name", GOOD)
def test_what_can_be(name):
    out = attndsl.compile(PLAIN)(Q, K, K, **GOOD[name])
    torch.testing.assert_close(out, attndsl.compile(PLAIN)(Q, K, K))


def test_values_are_checked_at_every_call():
    attention = attndsl.compile("causal_lower_right()")
    attention(Q, K, K, q_offset=2, q_len=10)
    with pytest.raises(ArgumentError, match="q_offset=5"):
        attention(Q, K, K, q_offset=5, q_len=10)
    lengths = torch.tensor([3, 4])
    attention(Q, K, K, kv_lengths=lengths)
    with pytest.raises(ArgumentError, match="from 3 to 12"):
        attention(Q, K, K, kv_lengths=torch.tensor([3, 12]))


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        ({"kv_lengths": torch.tensor([3, 4])}, {"kv_lengths": torch.tensor([3, 12])}, "to 12"),
        ({"kv_lengths": torch.tensor([3, 4])}, {"kv_lengths": torch.tensor([-1, 4])}, "from -1"),
        (
            {"q_len": 9, "q_index": torch.arange(6)}, {"q_len": 9, "q_index": torch.arange(4, 10)},
            "from 4 to 9",
        ),
    ],
)  # fmt: skip
def test_the_second_call_of_a_part_is_checked(good, bad, words):
    """Its offsets are 0, and its signature is that of the first, which passed."""
    attention = attndsl.compile(PLAIN)
    out, lse = attention(Q, K, K, return_lse=True, **good)
    with pytest.raises(ArgumentError, match=words):
        attention(Q, K, K, **bad)
    assert len(attention._prepared) == 1
    with pytest.raises(ArgumentError, match=words):
        attention.backward(Q, K, K, out, lse, out, **bad)


def test_one_signature_for_each_place():
    """What a call finds in the cache is of its own numbers."""
    attention = attndsl.compile("score = score * (h + 1) - 0.1 * q_len * (q - kv)")
    wanted = attention(*(x.repeat(1, 2, 2, 1) for x in (Q, K, K)))[:, 4:]
    for _ in range(2):
        for first in (0, 3, 6):
            rows = Q.repeat(1, 1, 2, 1)[:, :, first : first + 6]
            found = attention(
                rows, *[K.repeat(1, 1, 2, 1)] * 2, heads=8, h_offset=4, q_len=12, q_offset=first
            )
            torch.testing.assert_close(found, wanted[:, :, first : first + 6])


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_shares_at_other_rows_of_one_signature(backend):
    attention = attndsl.compile(f"{ROWS}; mask = q >= kv", backend=backend)
    q, k = Q.repeat(1, 1, 3, 1), K.repeat(1, 1, 2, 1)
    t = torch.randn(18)
    whole = attention(q, k, k, t=t)
    for first in (0, 5, 12, 5):
        rows = slice(first, first + 6)
        found = attention(q[:, :, rows], k, k, t=t[rows], q_len=18, q_offset=first)
        torch.testing.assert_close(found, whole[:, :, rows])


def test_plain_calls_say_nothing_of_places(monkeypatch):
    """They take no time for it."""
    attention = attndsl.compile(SLOPES)
    attention(Q, K, K, t=torch.ones(4))

    def refused(*arguments):
        raise AssertionError

    for name in ("bound", "dispatched"):
        monkeypatch.setattr(prepared, name, refused)
    attention(Q, K, K, t=torch.ones(4))


def test_maps_of_parts():
    attention = attndsl.compile("causal_lower_right() and kv % (h + 3) != 1")
    sizes = {"whole_sizes": {"q_len": 300, "heads": 8}, "q_offset": 130, "h_offset": 4}
    tiles = attention.tiles(100, 500, 32, 32, 2, 4, **sizes)
    q, k = torch.randn(2, 4, 100, 8), torch.randn(2, 4, 500, 8)
    options = {"q_len": 300, "heads": 8, "q_offset": 130, "h_offset": 4}
    wanted = attention(q, k, k, **options)
    torch.testing.assert_close(attention(q, k, k, tiles=tiles, **options), wanted)
    whole = attention.tiles(300, 500, 10, 20, 2, 8).kinds[:, 4:, 13:23]
    assert torch.equal(attention.tiles(100, 500, 10, 20, 2, 4, **sizes).kinds, whole)
    with pytest.raises(ArgumentError, match="whole_sizes has 'q'"):
        attention.tiles(100, 500, whole_sizes={"q": 3})


LISTED = ("causal()", "sliding_window(40)", "causal_lower_right()", "prefix_lm(9)")


@pytest.mark.parametrize("text", LISTED)
def test_entries_keep_closed_forms(text):
    attention = attndsl.compile(text)
    given = {"q_offset": torch.tensor([4, 160]), "kv_lengths": torch.tensor([100, 256])}
    told = attention.explain(q_len=96, kv_len=256, batch=2, **given)
    assert "kv_lengths[b]" in told
    assert "listed" not in told
    assert "run time" not in told
    checked = attndsl.verify(text, 96, 256, batch=2, block_m=32, block_n=32, **given)
    assert checked.surplus == 0


def test_parts_keep_closed_forms():
    text = "causal_lower_right() and q - kv < 40 * (h + 1)"
    sizes = {"whole_sizes": {"q_len": 400, "heads": 8}, "h_offset": 4, "q_offset": 100}
    checked = attndsl.verify(text, 96, 256, heads=4, block_m=32, block_n=32, **sizes)
    assert checked.surplus == 0
    assert "whole_q_len" in attndsl.compile(text).explain(q_len=96, kv_len=256, heads=4, **sizes)
