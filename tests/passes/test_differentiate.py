"""Each differentiation rule against central differences in float64; kinks; branches not taken."""

from __future__ import annotations

import math

import pytest

from attndsl import ir
from attndsl.ir import DType, Node, Op, Program, const, load, node, param
from attndsl.passes.differentiate import RULES, differentiate, vjp
from attndsl.passes.evaluate import Environment, evaluate

SCORE = ir.SCORE
GAIN = param("gain", DType.FLOAT)
POSITIVE = (Op.SQRT, Op.RSQRT, Op.LOG, Op.LOG2, Op.LOG1P)
FLAT = (Op.FLOOR, Op.CEIL, Op.ROUND, Op.SIGN, Op.FLOORDIV)
BINARY = (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.MIN, Op.MAX, Op.POW, Op.FLOORDIV, Op.MOD)


def _yields_floats(op: Op) -> bool:
    return op not in (
        *ir.COMPARISONS,
        *ir.LOGICAL,
        *ir.BITWISE,
        *ir.LEAVES,
        Op.LOAD,
        Op.DOT,
        Op.IN,
        Op.WHERE,
    )


def _value(root: Node, score: float, gain: float) -> float:
    return float(evaluate(root, Environment({"score": score, "gain": gain})))


def _slopes(root: Node, score: float, gain: float) -> tuple[float, float]:
    found = vjp(root, const(1.0))
    return tuple(
        _value(found[leaf], score, gain) if leaf in found else 0.0 for leaf in (SCORE, GAIN)
    )


def _differences(root: Node, score: float, gain: float) -> tuple[float, float]:
    step = 1e-6
    by_score = _value(root, score + step, gain) - _value(root, score - step, gain)
    by_gain = _value(root, score, gain + step) - _value(root, score, gain - step)
    return by_score / (2 * step), by_gain / (2 * step)


def test_every_op_that_yields_floats_has_a_rule() -> None:
    wanted = {op for op in Op if _yields_floats(op)} | {Op.CONST}
    assert wanted <= set(RULES)


@pytest.mark.parametrize("op", [op for op in Op if _yields_floats(op)], ids=lambda op: op.name)
@pytest.mark.parametrize("point", [(0.7, 1.3), (1.9, 0.6)])
def test_rule_equals_central_differences(op: Op, point: tuple[float, float]) -> None:
    if op in BINARY:
        root = node(op, SCORE, GAIN)
    elif op is Op.CAST:
        root = ir.cast(ir.cast(SCORE, DType.INT), DType.FLOAT)
    else:
        root = node(op, SCORE)
    assert _slopes(root, *point) == pytest.approx(_differences(root, *point), rel=1e-5, abs=1e-7)
    if op not in POSITIVE and op not in BINARY:
        negative = (-point[0], point[1])
        expected = _differences(root, *negative)
        assert _slopes(root, *negative) == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("op", [Op.ABS, Op.SIGN, Op.RELU, *FLAT])
def test_kinks_and_steps_have_gradient_zero(op: Op) -> None:
    root = node(op, SCORE, GAIN) if op in BINARY else node(op, SCORE)
    assert _slopes(root, 0.0, 1.0) == (0.0, 0.0)


@pytest.mark.parametrize("op", [Op.MIN, Op.MAX])
def test_ties_split_evenly(op: Op) -> None:
    assert _slopes(node(op, SCORE, GAIN), 2.0, 2.0) == (0.5, 0.5)


@pytest.mark.parametrize("function", [Op.LOG, Op.SQRT, Op.RSQRT, Op.LOG2])
@pytest.mark.parametrize("score", [-1.0, 0.0, 0.5])
def test_a_branch_not_taken_never_reaches_a_gradient(function: Op, score: float) -> None:
    root = node(Op.WHERE, node(Op.LT, const(0.0), SCORE), node(function, SCORE), SCORE)
    expected = _differences(node(function, SCORE), score, 1.0)[0] if score > 0 else 1.0
    assert _slopes(root, score, 1.0)[0] == pytest.approx(expected, rel=1e-5)


def test_nested_branches_not_taken() -> None:
    inner = node(
        Op.WHERE, node(Op.LT, const(1.0), SCORE), node(Op.LOG, SCORE), node(Op.SQRT, SCORE)
    )
    root = node(Op.WHERE, node(Op.LT, const(0.0), SCORE), node(Op.MUL, inner, inner), const(3.0))
    for score in (-2.0, 0.0, 0.25, 4.0):
        slope = _slopes(root, score, 1.0)[0]
        assert math.isfinite(slope)
        if score != 0.0:
            assert slope == pytest.approx(_differences(root, score, 1.0)[0], rel=1e-5, abs=1e-8)


def test_pairs_that_take_none_of_several_branches() -> None:
    """What both branches share has no derivative at 0, where neither is taken."""
    root_of = node(Op.SQRT, SCORE)
    low, high = (node(Op.LT, const(bound), SCORE) for bound in (0.5, 2.0))
    twice = node(Op.MUL, const(2.0), root_of)
    other = node(Op.WHERE, low, twice, const(0.0))
    root = node(Op.WHERE, high, root_of, other)
    assert _slopes(root, 0.0, 1.0)[0] == 0.0
    assert _slopes(root, 1.0, 1.0)[0] == pytest.approx(1.0)
    assert _slopes(root, 4.0, 1.0)[0] == pytest.approx(0.25)


def test_factors_of_tensors_and_params() -> None:
    bias = load("bias", DType.FLOAT, ir.var("q"), ir.var("kv"))
    score = node(Op.ADD, node(Op.MUL, GAIN, SCORE), node(Op.MUL, bias, bias))
    found = differentiate(Program(score))
    assert found.score is GAIN
    assert [g.name for g in found.params] == ["gain"]
    assert found.params[0].factor is SCORE
    assert found.tensors[0].load is bias
    value = evaluate(
        found.tensors[0].factor, Environment({"q": 0, "kv": 0}, lambda name, indices: 3.0)
    )
    assert value == 6.0


def test_ints_have_no_gradient() -> None:
    count = load("count", DType.INT, ir.var("q"))
    found = differentiate(Program(node(Op.MUL, SCORE, ir.cast(count, DType.FLOAT))))
    assert found.tensors == ()
