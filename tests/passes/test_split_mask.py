"""Which -inf of a score is a mask, and which is refused: pair by pair, against plain arithmetic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from attndsl.errors import TypeMismatchError
from attndsl.frontend import Bound, read
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.split_mask import split_mask
from attndsl.pipeline import check, lower
from attndsl.source import Source

if TYPE_CHECKING:
    from attndsl.ir import Program

CAUSAL = "score = where(q >= kv, score, -inf)\n"
SCORE = -1.5


def _split(text: str) -> Program:
    program = lower(Source(text), {}).program
    # Nothing is left to find, whoever lowers the program again.
    assert split_mask(program) == program
    return program


def _pairs(program: Program) -> dict[tuple[int, int], float]:
    """The final score of each pair of a small matrix: -inf where the mask kills the pair."""
    found = {}
    for q in range(7):
        for kv in range(7):
            here = Environment({"q": q, "kv": kv, "h": 1, "score": SCORE})
            alive = program.mask is None or evaluate(program.mask, here)
            found[q, kv] = evaluate(program.score, here) if alive else -math.inf
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CAUSAL + "score = softcap(5.0)", 5 * math.tanh(SCORE / 5)),
        (CAUSAL + "score = max(score, -1.0)", -1.0),
        (CAUSAL + "score = where(score < 0, 0.1 * score, score)", 0.1 * SCORE),
        (CAUSAL + "score = where(score < 0, 2.0, 1.0)", 2.0),
        (CAUSAL + "t = score - 1\nscore = exp(score)\nscore = t + score", -2.5 + math.exp(SCORE)),
        (CAUSAL + CAUSAL + "score = -score", -SCORE),
        ("raw = score\n" + CAUSAL + "score = score * sigmoid(raw)", SCORE / (1 + math.exp(-SCORE))),
        ("score = score + where(q >= kv, 0, -inf)\nscore = tanh(score)", math.tanh(SCORE)),
        (
            "bias = where(q < kv, -inf, 0.25)\nscore = score + bias\nscore = tanh(score)",
            math.tanh(SCORE + 0.25),
        ),
    ],
)
def test_later_lines_keep_a_mask(text, expected):
    for (q, kv), value in _pairs(_split(text)).items():
        wanted = expected if q >= kv else -math.inf
        assert value == pytest.approx(wanted, abs=1e-12), (q, kv)


@pytest.mark.parametrize(
    "expression",
    [
        "2 * where(q >= kv, score, -inf)",
        "where(q >= kv, score, -inf) / 4 - abs(q - kv)",
        "score + where(q >= kv, 0.0, -inf) + where(q - kv < 3, 0.5, -inf)",
        "score - where(q < kv, inf, 1.0)",
        "-where(q >= kv, -score, inf)",
        "-2 * where(q >= kv, score, inf)",
        "where(kv < 2, 0.5, where(q >= kv, score, -inf))",
        "where(q >= kv, where(kv < 2, -inf, score), where(kv < 5, 3.0, -inf))",
        "where(kv < 5, where(q >= kv, score, -inf), score * 2)",
        "where(not q >= kv, -inf, score) + where(kv == 3, -inf, 0.0)",
        "min(where(q >= kv, score, -inf), 2.0)",
        "min(where(q >= kv, score, -inf), where(kv > 3, -inf, -5.0))",
        "max(where(q >= kv, score, -inf), where(kv < 3, -1.0, -inf))",
        "clamp(where(q >= kv, score, -inf), -inf, -1.6)",
        "round(where(q >= kv, score, -inf))",
        "max(-inf, score)",
        "-inf",
    ],
)
def test_within_a_line_it_is_what_arithmetic_makes_it(expression):
    plain = read(Source(f"score = {expression}"), {})
    found = _split(f"score = {expression}")
    assert _pairs(found) == pytest.approx(_pairs(plain))


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("score = tanh(where(q >= kv, score, -inf))", "where(q >= kv, score, -inf)"),
        ("score = max(where(q >= kv, score, -inf), -5.0)", "where(q >= kv, score, -inf)"),
        ("score = clamp(score + where(q < kv, -inf, 0), -9, 9)", "where(q < kv, -inf, 0)"),
        ("score = where(where(q >= kv, score, -inf) > 0, 1, 2)", "where(q >= kv, score, -inf)"),
        ("m = where(q >= kv, 0.0, -inf); score = score - m", "where(q >= kv, 0.0, -inf)"),
        ("score = -1 * where(q >= kv, score, -inf)", "where(q >= kv, score, -inf)"),
        ("score = 0 * where(q >= kv, score, -inf)", "where(q >= kv, score, -inf)"),
        ("score = int(where(q >= kv, score, -inf))", "where(q >= kv, score, -inf)"),
        ("score = 1 / where(q >= kv, score, -inf)", "where(q >= kv, score, -inf)"),
        ("weights = tanh(where(q >= kv, score, -inf))", "where(q >= kv, score, -inf)"),
        ("weights = where(q >= kv, score, -inf)", "where(q >= kv, score, -inf)"),
        (CAUSAL + "score = where(kv < 4, 0.0, score)", "score = where(kv < 4, 0.0, score)"),
        (CAUSAL + "score = 2.0 * kv", "score = 2.0 * kv"),
        ("raw = score\n" + CAUSAL + "score = raw", "score = raw"),
        ("score = -inf\nscore = tanh(score)", "score = tanh(score)"),
    ],
)
def test_what_would_revive_a_pair_is_refused_where_it_stands(text, place):
    with pytest.raises(TypeMismatchError) as caught:
        check(Source(text), {})
    assert caught.value.span.text == place
    assert caught.value.hint


def test_masks_read_the_score_at_their_own_line():
    program = _split(CAUSAL + "mask = score > -2\nscore = score * 2")
    found = _pairs(program)
    assert all((value == 2 * SCORE) is (q >= kv) for (q, kv), value in found.items())


def test_own_weights_have_the_same_masks():
    for weights in ("sigmoid(score)", "score", "softplus(score)"):
        program = _split(CAUSAL + f"score = softcap(5.0)\nweights = {weights}")
        assert program.mask is _split("mask = q >= kv").mask
    kept = _split("weights = sigmoid(where(q >= kv, score, -inf))")
    assert evaluate(kept.weights, Environment({"q": 0, "kv": 1, "score": 1.0})) == 0


def test_bound_params_decide_first():
    text = "param on: bool\nparam low: float\nscore = where(on, where(q >= kv, score, low), score)"
    text += "\nscore = tanh(score)"
    causal = _split("mask = q >= kv").mask
    for on, low, mask in ((True, -math.inf, causal), (False, -math.inf, None), (True, -1.0, None)):
        program = lower(Source(text), {"on": Bound(on), "low": Bound(low)}).program
        assert program.mask is mask


def test_an_additive_mask_costs_what_a_mask_costs():
    text = "score = score + where(q >= kv, 0.0, -inf)"
    assert lower(Source(text), {}).digest == lower(Source("mask = q >= kv"), {}).digest
