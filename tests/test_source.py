"""Places in texts, and the same places in other texts."""

from __future__ import annotations

import pytest

from attndsl.source import Source, Span


@pytest.mark.parametrize(
    ("part", "text", "column"),
    [
        ("score / c", "score = c * score / c", 13),
        ("score / c", "score = cap * tanh(score / cap)", None),
        ("q", "mask = sqrt(q + kv) < 2", 13),
        ("log(x[h])", "score = score+log(x[h])*2", 15),
        ("-x", "score = score*-x", 15),
        ("2.0", "score = 12.0 * score", None),
        ("2", "score = 2.5 * score", None),
        ("", "score", None),
    ],
)
def test_a_place_of_another_text_is_found_as_whole_names(part, text, column):
    span = Span(Source(f"{part} and more"), 0, len(part)).within(Source(text, "other.attn", 7))
    if column is None:
        assert span is None
        return
    assert (span.source.name, span.line, span.column, span.text) == ("other.attn", 7, column, part)


def test_a_place_of_the_same_text_stays():
    span = Span(Source("x + x"), 4, 5).within(Source("x + x", "copy.attn"))
    assert (span.source.name, span.start, span.end) == ("copy.attn", 4, 5)
