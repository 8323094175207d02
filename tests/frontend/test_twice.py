"""Prelude functions that read the score, called with the score."""

import warnings

import pytest

import attndsl
from attndsl.errors import ProgramWarning
from attndsl.frontend import read_scored_twice
from attndsl.frontend.prelude import prelude_function, prelude_names
from attndsl.frontend.twice import made_of
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
        ("score = softcap(max(abs(score), 30.0))", [(1, "softcap(max(abs(score), 30.0))")]),
        ("score = softcap(score if q > kv else 30.0)", [(1, "softcap(score if q > kv else 30.0)")]),
        (
            "score = softcap(where(q > kv, 3.0, -score))",
            [(1, "softcap(where(q > kv, 3.0, -score))")],
        ),
        # The program's own functions, and what they are called with.
        ("def g() = score\nscore = softcap(g())", [(2, "softcap(g())")]),
        ("def g() = f() + 1\ndef f() = (score)\nscore = softcap(g())", [(3, "softcap(g())")]),
        ("s = score * 2\ndef g() = s\nscore = softcap(g())", [(3, "softcap(g())")]),
        (
            "def g(x, y) = x * y\nscore = softcap(g(2.0, y=score))",
            [(2, "softcap(g(2.0, y=score))")],
        ),
        ("def g(x) = 3.0 if x > 0.0 else 5.0\nscore = softcap(g(score))", []),
        ("def big(x) = x > 3.0\nscore = softcap(3.0 if big(score) else 5.0)", []),
        ("def g(score) = score + 1\nscore = softcap(g(2.0))", []),
        ("def h2(x) = h2(x)\nscore = softcap(2.0)", []),
        # What the score only chooses.
        ("score = softcap(50.0 if score > 0.0 else 30.0)", []),
        ("score = softcap(where(score > 0.0, 50.0, 30.0))", []),
        ("big = score > 3.0\nscore = softcap(3.0 if big else 5.0)", []),
        ("big = not (score > 3.0 and q > kv)\nscore = softcap(float(big) + 1.0)", []),
        ("big = bool(score)\nscore = softcap(3.0 if big else 5.0)", []),
        ("c = 3.0 if score > 3.0 else 5.0\nscore = softcap(c)", []),
        ("tensor t[heads, 9]: float\nscore = softcap(t[h, clamp(int(score), 0, 8)])", []),
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
    trees = {name: prelude_function(name) for name in prelude_names()}
    found = {n for n, x in trees.items() if "score" in made_of(x.body, {})}
    assert found == {"alibi", "rel_bias", "softcap"}


def test_long_chains_of_functions_are_followed():
    heads = [f"def f{i}(x) = f{i + 1}(x)" for i in range(400)]
    text = "\n".join((*heads, "def f400(x) = x", "score = softcap(f0(score))"))
    assert places(text) == [(402, "softcap(f0(score))")]
