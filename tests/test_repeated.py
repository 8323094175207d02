"""Calls that are made again: results of ordinary ones without binding, and refused like them."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.compiled import Compiled
from attndsl.errors import ArgumentError
from attndsl.repeated import Repeated
from attndsl.runtime.backward import Asked, Results

TEXT = "tensor gain[heads]: float; mask = causal(); score = score * gain[h]"
PLACES = {"q_offset": 3, "kv_offset": 0, "q_len": 40, "kv_len": 40, "deterministic": None}


def drawn(rows=20, keys=30, dim=8):
    q = torch.randn(2, 4, rows, dim)
    return q, torch.randn(2, 2, keys, dim), torch.randn(2, 2, keys, dim)


@pytest.fixture
def bound(monkeypatch):
    """How often a call's signature was looked for."""
    found = []
    real = Compiled._key_of
    monkeypatch.setattr(Compiled, "_key_of", lambda *args: found.append(1) or real(*args))
    return found


def test_results_are_those_of_ordinary_calls(bound):
    attention = attndsl.compile(TEXT)
    again, gain = Repeated(attention, PLACES), torch.rand(4)
    numbers = []
    for _ in range(5):
        operands, room = drawn(), torch.empty(2, 4, 20, 8)
        before = len(bound)
        lse = again.put(operands, room, {"gain": gain})
        numbers.append(len(bound) - before)
        wanted, wanted_lse = attention(*operands, return_lse=True, gain=gain, **PLACES)
        assert torch.equal(room, wanted)
        assert torch.equal(lse, wanted_lse)
    # The first two are ordinary calls, and the second one is remembered.
    assert numbers == [1, 2, 0, 0, 0]


def test_gradients_are_those_of_ordinary_calls(bound):
    attention = attndsl.compile(TEXT)
    again, gain = Repeated(attention, PLACES), torch.rand(4)
    how = Asked(captures=["gain"])
    for number in range(4):
        operands, grad = drawn(), torch.randn(2, 4, 20, 8)
        out, lse = attention(*operands, return_lse=True, gain=gain, **PLACES)
        results, room = (out, lse, grad, None), torch.empty_like(operands[0])
        before = len(bound)
        found = again.backward(operands, Results(*results), room, how, {"gain": gain})
        assert (len(bound) == before) == (number > 1)
        wanted = attention.backward(
            *operands, *results, wants_captures=["gain"], gain=gain, **PLACES
        )
        for x, y in zip((found.q, found.k, found.v), (wanted.q, wanted.k, wanted.v), strict=True):
            assert torch.equal(x, y)
        assert found.q is room
        assert torch.equal(found.captures["gain"], wanted.captures["gain"])


def test_gradients_of_a_part_of_the_heads_are_those_of_the_whole(bound):
    """The capture is that of all heads, and so is its gradient."""
    attention, gain = attndsl.compile(TEXT), torch.rand(8)
    options = PLACES | {"heads": 8, "kv_heads": 4, "h_offset": 4}
    again, how = Repeated(attention, options), Asked(captures=["gain"])
    for number in range(4):
        operands, grad = drawn(), torch.randn(2, 4, 20, 8)
        results = (*attention(*operands, return_lse=True, gain=gain, **options), grad, None)
        before = len(bound)
        found = again.backward(operands, Results(*results), None, how, {"gain": gain})
        assert (len(bound) == before) == (number > 1)
        wanted = attention.backward(
            *operands, *results, wants_captures=["gain"], gain=gain, **options
        )
        assert found.captures["gain"].shape == (8,)
        assert torch.equal(found.captures["gain"], wanted.captures["gain"])


def test_other_operands_are_bound(bound):
    attention = attndsl.compile("causal()")
    again = Repeated(attention, {"deterministic": None})
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in drawn()]
    for operands in (drawn(), drawn(), drawn(), tuple(turned), drawn(25)):
        before, room = len(bound), torch.empty_like(operands[0])
        again.put(operands, room, {})
        torch.testing.assert_close(room, attention(*operands))
        if operands[0].shape[2] == 25 or not operands[0].is_contiguous():
            assert len(bound) > before


def test_other_captures_are_bound(bound):
    """Of other sizes, also if the tensor is the same."""
    text = "param n: int = 4\ntensor t[n]: float\nscore = score + t[q % n]"
    attention = attndsl.compile(text)
    again, operands, table = Repeated(attention, {}), drawn(), torch.randn(4)
    for number, (given, size) in enumerate(((table, 4), (table, 4), (table, 4), (table, 6))):
        if size == 6:
            table.data = torch.randn(6)
        before, room = len(bound), torch.empty_like(operands[0])
        again.put(operands, room, {"t": given, "n": size})
        assert (len(bound) == before) == (number == 2)
        assert torch.equal(room, attention(*operands, t=given, n=size))


def test_torchs_switch_of_determinism_is_seen(bound):
    attention = attndsl.compile("causal()")
    again = Repeated(attention, {"deterministic": None})
    operands = drawn()
    for _ in range(3):
        again.put(operands, torch.empty_like(operands[0]), {})
    before = len(bound)
    torch.use_deterministic_algorithms(True)
    try:
        again.put(operands, torch.empty_like(operands[0]), {})
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(bound) > before


def test_values_are_looked_at_each_time():
    text = "param p: float\nweights = dropout(softmax(score), p)"
    again = Repeated(attndsl.compile(text), {"seed": 3})
    operands = drawn()
    for _ in range(4):
        again.put(operands, torch.empty_like(operands[0]), {"p": 0.5})
    with pytest.raises(ArgumentError, match="probability") as caught:
        again.put(operands, torch.empty_like(operands[0]), {"p": 1.5})
    assert "param p: float" in str(caught.value)
    wide = Repeated(attndsl.compile("param n: int = 1\nmask = q - kv < n"), {})
    for _ in range(4):
        wide.put(operands, torch.empty_like(operands[0]), {"n": 5})
    with pytest.raises(ArgumentError, match="64 bits"):
        wide.put(operands, torch.empty_like(operands[0]), {"n": 1 << 70})


def test_a_seed_in_a_tensor_is_bound_each_time(bound):
    """Such calls share nothing that is kept."""
    attention = attndsl.compile("weights = dropout(softmax(score), 0.3)")
    seed, operands = torch.tensor(7), drawn()
    again = Repeated(attention, {"seed": seed})
    wanted = attention(*operands, seed=seed)
    for _ in range(4):
        room = torch.empty_like(operands[0])
        again.put(operands, room, {})
        assert torch.equal(room, wanted)
    assert len(bound) == 5
