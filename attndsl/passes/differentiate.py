"""Reverse-mode differentiation of the score: one rule an op, over the hash-consed DAG.

Adjoints are accumulated in reverse topological order (A. Griewank, A. Walther, Evaluating
Derivatives, 2008, chapter 3.2). Derivatives are built from the primal's own nodes, so that printing
both shares the work (``tanh`` gives ``1 - t * t`` with the same ``t``).

The gradient at kinks is 0 for ``abs``, ``sign`` and ``relu`` at 0; ``min`` and ``max`` split ties;
rounding, ``//``, ``%``, comparisons and casts to int have gradient 0. A branch of ``where`` that is
not taken contributes 0 even where its derivative is infinite or NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attndsl.ir import DType, Node, Op, const, node, toposort

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.ir import Program

ZERO, ONE = const(0.0), const(1.0)


@dataclass(frozen=True, slots=True)
class TensorGradient:
    """``factor`` is the derivative of the final score by the element that ``load`` reads."""

    load: Node
    factor: Node


@dataclass(frozen=True, slots=True)
class ProductGradient:
    """``factor`` is the derivative of the final score by the DOT ``product``."""

    product: Node
    factor: Node


@dataclass(frozen=True, slots=True)
class ParamGradient:
    """``factor`` is the derivative of the final score by the param ``name``."""

    name: str
    factor: Node


@dataclass(frozen=True, slots=True)
class Derivative:
    """Derivatives of a program's final score."""

    score: Node
    """Derivative by the raw score."""
    tensors: tuple[TensorGradient, ...]
    """Derivatives by each lookup of a float tensor; a tensor looked up twice stands here twice."""
    params: tuple[ParamGradient, ...]
    """Derivatives by each float param that occurs."""
    products: tuple[ProductGradient, ...] = ()
    """Derivatives by each contraction."""


@dataclass(frozen=True, slots=True)
class _Adjoint:
    """A node's adjoint: ``value`` where ``guard`` holds (None: everywhere), else 0."""

    guard: Node | None
    value: Node


def differentiate(program: Program) -> Derivative:
    """Derivatives of ``program.score`` by all that it depends on continuously."""
    found = vjp(program.score, ONE)
    tensors = [TensorGradient(n, g) for n, g in found.items() if n.op is Op.LOAD]
    params = [ParamGradient(str(n.value), g) for n, g in found.items() if n.op is Op.PARAM]
    score = next((g for n, g in found.items() if n.op is Op.SCORE), ZERO)
    products = [ProductGradient(n, g) for n, g in found.items() if n.op is Op.DOT]
    return Derivative(score, tuple(tensors), tuple(params), tuple(products))


def vjp(root: Node, seed: Node) -> dict[Node, Node]:
    """``seed`` times the derivative of ``root`` by each float leaf below it.

    Those are SCORE, PARAM, LOAD and DOT, whose own derivatives are rows, which are no nodes.

    Leaves come in topological order, so that the result is the same every time.
    """
    order = toposort(root)
    parts: dict[Node, list[_Adjoint]] = {root: [_Adjoint(None, seed)]}
    found: dict[Node, Node] = {}
    for item in reversed(order):
        if item not in parts or item.dtype is not DType.FLOAT:
            continue
        adjoint = _merge(parts.pop(item))
        if item.op in (Op.SCORE, Op.PARAM, Op.LOAD, Op.DOT):
            found[item] = _guarded(adjoint)
            continue
        for arg, part in _contributions(item, adjoint):
            if arg.dtype is DType.FLOAT and part.value is not ZERO:
                parts.setdefault(arg, []).append(part)
    return {item: found[item] for item in order if item in found}


