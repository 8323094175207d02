"""What all weights of a head have in common is split off, and all else stays."""

from __future__ import annotations

import pytest

from attndsl.ir import Op, dependencies
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.factor import split_factor
from attndsl.pipeline import lower
from attndsl.source import Source

SPLIT = {
    "sigmoid(score) / kv_len": Op.SIGMOID,
    "2 * relu(score)": Op.RELU,
    "0.5 * relu(score) / (h + 1) * 3": Op.RELU,
    "exp(score - q) / (b + 2)": Op.EXP,
}
WHOLE = ("sigmoid(score)", "sigmoid(score) / (q + 1)", "relu(score) / 9 + 0.02", "1 / (score + 9)")


def weights_of(text):
    return lower(Source(f"weights = {text}"), {}).program.weights


@pytest.mark.parametrize("text", SPLIT)
def test_factors(text):
    weights = weights_of(text)
    rest, factor = split_factor(weights)
    assert rest.op is SPLIT[text]
    assert dependencies(factor)[factor] <= {"b", "h"}
    for score in (-1.5, 0.25, 3.0):
        known = Environment({"score": score, "q": 2, "kv": 1, "h": 3, "b": 1, "kv_len": 7})
        product = evaluate(rest, known) * evaluate(factor, known)
        assert product == pytest.approx(evaluate(weights, known), rel=1e-12)


@pytest.mark.parametrize("text", WHOLE)
def test_what_has_none(text):
    weights = weights_of(text)
    assert split_factor(weights) == (weights, None)
