"""Warnings of score lines that do not read the score."""

from __future__ import annotations

import pytest

import attndsl
from attndsl.errors import ProgramWarning
from attndsl.frontend import read, read_unscored
from attndsl.source import Source


def lines(text: str) -> list[int]:
    source = Source(text)
    found = read_unscored(source, read(source, {}))
    return [each.span.line for each in found if each.span is not None]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("score = 1.0", [1]),
        ("0.1 * (kv - q)", [1]),
        ("score = where(q >= kv, 0.0, -inf)", [1]),
        ("mask = causal()\nscore = 2 * score\nscore = 0.1 * q", [3]),
        ("score = 1.0\nscore = score + kv\nscore = 2.0", [1, 3]),
        ("near = q - kv\nscore = -abs(near)", [2]),
        ("def f(x) = x + 1\nscore = f(q)", [2]),
        ("def f(score) = score + 1\nscore = f(q)", [2]),
        ("tensor t[q_len, kv_len]: float\nscore = t[q, kv]", [2]),
        ("param w: int\nscore = q / w", [2]),
        ("score", []),
        ("score = score + 1", []),
        ("q >= kv", []),
        ("param w: int\nmask = q - kv < 3 * w", []),
        ("s = 2 * score\nscore = s", []),
        ("def f() = score\nscore = f() + 1", []),
        ("def f() = g()\ndef g() = score\nscore = f()", []),
        ("score = where(score > 0.0, 1.0, 2.0)", []),
        ("score = score + alibi()", []),
        ("sink = 0.5\nweights = relu(score)", []),
    ],
)
def test_which_lines_lose_the_score(text: str, found: list[int]) -> None:
    assert lines(text) == found


def test_compile_warns() -> None:
    with pytest.warns(ProgramWarning) as caught:
        attndsl.compile("mask = causal()\nscore = 0.5 * (kv - q)", name="lost.attn")
    assert str(caught[0].message) == (
        "lost.attn:2:1: this line does not read the score, which is lost\n"
        "    score = 0.5 * (kv - q)\n"
        "    ^^^^^^^^^^^^^^^^^^^^^^\n"
        "  hint: write 'score = score + ...' to add to it"
    )
