"""Parts of a score add up to it, and vary with no more than they say."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attndsl.ir import SCORE, DType, Node, Op, cast, const, dependencies, load, node, size, var
from attndsl.passes.differentiate import vjp
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.print_ir import print_expression
from attndsl.passes.split_score import place_score
from attndsl.pipeline import lower
from attndsl.source import Source

Q, KV, B, H = (var(name) for name in ("q", "kv", "b", "h"))
GAIN = load("gain", DType.FLOAT, H)
BIAS = load("bias", DType.FLOAT, H, KV)


def sums() -> st.SearchStrategy[Node]:
    """FLOAT sums of products."""
    ints = st.sampled_from([Q, KV, H, const(3), const(-2), size("q_len")])

    def int_sum(op: Op, a: Node, b: Node) -> Node:
        return node(op, a, b)

    positions = st.recursive(
        ints,
        lambda inner: st.builds(
            int_sum, st.sampled_from([Op.ADD, Op.SUB, Op.MUL, Op.FLOORDIV]), inner, inner
        ),
        max_leaves=5,
    )
    leaves = st.sampled_from([SCORE, GAIN, BIAS, const(0.5), cast(H, DType.FLOAT)]) | positions.map(
        lambda item: cast(item, DType.FLOAT)
    )
    return st.recursive(
        leaves,
        lambda inner: st.builds(
            lambda op, a, b: node(Op.NEG, a) if op is Op.NEG else node(op, a, b),
            st.sampled_from([Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.NEG]),
            inner,
            inner,
        ),
        max_leaves=8,
    )


def value(
    item: Node | None, q: int, kv: int, origin: int, score: float = 0.375, missing: float = 0.0
) -> float:
    if item is None:
        return missing
    names = {"q": q, "kv": kv, "b": 1, "h": 2, "score": score, "q_len": 40, "$origin": origin}
    names["$away"] = float(kv - origin)
    tables = {"gain": 1.25, "bias": 0.5}
    found = evaluate(item, Environment(names, lambda name, at: tables[name] + at[-1] / 8))
    assert isinstance(found, float)
    return found


@given(sums(), st.integers(0, 40), st.integers(0, 40), st.integers(-50, 50))
@settings(max_examples=400, deadline=None)
def test_parts_add_up(score, q, kv, origin):
    slope = vjp(score, const(1.0)).get(SCORE, const(0.0))
    placed = place_score(score, slope, None)
    inner = 0.375 * value(placed.inner, q, kv, origin, missing=1.0)
    parts = [
        placed.outer * value(placed.pair, q, kv, origin, inner),
        value(placed.row, q, kv, origin),
        value(placed.column, q, kv, origin),
    ]
    whole = value(score, q, kv, origin)
    found, exact = value(placed.slope, q, kv, origin, inner), value(slope, q, kv, origin)
    if math.isfinite(found) and math.isfinite(exact) and math.isfinite(inner):
        assert math.isclose(found, exact, rel_tol=1e-9, abs_tol=1e-9)
    if math.isfinite(whole) and all(map(math.isfinite, parts)):
        assert math.isclose(sum(parts), whole, rel_tol=1e-9, abs_tol=1e-6)
    for part, own in ((placed.row, {"b", "h", "q"}), (placed.column, {"b", "h", "kv"})):
        assert part is None or dependencies(part)[part] <= own
    if placed.steepness is not None:
        assert dependencies(placed.steepness)[placed.steepness] <= {"b", "h"}
        line = value(placed.steepness, q, kv, origin) * (kv - origin)
        column = value(placed.column, q, kv, origin)
        assert not math.isfinite(column) or math.isclose(line, column, rel_tol=1e-9, abs_tol=1e-9)


SLOPE = "exp2(-8.0 * float(h + 1) / float(heads))"
CASES = {
    "mask = causal(); score = score + alibi()": (
        "score", f"-({SLOPE} * float(q - $origin))", f"{SLOPE} * $away",
    ),
    "tensor bias[heads, kv_len]: float; score = score + bias[h, kv]": (
        "score", None, "bias[h, kv]",
    ),
    "tensor off[heads]: float; score = 2 * score - off[h]": ("score", "-off[h]", None),
    "score = softcap(score, 50.0)": ("tanh(score)", None, None),
    "score = score - 0.1 * abs(q - kv)": ("score - 0.1 * float(abs(q - kv))", None, None),
    "score = score + 0.5 * (q // 2 - kv // 2)": (
        "score + 0.5 * float(q // 2 - kv // 2)", None, None,
    ),
    "score = score + 0.25 * (q + kv)": (
        "score", "0.25 * float($origin + q)", "0.25 * $away",
    ),
    "score = 7.0": ("0.0", "7.0", None),
}  # fmt: skip


@pytest.mark.parametrize("text", CASES)
def test_what_comes_apart(text):
    placed = lower(Source(text), {}).placed
    parts = (placed.pair, placed.row, placed.column)
    assert tuple(part and print_expression(part) for part in parts) == CASES[text]


@pytest.mark.parametrize(
    ("text", "steepness"),
    [
        ("mask = causal(); score = score + alibi()", f"{SLOPE} * 1.0"),
        ("score = score + 0.25 * (q + kv)", "0.25 * 1.0"),
        ("tensor bias[kv_len]: float; score = score + bias[kv]", None),
        ("tensor bias[kv_len]: float; score = score + bias[kv] - 0.5 * (q - kv)", None),
        ("score", None),
    ],
)
def test_steepness_of_columns(text, steepness):
    found = lower(Source(text), {}).placed.steepness
    assert (found and print_expression(found)) == steepness


FACTORS = {
    "score = softcap(score, 50.0)": (
        "tanh(score)", "1.0 / 50.0", 50.0, "1.0 - tanh(score) * tanh(score)",
    ),
    "tensor gain[heads]: float; score = gain[h] * score": ("score", "gain[h]", 1.0, "gain[h]"),
    "score = 3 * score": ("score", None, 3.0, "3.0"),
    "score = -3 * score": ("score", "-3.0", 1.0, "-3.0"),
    "mask = score > 0.5; score = 30 * tanh(score / 30)": (
        "30.0 * tanh(score / 30.0)", None, 1.0, None,
    ),
    "score = score * score": ("score * score", None, 1.0, "score + score"),
}  # fmt: skip


@pytest.mark.parametrize("text", FACTORS)
def test_factors(text):
    placed = lower(Source(text), {}).placed
    inner = placed.inner and print_expression(placed.inner)
    pair, factor, outer, slope = FACTORS[text]
    assert (print_expression(placed.pair), inner, placed.outer) == (pair, factor, outer)
    assert slope in (None, print_expression(placed.slope))


@pytest.mark.parametrize("length", [1 << 20, 1 << 23])
def test_parts_are_small_where_the_score_is(length):
    """Near the diagonal a distance is exact however long the sequence: both parts are small."""
    text = "score = score - 0.5 * (q - kv)"
    placed = lower(Source(text), {}).placed
    for distance in (0, 1, 100):
        row = value(placed.row, length, length - distance, length - 64)
        column = value(placed.column, length, length - distance, length - 64)
        assert row + column == -0.5 * distance
        assert max(abs(row), abs(column)) <= 64
