"""Prelude functions that read the score, called with the score."""

import warnings

import pytest

import attndsl
from attndsl.errors import ProgramWarning
from attndsl.frontend import read_scored_twice
from attndsl.frontend.prelude import prelude_function, prelude_names
from attndsl.frontend.twice import _takes_score
from attndsl.source import Source


def places(text):
    found = read_scored_twice(Source(text))
    return [(each.span.line, each.span.text) for each in found]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("score = softcap(score)", [(1, "softcap(score)")]),
        ("softcap(score * 2)", [(1, "softcap(score * 2)")]),
        ("score = softcap(c=score)", [(1, "softcap(c=score)")]),
        ("s = score * 2\nscore = softcap(s)", [(2, "softcap(s)")]),
        ("s = alibi()\nt = s + 1\nscore = softcap(t)", [(3, "softcap(t)")]),
        ("def f() = softcap(score)\nscore = f()", [(1, "softcap(score)")]),
        ("mask = softcap(score) > 1 and kv < 3", [(1, "softcap(score)")]),
        (
            "score = softcap(score) + softcap(-score)",
            [(1, "softcap(score)"), (1, "softcap(-score)")],
        ),
        ("score = softcap(alibi())", [(1, "softcap(alibi())")]),
        # What may be meant.
        ("score = softcap(30.0)", []),
        ("param c: float = 30.0\nscore = softcap(c)", []),
        ("score = score * 2\nscore = softcap(30.0) + score", []),
        ("c = 20.0 + h\nscore = softcap(c) * score", []),
        ("def softcap(x) = 30.0 * tanh(x / 30.0)\nscore = softcap(score)", []),
        ("def cap(x) = 30.0 * tanh(x / 30.0)\nscore = cap(score)", []),
        ("def f(score) = score + 1\nscore = f(softcap(2.0))", []),
        ("def f(score) = softcap(score)\nscore = f(2.0)", []),
        ("tensor t[heads, 2 * kv_len]: float\nscore = rel_bias(t)", []),
        ("mask = sliding_window(3)\nscore = alibi()", []),
    ],
)
def test_which_calls_read_the_score_twice(text, found):
    assert places(text) == found


def test_the_warning_says_what_the_function_is():
    with pytest.warns(ProgramWarning) as caught:
        attndsl.compile("score = softcap(score)", name="twice.attn")
    assert str(caught[0].message) == (
        "twice.attn:1:9: 'softcap' reads the score itself, and its argument reads the score too\n"
        "    score = softcap(score)\n"
        "            ^^^^^^^^^^^^^^\n"
        "  hint: softcap(c) means c * tanh(score / c); to change the score before, write a line "
        "'score = ...' above"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attndsl.compile("score = softcap(30.0)")


def test_these_prelude_functions_read_the_score():
    found = {name for name in prelude_names() if _takes_score(prelude_function(name))}
    assert found == {"alibi", "rel_bias", "softcap"}
