"""Arguments with names: calls that mean the same, and calls that cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attndsl import errors
from attndsl.frontend import read
from attndsl.frontend.format import format_source
from attndsl.frontend.parse import parse
from attndsl.frontend.prelude import prelude_function, prelude_names
from attndsl.source import Source

OWN = "def near(x, y, reach) = abs(x - y) <= reach\n"


@pytest.mark.parametrize(
    ("named", "placed"),
    [
        ("sliding_window(w=4)", "sliding_window(4)"),
        ("natten2d(16, 16, kh=7, kw=5)", "natten2d(16, 16, 5, 7)"),
        ("natten2d(kh=7, kw=5, height=9, width=8,)", "natten2d(8, 9, 5, 7)"),
        (OWN + "near(q, reach=3, y=kv)", OWN + "near(q, kv, 3)"),
        (OWN + "def f(x) = near(x=x, y=kv, reach=1)\nf(x=q)", OWN + "near(q, kv, 1)"),
        (
            "tensor t[batch, kv_len]: int\ndocument_causal(ids=t)",
            "tensor t[batch, kv_len]: int\ndocument_causal(t)",
        ),
        (
            "score = softcap(\n    score,\n    c=-3 if h == 0 else 2,\n)",
            "score = softcap(score, -3 if h == 0 else 2)",
        ),
    ],
)
def test_names_say_what_places_say(named, placed):
    assert read(Source(named), {}) == read(Source(placed), {})


@given(st.sampled_from(prelude_names()), st.data())
def test_any_order_of_names_is_that_of_the_parameters(function, data):
    parameters = [p.name for p in prelude_function(function).parameters]
    first = data.draw(st.integers(0, len(parameters)))
    rest = data.draw(st.permutations(parameters[first:]))
    values = {name: f"{2 * n + 3}" for n, name in enumerate(parameters)}
    if function in ("same", "same_1d", "document_causal", "valid_keys", "rel_bias"):
        values[parameters[0]] = "t"
    dims = {"same_1d": "99", "valid_keys": "99"}.get(function, "9, 99")
    head = f"tensor t[{dims}]: int\n"
    named = [values[p] for p in parameters[:first]] + [f"{p}={values[p]}" for p in rest]
    placed = [values[p] for p in parameters]
    head += "score + " * (function in ("alibi", "rel_bias"))  # A bias is no score.
    texts = [f"{head}{function}({', '.join(args)})" for args in (named, placed)]
    found = [read(Source(text), {}) for text in texts]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("text", "kind", "at", "message", "hint"),
    [
        ("sliding_window(width=4)", errors.NameResolutionError, "width",
         "sliding_window has no parameter 'width'", "write sliding_window(w)"),
        ("natten2d(16, heigth=16, kw=7, kh=7)", errors.NameResolutionError, "heigth",
         "natten2d has no parameter 'heigth'", "did you mean 'height'?"),
        ("causal(w=1)", errors.NameResolutionError, "w",
         "causal has no parameter 'w'", "write causal()"),
        ("natten2d(16, width=16, kw=7, kh=7)", errors.NameResolutionError, "width",
         "natten2d gets 'width' twice", "remove one of the two"),
        ("sliding_window(w=4, w=5)", errors.NameResolutionError, "w",
         "sliding_window gets 'w' twice", "remove one of the two"),
        ("natten2d(16, kh=7)", errors.RankError, "natten2d(16, kh=7)",
         "natten2d lacks 'height', 'kw'", "write natten2d(width, height, kw, kh)"),
        ("sliding_window(1, 2, w=3)", errors.RankError, "sliding_window(1, 2, w=3)",
         "sliding_window takes 1 argument, and has 3", "write sliding_window(w)"),
        ("sliding_window()", errors.RankError, "sliding_window()",
         "sliding_window takes 1 argument, and has 0", "write sliding_window(w)"),
        ("natten2d(16, 16, kw=7, 7)", errors.ParseError, "7",
         "an argument without a name stands behind 'kw='", "write arguments without a name first"),
        ("where(c=q > kv, 1, 2) > 0", errors.ParseError, "1",
         "an argument without a name stands behind 'c='", "write arguments without a name first"),
        ("where(c=q > kv, x=1, y=2) > 0", errors.RankError, "c=q > kv",
         "where takes its arguments by their places", "write where(c, x, y)"),
        ("tanh(x=score)", errors.RankError, "x=score",
         "tanh takes its arguments by their places", "write tanh(x)"),
        ("dot(u=1, w=2)", errors.RankError, "u=1",
         "dot takes its arguments by their places", "write dot(u["),
        ("weights = dropout(softmax(score), p=0.1)", errors.RankError, "p=0.1",
         "dropout takes its arguments by their places", "dropout(softmax(score), 0.1)"),
        ("weights = softmax(score, dim=-1)", errors.RankError, "dim=-1",
         "softmax takes its arguments by their places", "write softmax(score)"),
        ("weights = dropout(softmax(score, dim=1), 0.1)", errors.RankError, "dim=1",
         "softmax takes its arguments by their places", "write softmax(score)"),
        ("causl(w=4)", errors.NameResolutionError, "causl(w=4)",
         "there is no function 'causl'", "did you mean 'causal'?"),
        ("sliding_window(w=)", errors.ParseError, ")", "')' cannot stand here", "write a value"),
    ],
)  # fmt: skip
def test_wrong_names_are_refused_where_they_stand(text, kind, at, message, hint):
    with pytest.raises(kind) as caught:
        read(Source(text), {})
    assert type(caught.value) is kind
    assert caught.value.span.text == at
    assert caught.value.message.startswith(message)
    assert hint in caught.value.hint


def test_values_of_names_have_their_errors_reported_too():
    with pytest.raises(errors.ProgramErrors) as caught:
        read(Source("natten2d(16, x, kw=y, kh=z)"), {})
    assert [e.span.text for e in caught.value.errors] == ["x", "y", "z"]


def test_names_nest_as_deep_as_places_do():
    named, placed = ("f(" + "x=" * n for n in (1, 0))
    for call in (named, placed):
        text = "def f(x) = x\nscore = " + call * 60 + "1" + ")" * 60
        assert parse(Source(text)).statements


def test_names_are_laid_out_as_in_python():
    assert format_source("mask=natten2d( 16,16 , kh = -7,kw= 5 )") == (
        "mask = natten2d(16, 16, kh=-7, kw=5)\n"
    )
    broken = "mask = natten2d(\n16, 16,\nkh = 7, kw =7)"
    assert format_source(broken) == "mask = natten2d(\n    16, 16,\n    kh=7, kw=7)\n"
    assert format_source(format_source(broken)) == format_source(broken)
