"""Exact sums: units from bounds, and the same integers in any order."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attndsl
from attndsl.backends.triton.captures.scatter_sums import (
    Exact,
    Size,
    bounds_from_operands,
    buffers,
    gradient_of,
    known_factors,
    scales_of,
)

SCALE = 8.0
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=False)


def bits(value):
    return torch.tensor([value], dtype=torch.float32).view(torch.int32)


def call_of(shape, dtype=torch.float32):
    return SimpleNamespace(tensors={"t": torch.empty(shape, dtype=dtype)}, q=torch.empty(1))


def exact_parts(terms, scale):
    """As ``library.exact_parts``."""
    return torch.floor(terms.double() * scale + 0.5).long()


@settings(deadline=None)
@given(st.lists(FLOATS, min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_sums_keep_their_bound_and_have_no_order(values, random):
    """One row a term, so that the bound of a row is the greatest size."""
    terms = torch.tensor(values, dtype=torch.float32)
    bound = float(terms.abs().max())
    scale, inverse = scales_of(bits(bound), len(values))
    whole = [int(part) for part in exact_parts(terms, scale)]
    assert abs(sum(whole)) < 1 << 62
    random.shuffle(whole)
    call = call_of(())
    found = Exact("t", torch.tensor([[sum(whole)]]), torch.zeros(1, dtype=torch.int32), ())
    total = gradient_of(found, inverse[0], call)
    expected = np.sum(np.array(values, dtype=np.longdouble))
    # Half a unit a term, and the rounding of the result.
    allowed = len(values) * (len(values) * bound * 2.0**-60) + abs(float(expected)) * 2.0**-24
    if np.isfinite(np.float32(expected)):
        assert abs(float(total) - float(expected)) <= allowed * 1.01 + 1e-44


@pytest.mark.parametrize("bound", [0.0, 1e-45, 1e-38, 1.0, 3.4e38, float("inf")])
@pytest.mark.parametrize("rows", [1, 2, 3, 1 << 20, (1 << 31) - 1])
def test_units_are_powers_of_two_that_undo_each_other(bound, rows):
    scale, inverse = scales_of(bits(bound), rows)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    assert float(scale * inverse) == 1.0
    # The greatest sum that there may be, twice: bounds are rounded.
    largest = bound if bound < float("inf") else 2.0**159
    assert 2 * largest * rows * float(scale) <= 2.0**62


@pytest.mark.parametrize(("count", "copies"), [(1, 64), (4096, 64), (1 << 17, 2), (1 << 20, 1)])
def test_small_tables_are_added_up_in_copies(count, copies):
    (found,) = buffers(["t"], call_of((count,)))
    assert found.sums.shape == (copies, count)
    assert found.notes.shape == (count,)


def test_what_is_noted_replaces_the_sum():
    notes = torch.arange(8, dtype=torch.int32)
    found = Exact("t", torch.full((2, 8), 3), notes, (1,))
    total = gradient_of(found, torch.tensor(0.5), call_of((8,), torch.float16))
    inf, nan = float("inf"), float("nan")
    expected = torch.tensor([3.0, inf, -inf, nan, nan, nan, nan, nan], dtype=torch.float16)
    torch.testing.assert_close(total, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score = score + t[q % n]", (1.0, 0.0)),
        ("score = 3 * score - 2 * t[q % n] + t[kv % n]", (3.0, 0.0)),
        ("score = score * t[q % n]", (0.0, 1.0)),
        ("score = -score * t[q % n] * 0.5 + 2 * t[kv % n]", (2.0, 0.5)),
        ("score = t[q % n] * (2 * tanh(score) - 3 * abs(score))", (2.0, 3.0)),
        ("score = score * score * t[q % n]", None),
        ("score = exp(score) * t[q % n]", None),
        ("score = score + q * t[q % n]", None),
        ("score = score + t[q % n] ** 2", None),
        ("score = score + t[q % n]; weights = sigmoid(score)", None),
        ("score = score + t[q % n]; weights = dropout(softmax(score), 0.1)", None),
    ],
)
def test_what_operands_can_bound(text, expected):
    lowered = attndsl.compile(f"tensor t[n]: float; {text}").lowered
    found = known_factors(lowered, {"t"})
    assert (found and found["t"]) == expected


def gradient_of_score(q, grad, v, shift):
    """dS of one head, with delta, which ``shift`` is taken from."""
    weights = torch.softmax(SCALE * (q @ q.mT), -1)
    delta = ((weights @ v) * grad).sum(-1) - shift
    return weights * (grad @ v.mT - delta[..., None]), delta


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_bounds_from_operands_hold(size):
    torch.manual_seed(0)
    q, grad, v = torch.randn(3, 1, 2, 20, 4, dtype=torch.float64)
    dscore, delta = gradient_of_score(q, size * grad, v, 3 * size)
    call = SimpleNamespace(q=q.float(), k=q.float(), v=v.float(), scale=-SCALE)
    factors = {"a": Size(0.5), "b": Size(2.0), "c": Size(1.0, 0.5)}
    found = bounds_from_operands(factors, call, (size * grad).float(), delta.float())
    bounds = found.view(torch.float32)
    raw = SCALE * (q @ q.mT)
    for bound, factor in zip(bounds, factors.values(), strict=True):
        parts = dscore * (factor.constant + factor.of_score * raw.abs())
        row = float(parts.abs().sum(-1).max())
        assert row <= float(bound) < 100 * row


def test_rows_that_are_not_finite_bound_nothing():
    grad, v, delta = torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), torch.zeros(1, 1, 3)
    grad[0, 0, 0, 1], v[0, 0, 1, 0], delta[0, 0, 2] = float("nan"), float("inf"), float("-inf")
    q, k = torch.ones(1, 1, 3, 4), 3 * torch.ones(1, 1, 3, 4)
    q[0, 0, 0, 3], k[0, 0, 2, 1] = float("inf"), float("nan")
    call = SimpleNamespace(q=q, k=k, v=v, scale=0.5)
    found = bounds_from_operands({"t": Size(1.0)}, call, grad, delta)
    assert float(found.view(torch.float32)) == 4.0
    # Rows of Q and K have norms of 2 and 6.
    found = bounds_from_operands({"t": Size(1.0, 0.25)}, call, grad, delta)
    assert float(found.view(torch.float32)) == 4.0 * (1.0 + 0.25 * 6.0)
    # Finite numbers whose sum is not do count.
    found = bounds_from_operands({"t": Size(1.0)}, call, 3e38 * grad, delta)
    assert float(found.view(torch.float32)) == float("inf")
