"""Absent captures: what is left of a program, by the place where it read them."""

from __future__ import annotations

import pytest

import attndsl
from attndsl.errors import (
    AttnDSLError,
    LimitError,
    NameResolutionError,
    ParseError,
    TypeMismatchError,
)
from attndsl.frontend.format import format_source
from attndsl.pipeline import check
from attndsl.source import Source

DECLARED = """
param c: float = none
param w: int = none
param f: bool = none
tensor t[heads]: float = none
tensor m[batch, kv_len]: bool = none
tensor d[batch, kv_len]: int = none
tensor g[heads]: float
"""


def without_all(line: str) -> str:
    attention = attndsl.compile(DECLARED + line)
    return attention.variant({})[0].lowered.digest


@pytest.mark.parametrize(
    ("line", "left"),
    [
        # Masks.
        ("mask = m[b, kv]", ""),
        ("m[b, kv]", ""),
        ("mask = f", ""),
        ("mask = not m[b, kv]", ""),
        ("mask = causal() and m[b, kv]", "mask = causal()"),
        ("mask = causal() and q - kv < w", "mask = causal()"),
        ("mask = 0 <= q - kv < w", "mask = 0 <= q - kv"),
        ("mask = abs(q - kv) < w", ""),
        ("mask = kv % w == 0 or false", ""),
        ("mask = document_causal(d)", "mask = causal()"),
        ("mask = same(d, q, kv)", ""),
        ("mask = not given(m) or m[b, kv] or q == kv", ""),
        ("mask = (given(m) and m[b, kv]) or q == kv", "mask = q == kv"),
        ("mask = where(q > 3, m[b, kv], true)", ""),
        ("mask = q - kv < (w if given(w) else 4)", "mask = q - kv < 4"),
        # Scores.
        ("score + t[h]", ""),
        ("score = score + t[h]", ""),
        ("score = score - t[h] * (q - kv)", ""),
        ("x = t[h] * (q - kv)\nscore = 2 * score - x", "score = 2 * score"),
        ("score = t[h] + score * 2", "score = score * 2"),
        ("score = g[h] - t[h]", "score = g[h]"),
        ("score = t[h] - g[h] - score", "score = -g[h] - score"),
        ("score = score * t[h]", ""),
        ("score = 2 * score / c", "score = 2 * score"),
        ("score = softcap(score, c)", ""),
        (
            "score = 2 * score\nscore = softcap(score, c) + g[h]",
            "score = 2 * score\nscore = score + g[h]",
        ),
        ("score = c * (q - kv) + c * tanh(score / c)", ""),
        ("score = score + c * tanh(score / c)", ""),
        ("score = 2 * score - c * tanh(score / c)", "score = 2 * score"),
        ("score = max(score, c)", ""),
        ("score = clamp(score, -c, c)", ""),
        ("score = where(m[b, kv], score, -inf)", ""),
        ("score = where(m[b, kv], -inf, score)", ""),
        ("score = score + where(m[b, kv], 0.0, -inf)", ""),
        ("score = score + where(q >= kv, t[h], 0)", ""),
        ("score = score + (t[h] if given(t) else g[h])", "score = score + g[h]"),
        ("score = score + dot(t[:], t[:])", ""),
        ("score = t[h]", ""),
        ("score = score + (t[h] * g[h] if given(t) else 0.0)", "score = score + 0.0"),
        ("score = where(given(t), score + t[h] * g[h], score * 2)", "score = score * 2"),
        ("mask = (given(m) and not (causal() and m[b, kv])) or q == kv", "mask = q == kv"),
        ("mask = not given(w) or kv < w + 4", ""),
        # The rest.
        ("sink = t[h]", ""),
        ("weights = dropout(softmax(score), c)", ""),
        ("weights = dropout(sigmoid(score + t[h]), c)", "weights = sigmoid(score)"),
        ("def k(a) = a if given(a) else 2\nscore = score * k(c)", "score = score * 2"),
        ("tensor y[n]: float = none\nscore = score + y[q % n] * n", ""),
    ],
)
def test_what_is_left(line: str, left: str) -> None:
    wanted = attndsl.compile(f"tensor g[heads]: float\n{left or 'mask = true'}")
    assert without_all(line) == wanted.lowered.digest


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mask = m[b, kv] or q == kv", "unclear what an operand of 'or' counts as"),
        ("mask = not (causal() and m[b, kv])", "left of a condition here"),
        ("mask = where(q > 3, m[b, kv], false)", "which branch"),
        ("mask = where(f, causal(), true)", "which branch"),
        ("mask = (q >= kv) == f", "a condition stands beside it"),
        ("mask = (q >= kv) ^ f", "a condition stands beside it"),
        ("mask = kv < w + 4", "left of a sum here"),
        ("score = score + t[h] * g[h]", "whether 'g' counts"),
        ("score = score + g[h] / c", "whether 'g' counts"),
        ("score = score + c * tanh(g[h] * score / c)", "whether 'g' counts"),
        ("score = c * (q - kv) * score", "what stands with it"),
        ("score = c / score", "what '/' makes of the score"),
        ("score = -(c * tanh(score / c))", "whether '-' counts"),
        ("score = g[h] - c * tanh(score / c)", "whether the score is subtracted"),
        ("score = t[h] - c * tanh(score / c)", "whether the score is subtracted"),
        ("score = max(score, 5.0, c)", "other limits"),
        ("score = clamp(score, -5.0, c)", "other limits"),
        ("score = score + where(q >= kv, t[h], -inf)", "which branch"),
        ("score = where(m[b, kv], score, 2 * score)", "which branch"),
        ("x = t[h] + g[h]\nscore = score * x", "left of a sum here"),
        ("score = score + g[w]", "an index would have no value"),
        ("weights = c", "the weights would have no value"),
    ],
)  # fmt: skip
def test_what_could_mean_several_things_is_refused_when_it_is_compiled(
    line: str, message: str
) -> None:
    with pytest.raises(TypeMismatchError, match=message) as caught:
        check(Source(DECLARED + line), {})
    assert caught.value.hint is not None
    assert "given(" in caught.value.hint
    assert caught.value.span is not None


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("mask = none", ParseError, "'none' cannot stand here"),
        ("none = 3\nmask = q < 3", ParseError, "'none' cannot stand here"),
        ("tensor y[n]: float = 3\nmask = q > 3", ParseError, "'3' cannot stand here"),
        ("mask = given(q)", NameResolutionError, "nothing that a call may leave out"),
        ("param w: int\nmask = given(w)", NameResolutionError, "nothing that a call may leave out"),
        ("mask = given(q + 1)", AttnDSLError, "given asks for one name"),
        ("param w: int = none\nscore = score + given(w)", TypeMismatchError, "this is a bool"),
        ("tensor y[n]: float = none\nmask = q < n", NameResolutionError, "'n' is the size of a"),
        ("param z: int = none\ntensor y[z]: float\nscore = score + y[0]", TypeMismatchError,
         "a dim cannot depend on 'z'"),
        ("\n".join(f"param p{n}: int = none" for n in range(17)), LimitError, "at most 16"),
    ],
)  # fmt: skip
def test_errors(text: str, error: type[AttnDSLError], message: str) -> None:
    with pytest.raises(AttnDSLError, match=message) as caught:
        check(Source(text), {})
    first = getattr(caught.value, "errors", [caught.value])[0]
    assert isinstance(first, error)


def test_the_layout_keeps_what_may_be_left_out() -> None:
    text = "param  cap:float=none\ntensor pad[batch,kv_len]:bool=none\nmask = pad[b,kv]\n"
    assert format_source(text) == (
        "param cap: float = none\ntensor pad[batch, kv_len]: bool = none\nmask = pad[b, kv]\n"
    )
