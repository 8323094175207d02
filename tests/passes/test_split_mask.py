"""Which -inf of a score is a mask, and which is refused: pair by pair, against plain arithmetic."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from attndsl.errors import TypeMismatchError
from attndsl.frontend import Bound, read
from attndsl.ir import SCORE as RAW
from attndsl.ir import DType, Op, Program, node, param, substitute
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.simplify import simplify_node
from attndsl.passes.split_mask import split_mask
from attndsl.pipeline import check, lower
from attndsl.source import Source

if TYPE_CHECKING:
    from attndsl.ir import Node

CAUSAL = "score = where(q >= kv, score, -inf)\n"
SCORE = -1.5
PREVIOUS = param("$previous", DType.FLOAT)
"""The line before, of a line that is looked at alone."""


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
        (CAUSAL + "score = softcap(score, 5.0)", 5 * math.tanh(SCORE / 5)),
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
        program = _split(CAUSAL + f"score = softcap(score, 5.0)\nweights = {weights}")
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


def _line_by_line(program: Program) -> Program:
    """As ``split_mask``, by a call for each line, which knows nothing of the calls before."""
    values: dict[Node, Node] = {}
    alive: list[Node] = []
    score, known = RAW, values
    for line in program.lines:
        root = substitute(line.value, known)
        found = split_mask(Program(score=root))
        if found.mask is not None:
            alive.append(substitute(found.mask, {PREVIOUS: score}))
        score = substitute(found.score, {PREVIOUS: score})
        known = values
        if simplify_node(root).op is not Op.CONST:
            values = {**values, line.value: score}
            known = {**values, line.value: PREVIOUS}
    mask = None if program.mask is None else substitute(program.mask, values)
    for condition in alive:
        mask = condition if mask is None else node(Op.AND, mask, condition)
    return replace(program, score=score, mask=mask, lines=())


def _expression(rng: random.Random, names: list[str], depth: int) -> str:
    def inner() -> str:
        return _expression(rng, names, depth - 1)

    if depth == 0 or rng.random() < 0.15:
        return rng.choice(["score", "score", "0.5", "-1.0", "q - kv", "-inf", *names])
    condition = rng.choice(["q >= kv", "kv > 3", "score < 1", "true", f"{rng.choice(names)} < 2"])
    return rng.choice(
        [
            f"where({condition}, {inner()}, -inf)",
            f"where({condition}, {inner()}, {inner()})",
            f"({inner()} {rng.choice('+-*/')} {inner()})",
            f"(score + {inner()})",
            f"{rng.choice(['min', 'max'])}({inner()}, {inner()})",
            f"{rng.choice(['-', 'tanh', 'round', 'int'])}({inner()})",
        ]
    )


def _lines(seed: int) -> str:
    """Lines that read the scores of any lines before them, and a mask that does."""
    rng = random.Random(seed)
    names, lines = ["raw"], ["raw = score"]
    for number in range(rng.randrange(2, 9)):
        value = _expression(rng, names[-4:], rng.randrange(3))
        if rng.random() < 0.35:
            names.append(f"x{number}")
            lines.append(f"x{number} = {value}")
        else:
            lines.append(f"score = {value}")
    return "\n".join([*lines, f"mask = {rng.choice(names)} < 1 or {rng.choice(names)} > 3"])


def test_what_is_kept_for_later_lines_changes_nothing():
    compared = masked = 0
    for seed in range(300):
        program = read(Source(_lines(seed)), {})
        try:
            found = split_mask(program)
        except TypeMismatchError:
            continue
        wanted = _line_by_line(program)
        assert found.score is wanted.score, _lines(seed)
        assert found.mask is wanted.mask, _lines(seed)
        compared += len(program.lines) > 2
        masked += found.mask is not program.mask
    assert compared > 50
    assert masked > 50


@pytest.mark.parametrize(
    "line",
    [
        "score = softcap(score, {0}.0) - 0.5 * (q - kv)\n",
        "score = where(q - kv < {0}, score * 1.5, -inf)\n",
        "s{0} = score\nscore = score * 0.9 + 0.1 * s0 + 0.2 * s{1}\n",
    ],
)
def test_the_time_grows_with_the_length_of_the_text(line):
    def calls(lines: int) -> int:
        program = read(Source("".join(line.format(n, n // 2) for n in range(lines))), {})
        counted = 0

        def count(*_: object) -> None:
            nonlocal counted
            counted += 1

        sys.setprofile(count)
        try:
            split_mask(program)
        finally:
            sys.setprofile(None)
        return counted

    assert calls(120) < 2.3 * calls(60)
