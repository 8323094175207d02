"""Weights of the program's own, in place of a softmax: nothing is divided, and there is no lse."""

from __future__ import annotations

import pytest
import torch

import attndsl

PROGRAMS = {
    "sigmoid": "weights = sigmoid(score - 2)",
    "causal": "mask = q >= kv; weights = sigmoid(score)",
    "squared": "mask = causal(); score = softcap(score, 3.0); weights = relu(score) * relu(score)",
    "linear": "mask = q >= kv; weights = score / kv_len",
    "learned score": (
        "tensor s[heads]: float; param a: float; mask = kv < q - 5; score = s[h] * score + a;"
        "weights = sigmoid(score)"
    ),
    "learned beside the score": (
        "tensor s[heads]: float; param a: float; mask = q >= kv; score = s[h] * score;"
        "weights = sigmoid(score + s[h]) * a"
    ),
    "learned by position": "tensor t[kv_len]: float; weights = sigmoid(score) * t[kv]",
    "dropped": "mask = q >= kv; weights = dropout(sigmoid(score), 0.25)",
}


def _captures(place, text):
    captures = {}
    if "tensor s" in text:
        captures["s"] = torch.randn(place.shape[1], device=place.device).requires_grad_()
    if "tensor t" in text:
        captures["t"] = torch.randn(place.shape[2], device=place.device).requires_grad_()
    if "param a" in text:
        captures["a"] = torch.tensor(0.5, device=place.device, requires_grad=True)
    return captures


@pytest.mark.parametrize("name", PROGRAMS)
def test_outputs_and_gradients(check, kernels, name):
    text = PROGRAMS[name]
    inputs = check.inputs(
        kernels, torch.float32, captures=_captures(kernels, text), options={"seed": 11}
    )
    check(kernels, text, inputs)


@pytest.mark.few_when_interpreted(dtype=["fp32"])
@pytest.mark.parametrize(("q_len", "kv_len", "kv_heads"), [(23, 41, None), (40, 7, 1)])
def test_ragged_lengths_and_groups(check, kernels, dtype, q_len, kv_len, kv_heads):
    inputs = check.inputs(kernels, dtype, q_len=q_len, kv_len=kv_len, kv_heads=kv_heads)
    check(kernels, PROGRAMS["causal"], inputs)


def test_rows_without_a_live_pair_are_zero(kernels):
    """Also where a dead pair's weight would be infinite."""
    q, k, v = (
        torch.randn(1, 2, 24, 16, device=kernels.device, requires_grad=True) for _ in range(3)
    )
    attention = attndsl.compile(
        "mask = kv < q - 5; score = score if kv < q - 5 else 1e4; weights = exp(score)",
        backend=kernels.backend,
    )
    out = attention(q, k, v)
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert (out[:, :, :6] == 0).all()
    assert all(x.isfinite().all() for x in (out, *gradients))
