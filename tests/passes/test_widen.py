"""Contractions that are taken into the product of queries and keys, and how many of them are."""

from __future__ import annotations

import pytest

from attndsl.passes.widen import MAX_TERMS, Widened, widen
from attndsl.pipeline import lower
from attndsl.source import Source

DECLARATIONS = "tensor u[q_len, r]: float\ntensor w[kv_len, r]: float\ntensor x[kv_len]: float\n"


def _widened(number: int, more: str = "") -> Widened | str | None:
    products = " + ".join(f"{place}.5 * dot(u[q, :], w[kv, :])" for place in range(number))
    text = f"{DECLARATIONS}score = score + {products}{more}"
    return widen(lower(Source(text), {}).program)


def test_as_many_as_there_may_be():
    found = _widened(MAX_TERMS, " + x[kv]")
    assert isinstance(found, Widened)
    assert len(found.terms) == MAX_TERMS


@pytest.mark.parametrize("number", [MAX_TERMS + 1, MAX_TERMS + 2])
def test_one_more_is_too_many(number):
    assert _widened(number) == f"there are more than {MAX_TERMS} of them"
