"""Rows whose scores are large: weights, gradients and log-sum-exps of any finite size."""

from __future__ import annotations

import pytest
import torch

import attndsl

LEAST = torch.finfo(torch.float32).min
FILLS = (-1e4, -1e6, -1e9, -1e10, -1e30, LEAST, 1e30, 2.4e38)
PROGRAMS = {
    "pairs": "tensor m[q_len, kv_len]: float\nscore = score + m[q, kv]",
    "causal pairs": "tensor m[q_len, kv_len]: float\nmask = causal()\nscore = score + m[q, kv]",
    "keys": "tensor m[kv_len]: float\nscore = score + m[kv]",
    "rows": "tensor m[q_len]: float\nscore = score + m[q]",
    "sink": "tensor m[q_len, kv_len]: float\nscore = score + m[q, kv]\nsink = 0.5",
}
LENGTH = 70


def bias_of(name: str, fill: float) -> torch.Tensor:
    """One row of large scores alone, one with some, and one with a single huge one."""
    if name in ("keys", "rows"):
        bias = torch.full((LENGTH,), fill)
        return bias if name == "keys" else bias.where(torch.arange(LENGTH) % 3 == 0, 0.0)
    bias = torch.zeros(LENGTH, LENGTH)
    bias[3] = bias[64] = fill
    bias[7, 5:] = fill
    bias[9, 4] = abs(fill)
    return bias


def by_hand(name, operands, bias, added_last):
    """Output and log-sum-exp in fp64 of scores as fp32 holds them.

    If ``added_last``, the bias of a row is added to its log-sum-exp, not to its scores.
    """
    q, k, v = operands
    exact = (q @ k.mT) / q.shape[3] ** 0.5
    if added_last:
        scores = exact.detach()
    else:
        added = bias[:, None] if name == "rows" else bias
        scores = exact.detach().float() + added.float()
    if name == "causal pairs":
        seen = torch.ones_like(scores, dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    scores = scores.double()
    columns = [scores]
    if name == "sink":
        columns.append(scores.new_full((*scores.shape[:-1], 1), 0.5))
    whole = torch.cat(columns, -1)
    peak = whole.amax(-1, keepdim=True)
    relative = scores - peak + (exact - exact.detach())
    total = (whole - peak).exp().sum(-1, keepdim=True)
    # The sum's gradient is that of the weights.
    log = total.log() + ((relative.exp() / total).detach() * (exact - exact.detach())).sum(-1, True)
    weights = (relative - log).exp()
    lse = (peak + log).squeeze(-1)
    return weights @ v, lse + bias.double() if added_last else lse


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_rows_of_large_scores(place, name, fill):
    halves = place.device == "cuda"
    bias = bias_of(name, fill).to(place.device)
    for dtype in (torch.bfloat16, torch.float16) if halves else (torch.float32,):
        operands = [torch.randn(1, 2, LENGTH, 16, device=place.device, dtype=dtype) for _ in "qkv"]
        leaves = [x.clone().requires_grad_() for x in operands]
        out, lse = attndsl.compile(PROGRAMS[name], backend=place.backend)(
            *leaves, m=bias, return_lse=True
        )
        grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
        found = torch.autograd.grad((out, lse), leaves, (grad_out, grad_lse))
        exact = [x.double().requires_grad_() for x in operands]
        # Hopper's kernels add what a whole row has in common to its log-sum-exp alone.
        wanted = by_hand(name, exact, bias, name == "rows" and place.backend == "hopper")
        grads = torch.autograd.grad(wanted, exact, (grad_out.double(), grad_lse.double()))
        bound = 0.06 if dtype is torch.bfloat16 else 0.01 if halves else 2e-5
        for x, y in zip((out, *found), (wanted[0], *grads), strict=True):
            assert (x.double() - y).abs().amax() < bound
        atol = 1e-3 if halves else 1e-4
        torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-5, atol=atol)


@pytest.mark.parametrize("fill", [-1e9, -1e30])
def test_numbers_in_the_text_are_large_too(place, fill):
    """A row that sees nothing but such a number has the mean of all values."""
    text = f"score = where(kv <= q - 8, score, {fill:.0f}.0)"
    operands = [torch.randn(1, 2, LENGTH, 16, device=place.device) for _ in "qkv"]
    kind = torch.bfloat16 if place.device == "cuda" else torch.float32
    q, k, v = (x.to(kind) for x in operands)
    out = attndsl.compile(text, backend=place.backend)(q, k, v)
    mean = v.double().mean(2, keepdim=True).expand(-1, -1, 8, -1)
    bound = 0.02 if kind is torch.bfloat16 else 1e-5
    assert (out[:, :, :8].double() - mean).abs().amax() < bound


@pytest.mark.parametrize("size", [1e4, 1e6, 1e8, 1e9, 1e10, 1e11, 1e13])
def test_scores_of_q_and_k_alone(place, size):
    """A key far above all others is a row's only one; where kernels cannot tell, NaN says so."""
    kind = torch.bfloat16 if place.device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, 2, LENGTH, 16, device=place.device) for _ in "qkv")
    q[:], k[:, :, 0] = (size / 16) ** 0.5, (size / 16) ** 0.5
    leaves = [x.to(kind).requires_grad_() for x in (q, k, v)]
    out = attndsl.compile("causal()", backend=place.backend)(*leaves)
    grad_out = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, leaves[2], grad_out)
    wanted = leaves[2].detach()[:, :, :1].expand_as(out)
    of_first = torch.zeros_like(grad)
    of_first[:, :, 0] = grad_out.float().sum(2)
    bound = 0.1 if kind is torch.bfloat16 else 1e-3
    for found, right, most in ((out, wanted, 1.8e8), (grad, of_first, 8e6)):
        told = found.isnan() if place.backend == "hopper" and size / 4 > most else False
        assert (told | ((found - right).abs() <= bound * right.abs().amax())).all()
