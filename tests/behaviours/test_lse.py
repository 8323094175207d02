"""Flexible attention 6: the log-sum-exp, and rows in which nothing takes part."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attndsl
from attndsl.call.dispatch import get_backend

CAUSAL = "mask = q >= kv; score = score * 1.25"


def _causal(s, e):
    return s * 1.25, e.q >= e.kv


def test_lse_equals_the_reference(check, place, dtype):
    check(place, CAUSAL, check.inputs(place, dtype, with_lse=True), _causal)


@pytest.mark.few_when_interpreted(dtype=["fp32"])
def test_lse_is_the_natural_logarithm_in_fp32(check, place, dtype):
    inputs = check.inputs(place, dtype)
    attention = attndsl.compile(CAUSAL, backend=place.backend)
    _, lse = attention(inputs.q, inputs.k, inputs.v, return_lse=True)
    q, k = inputs.q.double(), inputs.k.double()
    causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    scores = (q @ k.mT / q.shape[-1] ** 0.5 * 1.25).masked_fill(~causal, -torch.inf)
    assert lse.dtype is torch.float32
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=2e-2, rtol=2e-2)


def test_lse_in_fp64():
    q, k, v = (torch.randn(1, 2, 8, 4, dtype=torch.float64) for _ in range(3))
    _, lse = attndsl.compile("score", backend="reference")(q, k, v, return_lse=True)
    assert lse.dtype is torch.float64
    torch.testing.assert_close(lse, (q @ k.mT / 2).logsumexp(-1), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("factor", [1, 2])
def test_lse_alone(check, place, factor):
    """The output unused: v gets a zero gradient, not none."""
    inputs = check.inputs(place, torch.float32, with_lse=True)
    grads = []
    for backend in ("reference", place.backend):
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        _, lse = attndsl.compile(CAUSAL, backend=backend)(*leaves, return_lse=True)
        (lse * factor * inputs.grad_lse).sum().backward()
        grads.append([x.grad for x in leaves])
    assert all(grad is not None for grad in grads[1])
    assert (grads[1][2] == 0).all()
    for found, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def _negated(grad):
    """``grad``, whose signs torch has yet to change."""
    return torch._neg_view(-grad)


def _at_an_odd_address(grad):
    """``grad``, as gradients of what was joined are: parts of larger ones."""
    return torch.cat([grad.new_zeros(1), grad.flatten()])[1:].view(grad.shape)


def _of_other_strides(grad):
    return grad.mT.contiguous().mT


@pytest.mark.parametrize("laid", [_negated, _at_an_odd_address, _of_other_strides])
@pytest.mark.parametrize("with_out", [True, False])
def test_a_gradient_of_the_lse_may_lie_in_any_way(check, place, laid, with_out):
    inputs = check.inputs(place, torch.float32, with_lse=True)
    found = []
    for backend, given in (("reference", inputs.grad_lse), (place.backend, laid(inputs.grad_lse))):
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out, lse = attndsl.compile(CAUSAL, backend=backend)(*leaves, return_lse=True)
        results, grads = (lse, out)[: 1 + with_out], (given, inputs.grad_out)[: 1 + with_out]
        found.append(torch.autograd.grad(results, leaves, grads))
    assert torch.equal(laid(inputs.grad_lse), inputs.grad_lse)
    for own, expected in zip(*found[::-1], strict=True):
        torch.testing.assert_close(own, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("laid", [_negated, _at_an_odd_address])
def test_kernels_are_given_gradients_of_the_lse_as_they_read_them(laid, device, monkeypatch):
    """In fours, from addresses that an allocation has, by what is stored."""
    backend = get_backend("triton")
    made, seen = type(backend).backward, []

    def noted(own, lowered, call, results):
        seen.append(results.grad_lse)
        return made(own, lowered, call, results)

    monkeypatch.setattr(type(backend), "backward", noted)
    q = torch.randn(1, 2, 5, 16, device=device, requires_grad=True)
    lse = attndsl.compile(CAUSAL, backend="triton")(q, q, q, return_lse=True)[1]
    grad = torch.randn_like(lse)
    lse.backward(laid(grad))
    assert torch.equal(seen[0], grad)
    assert seen[0].is_contiguous()
    assert (seen[0].is_neg(), seen[0].data_ptr() % 16) == (False, 0)


@pytest.mark.few_when_interpreted(dtype=["fp32"])
def test_rows_without_a_live_pair(check, place, dtype):
    """Some rows only, all rows, and rows beside learned tensors."""
    gain = torch.ones(place.shape[1], device=place.device, requires_grad=True)
    inputs = check.inputs(place, dtype, with_lse=True, captures={"gain": gain})
    text = "tensor gain[heads]: float; mask = kv < q - 5; score = score * gain[h]"
    check(place, text, inputs, lambda s, e: (s * e.gain[e.h], e.kv < e.q - 5))
    attention = attndsl.compile(text, backend=place.backend)
    found = check.run(attention, inputs.to(dtype))
    assert (found["out"][:, :, :6] == 0).all()
    assert (found["lse"][:, :, :6] == -torch.inf).all()
    assert found["lse"][:, :, 6:].isfinite().all()
    assert (found["q"][:, :, :6] == 0).all()
    assert all(found[name].isfinite().all() for name in ("q", "k", "v", "gain"))


@pytest.mark.parametrize(
    "text", ["mask = false; score = score * 3", "score = where(q < 0, score, -inf)"]
)
def test_no_live_pair_at_all(check, place, text):
    inputs = check.inputs(place, torch.float32, with_lse=True)
    found = check.run(attndsl.compile(text, backend=place.backend), inputs.to(torch.float32))
    assert (found["lse"] == -torch.inf).all()
    for name in ("out", "q", "k", "v"):
        assert (found[name] == 0).all(), name


def test_scores_of_minus_infinity_weigh_nothing(check, place):
    """A live pair of score -inf is no live pair, and a row of such has none."""
    length = place.shape[2]
    bias = torch.zeros(length, length, device=place.device)
    bias[3] = -torch.inf
    bias[:, 5] = -torch.inf
    inputs = check.inputs(place, torch.float32, with_lse=True, captures={"bias": bias})
    text = "tensor bias[q_len, kv_len]: float; score = score + bias[q, kv]"
    check(place, text, inputs, lambda s, e: (s, e.bias[e.q, e.kv] == 0))
    found = check.run(attndsl.compile(text, backend=place.backend), inputs.to(torch.float32))
    assert (found["out"][:, :, 3] == 0).all()
    assert (found["lse"][:, :, 3] == -torch.inf).all()
    assert all(found[name].isfinite().all() for name in "qkv")


@pytest.mark.few_when_interpreted(dtype=["fp32"])
def test_large_scores_do_not_overflow(check, place, dtype):
    inputs = check.inputs(place, dtype, with_lse=True)
    check(place, "score * 30 + 500", inputs, lambda s, e: s * 30 + 500)


def _decided(inputs):
    """``inputs`` with q and k in eighths: no rounding moves a score across 0.1 or 0.51."""
    q, k = ((x.detach() * 8).round() / 8 for x in (inputs.q, inputs.k))
    return replace(inputs, q=q, k=k)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by numpy, in the interpreter
def test_nan_in_masked_pairs_reaches_nothing(check, place):
    inputs = _decided(check.inputs(place, torch.float32, with_lse=True))
    check(
        place,
        "mask = score > 0.1; score = log(score - 0.05)",
        inputs,
        lambda s, e: (torch.log(torch.where(s > 0.1, s - 0.05, 1.0)), s > 0.1),
    )


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_the_branch_not_taken_reaches_nothing(check, place):
    inputs = _decided(check.inputs(place, torch.float32))
    check(
        place,
        "where(score > 0.51, log(score - 0.25), 2 * score)",
        inputs,
        lambda s, e: torch.where(s > 0.51, torch.log(torch.where(s > 0.51, s - 0.25, 1.0)), 2 * s),
    )
