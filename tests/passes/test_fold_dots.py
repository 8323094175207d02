"""Contractions that are taken into the product of queries and keys, and how many of them are."""

from __future__ import annotations

import pytest

from attndsl.ir import Op, dependencies, toposort
from attndsl.passes.fold_dots import MAX_TERMS, Widened, widen
from attndsl.passes.simplify import simplify_node
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


ROW = "dot(u[q, :], w[0, :])"
PAIR = "dot(u[q, :], w[kv, :])"


@pytest.mark.parametrize(
    ("body", "products", "score", "terms"),
    [
        (f"score = score + {ROW} * 20", 1, "score", 0),
        (f"score = {ROW}", 1, "0.0", 0),
        (f"score = -({ROW} - score / 2)", 1, "-(-(score / 2.0))", 0),
        (f"score = (x[kv] - 2 * {ROW} + score) * 3 - {ROW} ** 2", 1, "(x[kv] + score) * 3.0", 0),
        (f"score = score + {PAIR} + 2 * {ROW}", 1, "score", 1),
        (f"score = score * {ROW}", 0, "score * r", None),
        (f"score = 5 * tanh((score + {ROW}) / 5)", 0, "tanh", 1),
        (f"score = score + {ROW}; sink = 0.5", 0, "score", 1),
        (f"score = score + {ROW}; weights = sigmoid(score)", 0, "score", 1),
        (f"score = score + {ROW}; mask = {ROW} > q - kv", 1, "score", None),
    ],
)
def test_what_is_added_to_whole_rows_is_apart(body, products, score, terms):
    program = lower(Source(DECLARATIONS + body), {}).program
    found = widen(program)
    if terms is None:
        assert isinstance(found, str)
        return
    assert isinstance(found, Widened)
    assert len(found.terms) == terms
    assert (found.row is not None) == (products > 0)
    if found.row is not None:
        order = toposort(found.row)
        assert sum(item.op is Op.DOT for item in order) == products
        assert dependencies(found.row)[found.row] <= {"q", "score"}
        assert all(item.op is not Op.SCORE for item in order)
    if score != "tanh":
        expected = lower(Source(f"tensor x[kv_len]: float\nscore = {score}"), {}).program.score
        assert simplify_node(found.program.score) is expected