def _contributions(item: Node, adjoint: _Adjoint) -> list[tuple[Node, _Adjoint]]:
    if item.op is Op.WHERE:
        condition, yes, no = item.args
        return [
            (yes, _Adjoint(_both(adjoint.guard, condition), adjoint.value)),
            (no, _Adjoint(_both(adjoint.guard, _not(condition)), adjoint.value)),
        ]
    rule = RULES.get(item.op)
    if rule is None:
        raise NotImplementedError(f"no differentiation rule for {item.op.name}")
    values = rule(item, adjoint.value)
    return [(a, _Adjoint(adjoint.guard, v)) for a, v in zip(item.args, values, strict=True)]


def _merge(parts: list[_Adjoint]) -> _Adjoint:
    """The sum; guarded by the disjunction, so that nothing is evaluated where no part holds."""
    if len({part.guard for part in parts}) == 1:
        total = parts[0].value
        for part in parts[1:]:
            total = _add(total, part.value)
        return _Adjoint(parts[0].guard, total)
    guard: Node | None = parts[0].guard
    total = _guarded(parts[0])
    for part in parts[1:]:
        total = _add(total, _guarded(part))
        guard = _either(guard, part.guard)
    return _Adjoint(guard, total)


def _guarded(adjoint: _Adjoint) -> Node:
    if adjoint.guard is None:
        return adjoint.value
    return node(Op.WHERE, adjoint.guard, adjoint.value, ZERO)


def _both(a: Node | None, b: Node) -> Node:
    return b if a is None or a is b else node(Op.AND, a, b)


def _either(a: Node | None, b: Node | None) -> Node | None:
    if a is None or b is None or a is _not(b):
        return None
    return a if a is b else node(Op.OR, a, b)


def _not(a: Node) -> Node:
    return a.args[0] if a.op is Op.NOT else node(Op.NOT, a)


def _add(a: Node, b: Node) -> Node:
    return b if a is ZERO else a if b is ZERO else node(Op.ADD, a, b)


def _mul(a: Node, b: Node) -> Node:
    if a is ZERO or b is ZERO:
        return ZERO
    return b if a is ONE else a if b is ONE else node(Op.MUL, a, b)


def _sub(a: Node, b: Node) -> Node:
    return node(Op.SUB, a, b)


def _div(a: Node, b: Node) -> Node:
    return node(Op.DIV, a, b)


def _neg(a: Node) -> Node:
    return ZERO if a is ZERO else node(Op.NEG, a)


def _power(item: Node, g: Node) -> tuple[Node, Node]:
    base, exponent = item.args
    if exponent.op is Op.CONST and isinstance(exponent.value, float):
        p = exponent.value
        if p == 0.0:
            return ZERO, ZERO
        lower = base if p == 2.0 else node(Op.POW, base, const(p - 1.0))
        return _mul(g, ONE if p == 1.0 else _mul(exponent, lower)), ZERO
    lower = _mul(exponent, node(Op.POW, base, _sub(exponent, ONE)))
    by_base = node(Op.WHERE, node(Op.EQ, exponent, ZERO), ZERO, _mul(g, lower))
    # At base 0 the power is flat in a positive exponent; log would make NaN of it.
    at_zero = node(Op.EQ, base, ZERO)
    by_exponent = _mul(g, _mul(item, node(Op.LOG, base)))
    return by_base, node(Op.WHERE, at_zero, ZERO, by_exponent)


def _rest(item: Node, g: Node) -> tuple[Node, Node]:
    x, divisor = item.args
    if divisor.op is Op.CONST:
        return g, ZERO
    return g, _neg(_mul(g, node(Op.FLOORDIV, x, divisor)))


def _extremum(item: Node, g: Node) -> tuple[Node, Node]:
    a, b = item.args
    first, second = (a, b) if item.op is Op.MIN else (b, a)
    tie = node(Op.EQ, a, b)
    half = _mul(g, const(0.5))
    wins = node(Op.LT, first, second)
    to_first = node(Op.WHERE, tie, half, node(Op.WHERE, wins, g, ZERO))
    to_second = node(Op.WHERE, tie, half, node(Op.WHERE, wins, ZERO, g))
    return to_first, to_second


