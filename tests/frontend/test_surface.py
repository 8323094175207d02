"""Surface trees as text."""

from __future__ import annotations

import pytest

from attndsl.frontend import parsed
from attndsl.frontend.surface import shown
from attndsl.source import Source


@pytest.mark.parametrize(
    "text",
    [
        "mask = q >= kv and not (kv < 3 or q % 2 == 1 < h)\nscore = -score if q > 3 else f(kv)",
        "tensor t[heads, 3]: float = none\nparam w: int = 3",
        "def f(x, y) = x + t[h, :]\nx = f(1, y=2)",
    ],
)
def test_trees_are_shown_as_python_shows_them(text: str) -> None:
    for statement in parsed(Source(text)).statements:
        assert shown(statement) == repr(statement)


def test_a_sum_of_a_thousand_terms_is_shown() -> None:
    (statement,) = parsed(Source("score = score" + " + q" * 1000)).statements
    assert shown(statement).count("Name(name='q'") == 1000
