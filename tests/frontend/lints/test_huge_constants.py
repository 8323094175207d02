"""Large numbers that stand for -inf elsewhere."""

import warnings

import pytest

import attndsl
from attndsl.errors import ProgramWarning
from attndsl.frontend import read_large_numbers
from attndsl.source import Source


def places(text):
    return [(each.span.line, each.span.text) for each in read_large_numbers(Source(text))]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("score = where(q >= kv, score, -1e9)", ["-1e9"]),
        ("score = where(q < kv, -1000000, score)", ["-1000000"]),
        ("score = score if q >= kv else (-3.4e38)", ["(-3.4e38)"]),
        ("score = score + where(q >= kv, 0.0, -1e5)", ["-1e5"]),
        ("score = score - 1e9 * float(q < kv)", ["1e9 * float(q < kv)"]),
        ("score = score - 1000000 * float(q < kv)", ["1000000 * float(q < kv)"]),
        ("score = score - 3 * (1.5 * (2 * -(-1000000)))", ["3 * (1.5 * (2 * -(-1000000)))"]),
        ("score = score + float(q < kv) * -1e9", ["float(q < kv) * -1e9"]),
        ("score = -1e9 * float(q < kv) + score", ["-1e9 * float(q < kv)"]),
        ("score + where(q < kv, -1e9, 0.0)", ["-1e9"]),
        ("def f(x) = where(q >= kv, x, -1e30)\nscore = f(score)", ["-1e30"]),
        ("far = where(q < kv, -1e9, 0.0)\nscore = score + far", ["-1e9"]),
        # What may be meant.
        ("score = where(q >= kv, score, -inf)", []),
        ("score = where(q >= kv, score, -1e4)", []),
        ("score = where(q >= kv, score, 1e9)", []),
        ("score = max(score, -1e9)", []),
        ("score = score - 200000 + kv", []),
        ("near = q - kv - 131072 < 0\nmask = near", []),
        ("mask = where(q >= kv, score, -1e9) > 0", []),
        ("score = score * 1e9", []),
        ("score = score + -2.0 * -1e9", []),
        ("score = where(q >= kv, score, -1e9)\nweights = sigmoid(score)", []),
    ],
)
def test_which_numbers_are_too_large(text, found):
    assert [text for _, text in places(text)] == found


def test_the_warning_says_what_to_write():
    with pytest.warns(ProgramWarning) as caught:
        attndsl.compile("score = where(q >= kv, score, -1e9)", name="large.attn")
    assert str(caught[0].message) == (
        "large.attn:1:31: -1e9 is a number and no mask: its pairs are computed, and a row that has "
        "no other pairs weighs them alike, since fp32 rounds such scores\n"
        "    score = where(q >= kv, score, -1e9)\n"
        "                                  ^^^^\n"
        "  hint: write -inf, as in where(q >= kv, score, -inf), or a line 'mask = ...': tiles "
        "without live pairs are not visited then"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attndsl.compile("score = where(q >= kv, score, -inf)")


@pytest.mark.parametrize("operator", ["+", "*", "-"])
def test_long_texts_take_no_time(operator, quickest):
    text = "score = score " + f"{operator} 1.5 " * 2700
    assert quickest(lambda: places(text)) < 1
    assert places(text) == []
