"""Calls on CPUs that differ in the number of keys alone share one prepared call."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.call import resolve
from attndsl.errors import ShapeError


@pytest.fixture
def bound(monkeypatch):
    """The lengths of calls that were bound."""
    lengths = []
    real = resolve.bind

    def counted(program, operands, *rest):
        lengths.append(operands[1].shape[2])
        return real(program, operands, *rest)

    monkeypatch.setattr(resolve, "bind", counted)
    return lengths


def _operands(keys, heads=2, dtype=torch.float32):
    return torch.randn(1, heads, 1, 8, dtype=dtype), *torch.randn(2, 1, 2, keys, 8, dtype=dtype)


@pytest.mark.parametrize("text", ["causal()", "causal_lower_right()", "causal() and q - kv < 9"])
def test_a_growing_cache_is_bound_once(bound, text):
    found, wanted = (attndsl.compile(text, backend=name) for name in ("cpu", "reference"))
    k, v = torch.randn(2, 1, 2, 64, 8)
    for length in range(1, 30):
        q = torch.randn(1, 2, 1, 8)
        # A cache with room for more, and one that is put together anew.
        for cut in (lambda x, n=length: x[:, :, :n], lambda x, n=length: x[:, :, :n].clone()):
            options = {"q_offset": length - 1} if "right" not in text else {"kv_offset": 1}
            if "right" in text:
                options = {"q_offset": 7, "kv_offset": 7}
            before = len(bound)
            out = found(q, cut(k), cut(v), **options)
            assert len(bound) - before <= 1
            torch.testing.assert_close(out, wanted(q, cut(k), cut(v), **options))
    # Offsets of 0 are looked at each time: somebody may have forgotten them.
    assert bound.count(29) <= 4


def test_only_numbers_of_keys_may_differ(bound):
    attention = attndsl.compile("causal()", backend="cpu")
    attention(*_operands(10), q_offset=9)
    attention(*_operands(11), q_offset=10)
    assert bound == [10]
    for others in (_operands(12, heads=4), _operands(12, dtype=torch.float64)):
        before = len(bound)
        attention(*others, q_offset=11)
        assert len(bound) == before + 1
    q, k, v = _operands(13)
    for wrong in ((q, k, v[:, :, :-1]), (q, k[..., :-1], v), (q, k[:, :1], v), (q, k, v[0])):
        with pytest.raises(ShapeError):
            attention(*wrong, q_offset=12)
    torch.testing.assert_close(
        attention(q, k.mT.contiguous().mT, v, q_offset=12), attention(q, k, v, q_offset=12)
    )


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_tensors_of_fewer_dims_are_refused(dims):
    attention = attndsl.compile("causal()", backend="cpu")
    for length in (10, 11):
        attention(*_operands(length), q_offset=length - 1)
    q, k, v = _operands(12)
    few = k[(0,) * (4 - dims)]
    for wrong in ((q, few, v), (q, k, few), (q, few, few)):
        with pytest.raises(ShapeError, match="dims"):
            attention(*wrong, q_offset=11)


def test_gradients_and_results_with_lse(bound):
    found, wanted = (attndsl.compile("causal()", backend=name) for name in ("cpu", "reference"))
    for length in (5, 6, 7):
        operands = [x.requires_grad_() for x in _operands(length)]
        results = []
        for attention in (found, wanted):
            out, lse = attention(*operands, q_offset=length - 1, return_lse=True)
            results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), operands)))
        torch.testing.assert_close(*results)
    assert bound == [5, 5, 6, 7]  # The reference looks at each.


def test_a_forgotten_offset_is_told_of():
    attention = attndsl.compile("causal()", backend="cpu")
    attention(*_operands(1))
    with pytest.warns(attndsl.errors.ProgramWarning, match="no offset"):
        attention(*_operands(2))


def test_every_doubtful_call_is_told_of():
    attention = attndsl.compile("causal()", backend="cpu")
    for length in (5, 6, 7):
        q, k = torch.randn(1, 300, 1, 8), torch.randn(1, 2, length, 8)
        with pytest.warns(attndsl.errors.ProgramWarning, match="300 heads"):
            attention(q, k, k, q_offset=length - 1)


def test_keys_have_positions_below_the_limit():
    attention = attndsl.compile("q >= kv", backend="cpu")
    q, k = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    for length in (8, 9):
        attention(q, k.expand(1, 1, length, 1), k.expand(1, 1, length, 1), q_offset=7)
    many = k.expand(1, 1, 1 << 30, 1)
    with pytest.raises(attndsl.errors.ArgumentError, match="keys"):
        attention(q, many, many, q_offset=7)


def test_captures_and_checks_are_looked_at_each_time(bound, monkeypatch):
    attention = attndsl.compile("param w: int\nmask = causal() and q - kv < w", backend="cpu")
    for length in (5, 6):
        attention(*_operands(length), q_offset=length - 1, w=3)
    assert bound == [5, 6]
    attention = attndsl.compile("causal()", backend="cpu")
    attention(*_operands(5), q_offset=4)
    monkeypatch.setenv("ATTNDSL_VERIFY", "1")
    attention(*_operands(6), q_offset=5)
    assert bound[2:] == [5, 6]