def _gelu(item: Node, g: Node) -> tuple[Node]:
    x = item.args[0]
    cdf = _mul(const(0.5), _add(ONE, node(Op.ERF, _mul(x, const(math.sqrt(0.5))))))
    density = _mul(
        const(1.0 / math.sqrt(2.0 * math.pi)), node(Op.EXP, _mul(const(-0.5), _mul(x, x)))
    )
    return (_mul(g, _add(cdf, _mul(x, density))),)


def _silu(item: Node, g: Node) -> tuple[Node]:
    x = item.args[0]
    s = node(Op.SIGMOID, x)
    return (_mul(g, _mul(s, _add(ONE, _mul(x, _sub(ONE, s))))),)


def _by(factor: Callable[[Node, Node], Node]) -> Callable[[Node, Node], tuple[Node]]:
    """Rule of a unary op from its derivative as a function of (operand, result)."""
    return lambda item, g: (_mul(g, factor(item.args[0], item)),)


def _flat(item: Node, g: Node) -> tuple[Node, ...]:
    return (ZERO,) * len(item.args)


RULES: dict[Op, Callable[[Node, Node], tuple[Node, ...]]] = {
    Op.CONST: _flat,
    Op.CAST: _flat,
    Op.ADD: lambda item, g: (g, g),
    Op.SUB: lambda item, g: (g, _neg(g)),
    Op.MUL: lambda item, g: (_mul(g, item.args[1]), _mul(g, item.args[0])),
    Op.NEG: lambda item, g: (_neg(g),),
    Op.DIV: lambda item, g: (_div(g, item.args[1]), _neg(_div(_mul(g, item), item.args[1]))),
    Op.FLOORDIV: _flat,
    Op.MOD: _rest,
    Op.POW: _power,
    Op.MIN: _extremum,
    Op.MAX: _extremum,
    Op.ABS: _by(lambda x, y: node(Op.SIGN, x)),
    Op.SIGN: _flat,
    Op.FLOOR: _flat,
    Op.CEIL: _flat,
    Op.ROUND: _flat,
    Op.SQRT: _by(lambda x, y: _div(const(0.5), y)),
    Op.RSQRT: _by(lambda x, y: _mul(const(-0.5), _div(y, x))),
    Op.EXP: _by(lambda x, y: y),
    Op.EXP2: _by(lambda x, y: _mul(y, const(math.log(2.0)))),
    Op.LOG: _by(lambda x, y: _div(ONE, x)),
    Op.LOG2: _by(lambda x, y: _div(const(1.0 / math.log(2.0)), x)),
    Op.LOG1P: _by(lambda x, y: _div(ONE, _add(ONE, x))),
    Op.EXPM1: _by(lambda x, y: _add(y, ONE)),
    Op.SIN: _by(lambda x, y: node(Op.COS, x)),
    Op.COS: _by(lambda x, y: _neg(node(Op.SIN, x))),
    Op.TAN: _by(lambda x, y: _add(ONE, _mul(y, y))),
    Op.TANH: _by(lambda x, y: _sub(ONE, _mul(y, y))),
    # One multiplication and addition, and as exact.
    Op.SIGMOID: _by(lambda x, y: _sub(y, _mul(y, y))),
    Op.SILU: _silu,
    Op.RELU: _by(lambda x, y: node(Op.WHERE, node(Op.LT, ZERO, x), ONE, ZERO)),
    Op.GELU: _gelu,
    Op.ERF: _by(lambda x, y: _mul(const(2.0 / math.sqrt(math.pi)), node(Op.EXP, _neg(_mul(x, x))))),
    Op.SOFTPLUS: _by(lambda x, y: node(Op.SIGMOID, x)),
}
"""One rule an op that yields floats: from (node, adjoint) to one adjoint an operand."""
