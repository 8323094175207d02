"""Sinks: one more logit in the denominator of each row, with no value; learned or not."""

from __future__ import annotations

import pytest
import torch

import attndsl

PROGRAMS = {
    "number": "mask = q >= kv; sink = 1.5",
    "by head": "tensor s[heads]: float; mask = q >= kv; sink = s[h]",
    "by batch and head": "tensor s[batch, heads]: float; sink = 2 * s[b, h]",
    "product": "tensor s[heads]: float; mask = kv < q - 5; sink = s[h] * s[h] - 1",
    "in the score too": "tensor s[heads]: float; score = s[h] * score; sink = s[h]",
    "a param": "param a: float; mask = q >= kv; sink = a",
    "with alibi": "tensor s[heads]: float; mask = causal(); score = score + alibi(); sink = s[h]",
    "with a row's bias": (
        "tensor s[heads]: float; param a: float; score = score + a * q; sink = s[h] + a"
    ),
    "looked up twice": "tensor s[heads]: float; sink = s[h] + s[0] * s[heads - 1]",
}


def _captures(place, text):
    batch, heads = place.shape[:2]
    captures = {}
    if "tensor s" in text:
        shape = (batch, heads) if "[batch" in text else (heads,)
        captures["s"] = torch.randn(shape, device=place.device).requires_grad_()
    if "param a" in text:
        captures["a"] = torch.tensor(0.05, device=place.device, requires_grad=True)
    return captures


@pytest.mark.parametrize("name", PROGRAMS)
def test_sinks_and_their_gradients(check, kernels, name):
    text = PROGRAMS[name]
    inputs = check.inputs(kernels, torch.float16, with_lse=True, captures=_captures(kernels, text))
    check(kernels, text, inputs)


@pytest.mark.parametrize(("q_len", "kv_len", "kv_heads"), [(23, 41, None), (40, 7, 1)])
def test_ragged_lengths_and_groups(check, kernels, q_len, kv_len, kv_heads):
    text = PROGRAMS["by head"]
    inputs = check.inputs(
        kernels, torch.float32, q_len=q_len, kv_len=kv_len, kv_heads=kv_heads, with_lse=True,
        captures=_captures(kernels, text),
    )  # fmt: skip
    check(kernels, text, inputs)


@pytest.mark.parametrize("sink", [5000.0, -5000.0, -torch.inf])
def test_far_from_the_scores(check, kernels, sink):
    """Far above, nothing is left of the output; far below, nothing of the sink. No NaN either."""
    inputs = check.inputs(kernels, torch.float32)
    logits = torch.full((kernels.shape[1],), sink, device=kernels.device)
    attention = attndsl.compile("tensor s[heads]: float; sink = s[h]", backend=kernels.backend)
    out, lse = attention(inputs.q, inputs.k, inputs.v, s=logits, return_lse=True)
    plain, plain_lse = attndsl.compile("score", backend=kernels.backend)(
        inputs.q, inputs.k, inputs.v, return_lse=True
    )
    expected = (
        (torch.zeros_like(out), torch.full_like(lse, sink)) if sink > 0 else (plain, plain_lse)
    )
    torch.testing.assert_close((out, lse), expected)


def test_rows_without_a_live_pair_stay_dead(kernels):
    s = torch.zeros(2, device=kernels.device, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 24, 16, device=kernels.device) for _ in range(3))
    attention = attndsl.compile(
        "tensor s[heads]: float; mask = kv < q - 5; sink = s[h]", backend=kernels.backend
    )
    out, lse = attention(q, k, v, s=s, return_lse=True)
    assert (out[:, :, :6] == 0).all()
    assert (lse[:, :, :6] == -torch.inf).all()
    assert lse[:, :, 6:].isfinite().all()
    (grad,) = torch.autograd.grad(out[:, :, :6].sum(), s)
    assert (grad == 0).all()


def test_gradients_are_equal_bit_for_bit(kernels):
    s = torch.randn(2, device=kernels.device, requires_grad=True)
    q, k, v = (torch.randn(1, 2, 40, 16, device=kernels.device) for _ in range(3))
    attention = attndsl.compile(
        "tensor s[heads]: float; mask = q >= kv; sink = s[h]", backend=kernels.backend
    )
    found = [
        torch.autograd.grad(attention(q, k, v, s=s, deterministic=True).sum(), s)[0]
        for _ in range(5)
    ]
    assert all(torch.equal(found[0], other) for other in found)
    assert (found[0] != 0).all()


@pytest.mark.parametrize("mask", ["false", "kv < n"])
def test_rows_with_no_live_pair_read_no_sink(place, mask):
    kind = torch.bfloat16 if place.device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(1, 2, 40, 16, device=place.device, dtype=kind).requires_grad_() for _ in "qkv"
    )
    sink = torch.full((2,), torch.nan, device=place.device).requires_grad_()
    text = f"tensor s[heads]: float; param n: int = 0; mask = {mask}; sink = s[h] + n"
    attn = attndsl.compile(text, backend=place.backend)
    out, lse = attn(q, k, v, s=sink, return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    for grad in torch.autograd.grad(out, (q, k, v, sink), torch.randn_like(out)):
        assert (grad == 0).all()
