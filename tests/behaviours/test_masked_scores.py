"""Scores that mask themselves: outputs and gradients by formulas of plain torch."""

from __future__ import annotations

import pytest
import torch

import attndsl

PROGRAMS = {
    "capped": (
        "score = where(q >= kv, score, -inf); score = softcap(score, 5.0)",
        lambda s, e: (5 * torch.tanh(s / 5), e.q >= e.kv),
    ),
    "added": (
        "m = where(q >= kv, 0.0, -inf); score = 2 * (score + m); mask = score > -1; "
        "score = max(score, 0.5)",
        lambda s, e: ((2 * s).clamp(min=0.5), (e.q >= e.kv) & (2 * s > -1)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_later_lines_keep_the_mask(check, place, name):
    text, dense = PROGRAMS[name]
    check(place, text, check.inputs(place, torch.float32), dense)


def test_weights_of_masked_pairs_are_zero(place):
    """Where the weight of -inf would be 1, and its gradient no number."""
    text = "tensor g[heads]: float; score = where(q >= kv, g[h] * score, -inf); "
    attention = attndsl.compile(text + "weights = exp(-score)", backend=place.backend)
    heads = place.shape[1]
    shapes = ((1, heads, 9, 16), (1, heads, 9, 16), (1, heads, 9, 16), (heads,))
    leaves = [torch.randn(shape, device=place.device, requires_grad=True) for shape in shapes]
    q, k, v, g = leaves
    scores = g[:, None, None] * (q @ k.mT / 4)
    expected = torch.exp(-scores).tril() @ v
    found = attention(q, k, v, g=g)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    grads = (torch.autograd.grad(x.sin().sum(), leaves) for x in (found, expected))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, atol=3e-3, rtol=3e-3)
