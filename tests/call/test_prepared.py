"""The one prepared call: every way to call a program finds what was prepared for its signature."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import attndsl
from attndsl.call import prepared as module
from attndsl.errors import ArgumentError, ProgramWarning
from attndsl.foundation.caches import CACHES, Reason

TEXT = "tensor gain[heads]: float; mask = causal(); score = score * gain[h]"
PLACES = {"q_offset": 3, "kv_offset": 0, "q_len": 40, "kv_len": 40}


def drawn(rows=20, keys=30, dim=8):
    q = torch.randn(2, 4, rows, dim)
    return q, torch.randn(2, 2, keys, dim), torch.randn(2, 2, keys, dim)


@pytest.fixture
def prepared(monkeypatch):
    """Calls that were prepared."""
    found = []
    real = module.prepare
    monkeypatch.setattr(module, "prepare", lambda *given: found.append(1) or real(*given))
    return found


def test_all_ways_share_what_is_prepared(prepared):
    attention = attndsl.compile(TEXT)
    options = {**PLACES, "gain": torch.rand(4)}
    for _ in range(3):
        q, k, v = drawn()
        wanted, lse = attention(q, k, v, return_lse=True, **options)
        out, grad = torch.empty(2, 4, 20, 8), torch.randn(2, 4, 20, 8)
        assert torch.equal(attention(q, k, v, out=out, **options), wanted)
        found = attention.backward(q, k, v, out, lse, grad, **options)
        leaf = q.clone().requires_grad_()
        attention(leaf, k, v, **options).backward(grad)
        assert torch.equal(leaf.grad, found.q)
    assert len(prepared) == 1


def test_captures_given_at_once_are_those_by_keyword():
    attention, operands, gain = attndsl.compile(TEXT), drawn(), torch.rand(4)
    wanted = attention(*operands, gain=gain, **PLACES)
    for _ in range(2):
        assert torch.equal(attention(*operands, captures={"gain": gain}, **PLACES), wanted)


def test_other_operands_are_prepared(prepared):
    attention = attndsl.compile(TEXT)
    gain = torch.rand(4)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn()]
    for number, operands in enumerate((drawn(), drawn(), tuple(turned), drawn(25))):
        attention(*operands, gain=gain, q_offset=10)
        assert len(prepared) == (1, 1, 2, 3)[number]


def test_other_captures_are_prepared(prepared):
    """Calls of other sizes, also if the tensor is the same."""
    text = "param n: int = 4\ntensor t[n]: float\nscore = score + t[q % n]"
    attention, reference = (attndsl.compile(text, backend=x) for x in ("auto", "reference"))
    operands, table = drawn(), torch.randn(4)
    for size in (4, 4, 6):
        if size == 6:
            table.data = torch.randn(6)
        found = attention(*operands, t=table, n=size)
        torch.testing.assert_close(found, reference(*operands, t=table, n=size))
    assert len(prepared) == 4  # Two signatures of each program.


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"q_offset": 1}, {"q_offset": torch.tensor(1)}),
        ({"q_len": 40, "q_offset": 1}, {"q_len": 41, "q_offset": 1}),
        ({"h_offset": 0, "heads": 8, "kv_heads": 4}, {"h_offset": 4, "heads": 8, "kv_heads": 4}),
        ({"deterministic": True}, {"deterministic": False}),
        ({"scale": 1}, {"scale": 1.0}),
        ({"q_index": torch.arange(20)}, {"q_index": torch.arange(20, dtype=torch.int32)}),
        ({"kv_lengths": torch.tensor([3, 4])}, {}),
    ],
)
def test_options_that_decide_stand_in_the_signature(prepared, first, second):
    attention = attndsl.compile("kv <= q + h")
    operands = drawn()
    for _ in range(2):
        for options in (first, second):
            attention(*operands, **options)
    assert len(prepared) == 2


def test_values_alone_do_not_stand_in_the_signature(prepared):
    attention = attndsl.compile("param w: int\nmask = q - kv < w and kv <= q")
    reference = attndsl.compile(attention.text, backend="reference")
    operands = drawn()
    for number in range(4):
        options = {"w": 3 + number, "q_offset": 10 + number, "scale": 0.1 * (number + 1)}
        found = attention(*operands, **options)
        torch.testing.assert_close(found, reference(*operands, **options))
    assert len(prepared) == 2  # One of each program.


def test_torchs_switch_of_determinism_stands_in_it(prepared):
    attention, operands = attndsl.compile(TEXT), drawn()
    gain = torch.rand(4)
    attention(*operands, gain=gain, q_offset=10)
    torch.use_deterministic_algorithms(True)
    try:
        attention(*operands, gain=gain, q_offset=10)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(prepared) == 2


def test_values_are_checked_each_time():
    operands = drawn()
    dropped = attndsl.compile("param p: float\nweights = dropout(softmax(score), p)")
    window = attndsl.compile("param n: int = 1\nmask = q - kv < n")
    for _ in range(2):
        dropped(*operands, seed=3, p=0.5)
        window(*operands, n=5)
    with pytest.raises(ArgumentError, match="probability") as caught:
        dropped(*operands, seed=3, p=1.5)
    assert "param p: float" in str(caught.value)
    with pytest.raises(ArgumentError, match="64 bits"):
        window(*operands, n=1 << 70)


def test_a_growing_cache_of_keys_is_prepared_once(prepared):
    attention = attndsl.compile("causal()")
    reference = attndsl.compile("causal()", backend="reference")
    for keys in range(1, 40):
        q, k, v = drawn(1, keys)
        options = {"q_offset": keys}
        torch.testing.assert_close(
            attention(q, k, v, **options), reference(q, k, v, **options), atol=1e-5, rtol=1e-5
        )
    assert len(prepared) == 1 + 39  # The reference backend knows no other lengths.


def test_lengths_that_are_warned_of_are_prepared_each(prepared):
    attention = attndsl.compile("causal()")
    for keys in (5, 6):
        with pytest.warns(ProgramWarning, match="has no offset"):
            attention(*drawn(3, keys))
    assert len(prepared) == 2


def test_calls_are_prepared_anew_once_their_cache_is_emptied(prepared):
    attention, operands = attndsl.compile("kv <= q + h"), drawn()
    wanted = attention(*operands)
    for number, reason in enumerate((Reason.BACKENDS, Reason.KERNELS, Reason.RESET)):
        CACHES.invalidate(reason)
        assert torch.equal(attention(*operands), wanted)
        assert len(prepared) == 2 + number


def test_programs_go_when_nobody_holds_them():
    """A prepared call holds no program, so that none waits for a collection of cycles."""
    gc.disable()
    try:
        attention = attndsl.compile("kv <= q + h", name="held")
        attention(*drawn())
        seen = weakref.ref(attention)
        del attention
        assert seen() is None
    finally:
        gc.enable()


def test_tensors_are_not_held():
    attention, operands = attndsl.compile(TEXT), list(drawn())
    gain = torch.rand(4)
    attention(*operands, gain=gain, q_offset=10)
    seen = [weakref.ref(x) for x in (*operands, gain)]
    del operands, gain
    gc.collect()
    assert [x() for x in seen] == [None] * 4
