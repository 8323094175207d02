"""Bounds of expressions hold whatever goes into them, and are found where a soft cap makes them."""

from __future__ import annotations

import math

import pytest
import torch

import attndsl
from attndsl.passes.magnitude import magnitude
from attndsl.pipeline import lower
from attndsl.source import Source

BOUNDED = {
    "score = softcap(score, 20.0)": 20.0,
    "score = 5 * tanh(score * 3) - 2": 7.0,
    "score = clamp(score, -3, 8)": 8.0,
    "score = min(max(score, -9.0), 4)": 9.0,
    "score = where(q > kv, sigmoid(score), -4.5)": 4.5,
    "score = 3 * sin(score) * cos(score) / -2": 1.5,
    "score = abs(tanh(score) - 0.5)": 1.5,
    "score = -(2 * erf(score)) + sign(score)": 3.0,
    "score = 2.5": 2.5,
}
UNBOUNDED = (
    "score", "score = score + tanh(score)", "score = min(score, 3)", "score = max(score, 3)",
    "score = tanh(score) / score", "score = tanh(score) * exp(score)", "score = 0 * score",
    "param c: float; score = c * tanh(score)", "score = tanh(score) + q", "score = abs(score)",
    "tensor t[heads]: float; score = t[h] * tanh(score)", "score = tanh(score) / 0.0",
)  # fmt: skip
GIVEN = (-math.inf, -1e30, -40.0, -3.0, -0.5, 0.0, 0.25, 2.0, 17.0, 1e30, math.inf)


def score_of(text):
    return lower(Source(text), {}).program.score


@pytest.mark.parametrize("text", BOUNDED)
def test_what_is_bounded(text):
    assert magnitude(score_of(text)) == pytest.approx(BOUNDED[text])


@pytest.mark.parametrize("text", UNBOUNDED)
def test_what_is_not(text):
    assert magnitude(score_of(text)) == math.inf


@pytest.mark.parametrize("text", BOUNDED)
def test_values_are_within(text):
    """The log-sum-exp over one key is the score itself."""
    q = torch.tensor(GIVEN, dtype=torch.float64)[None, None, :, None]
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    attention = attndsl.compile(text, backend="reference")
    _, score = attention(q, one, one, scale=1.0, return_lse=True)
    some = score[~score.isnan()]
    assert len(some)
    assert some.abs().max() <= BOUNDED[text] + 1e-9
