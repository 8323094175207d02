"""Calls of version 0.1 are errors that say what to write."""

from __future__ import annotations

import pytest

from attndsl.errors import ProgramErrors, TypeMismatchError
from attndsl.frontend import TensorSpec, read
from attndsl.frontend.check import values_of
from attndsl.frontend.parse import parse
from attndsl.source import Source

TABLE = "tensor t[heads, 2 * kv_len]: float\n"
LINES = [
    ("score = softcap(50.0)", "score = softcap(score, 50.0)"),
    ("softcap(50.0)", "softcap(score, 50.0)"),
    ("score = alibi()", "score = score + alibi()"),
    ("alibi()", "score + alibi()"),
    (f"{TABLE}score = rel_bias(t)", "score = score + rel_bias(t)"),
    (f"{TABLE}score = rel_bias(table=t)", "score = score + rel_bias(table=t)"),
    ("score = softcap(c=5)", "score = softcap(score, c=5)"),
    ("alibi() + 1", "score + alibi() + 1"),
    ("score = 2 * alibi()", "score = 2 * (score + alibi())"),
    ("score = 1 - alibi()", "score = 1 - (score + alibi())"),
    ("score = -alibi()", "score = -(score + alibi())"),
    ("score = max(alibi(), 2)", "score = max(score + alibi(), 2)"),
    ("score = 3 * (alibi() - 1)", "score = 3 * (score + alibi() - 1)"),
    ("score = alibi() if q > kv else alibi() ** 2",
     "score = score + alibi() if q > kv else (score + alibi()) ** 2"),
    ("score = score - softcap(3.0)", "score = score - softcap(score, 3.0)"),
    ("mask = alibi() > -8.0", "mask = score + alibi() > -8.0"),
    ("mask = alibi()", "score = score + alibi()"),
    ("mask = (2 * alibi())", "score = (2 * (score + alibi()))"),
    ("mask = causal() and softcap(3.0) > 1", "mask = causal() and softcap(score, 3.0) > 1"),
    ("weights = sigmoid(alibi())", "weights = sigmoid(score + alibi())"),
    ("x = alibi()\nscore = x", "x = score + alibi()"),
    ("def f() = alibi()\nscore = 2 * f()", "def f() = score + alibi()"),
    ("def f(c) = softcap(c)\nscore = f(3.0)", "def f(c) = softcap(score, c)"),
    ("score = 2 * (  # twice (\n    alibi()  # 1)\n)", "score = 2 * ( score + alibi() )"),
    (f"score = {' + '.join(['1.5'] * 30)} + softcap(2.0)", "softcap(score, ...)"),
    (f"score = {' + '.join(['1.5'] * 30)} + alibi()", "score + alibi(...)"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line"), LINES)
def test_the_hint_is_the_new_line(text: str, line: str) -> None:
    with pytest.raises(TypeMismatchError) as caught:
        read(Source(text), {})
    error = caught.value
    hint = f"write '{line}'; 'attndsl fmt --upgrade' rewrites files of version 0.1"
    assert error.hint == hint
    assert error.span is not None
    assert error.span.text.startswith(("softcap(", "alibi(", "rel_bias("))


def test_all_lines_and_other_errors_come_at_once() -> None:
    text = "score = alibi()\nscore = softcap(cap)\nmask = causl()"
    with pytest.raises(ProgramErrors) as caught:
        read(Source(text), {})
    assert [(e.span.line, e.message) for e in caught.value.errors if e.span] == [
        (1, "'alibi()' is a bias, and the score is not read here"),
        (2, "'softcap(cap)' does not say what it limits"),
        (2, "'cap' is not declared"),
        (3, "there is no function 'causl'"),
    ]


def test_declarations_of_such_lines_are_used() -> None:
    with pytest.raises(TypeMismatchError) as caught:
        read(Source("score = rel_bias(t)"), {"t": TensorSpec(("heads", "2 * kv_len"))})
    assert "score + rel_bias(t)" in str(caught.value)


def test_a_parameter_that_hides_the_score() -> None:
    with pytest.raises(TypeMismatchError) as caught:
        read(Source("def f(score) = softcap(2.0)\nscore = f(score)"), {})
    assert caught.value.hint == "rename the parameter 'score', and read it"


@pytest.mark.parametrize(
    "text",
    [
        "score = score + alibi()",
        "score = alibi() + score",
        "bias = alibi()\nscore = score + bias",
        "bias = alibi()\nscore = score + bias\nmask = bias > -3.0",
        "def bias() = 2 * alibi()\nscore = score + bias()",
        "def biased() = score + alibi()\nscore = biased()",
        f"{TABLE}score = score - rel_bias(t)",
        "score = where(score > 0.0, 1.0, alibi())",
        "score = softcap(q - kv, 3.0)",
        "score = softcap(score, c=3.0) + softcap(c=4, x=score)",
        "mask = score > alibi()",
        "def alibi() = score - 0.5 * (q - kv)\nscore = alibi()",
        "def softcap(c) = c * tanh(score / c)\nscore = softcap(30.0)",
        "param alibi: float\nscore = score * alibi",
        "score = 0.1 * (q - kv)",
    ],
)
def test_texts_of_today(text: str) -> None:
    assert read(Source(text), {}).score is not None


def test_editors_know_values_of_such_lines() -> None:
    text = "x = alibi()\nscore = x\nscore = softcap(5.0)\nnear = q - kv"
    found = values_of(parse(Source(text)), {})
    assert {"x", "near"} <= found.names.keys()
    assert len(found.lines) == 2
