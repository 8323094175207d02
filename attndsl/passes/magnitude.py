"""Bound on the magnitude of an expression's values, whatever goes into it.

Of a soft cap the bound is known when a program is compiled: a softmax of such scores needs no
maximum to be subtracted. Of a sine's argument it is known as soon as positions have bounds
(:mod:`.trig_ranges`). NaN counts as no value; whoever computes with it gets it back.

Non-goals: bounds of captures, lookups and counts, and of sums that cancel.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING

from attndsl.ir import DType, Op, toposort

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node

    from .int_ranges import Range

Interval = tuple[float, float]
"""The least and the greatest value."""
_ANY = (-math.inf, math.inf)
_RANGES: dict[Op, Interval] = {
    Op.TANH: (-1.0, 1.0),
    Op.SIGMOID: (0.0, 1.0),
    Op.ERF: (-1.0, 1.0),
    Op.SIN: (-1.0, 1.0),
    Op.COS: (-1.0, 1.0),
    Op.SIGN: (-1.0, 1.0),
}


def magnitude(root: Node) -> float:
    """A number that no absolute value of the FLOAT expression ``root`` exceeds; or infinity."""
    return max(map(abs, intervals((root,))[root]))


def intervals(
    roots: tuple[Node, ...], ints: Mapping[Node, Range] = MappingProxyType({}), slack: float = 0.0
) -> dict[Node, Interval]:
    """The interval of every node below ``roots``; the real line for nodes that are not FLOAT.

    Args:
        roots: Expressions.
        ints: The ranges of INT nodes; nothing is known of others.
        slack: Largest error of each operation, relative to the largest end of its operands and of
            its result.
    """
    found: dict[Node, Interval] = {}
    for item in toposort(*roots):
        args = [found[arg] for arg in item.args]
        if item.op is Op.CAST and item.dtype is DType.FLOAT and item.args[0] in ints:
            low, high = map(float, ints[item.args[0]])
        else:
            low, high = _interval(item, args)
        if slack and item.args and item.dtype is DType.FLOAT:
            ends = (abs(end) for pair in (*args, (low, high)) for end in pair)
            error = slack * max((end for end in ends if math.isfinite(end)), default=0.0)
            low, high = low - error, high + error
        found[item] = low, high
    return found


def _interval(item: Node, args: list[Interval]) -> Interval:
    """The interval of ``item`` from those of its operands."""
    op = item.op
    if item.dtype is not DType.FLOAT:
        return _ANY
    if op is Op.CONST:
        value = float(item.value)  # type: ignore[arg-type]
        return _ANY if math.isnan(value) else (value, value)
    if op in _RANGES:
        return _RANGES[op]
    if op is Op.WHERE:
        (_, (low, high), (other_low, other_high)) = args
        return min(low, other_low), max(high, other_high)
    if op in (Op.MIN, Op.MAX):
        choose = min if op is Op.MIN else max
        (low, high), (other_low, other_high) = args
        return choose(low, other_low), choose(high, other_high)
    if op is Op.NEG:
        ((low, high),) = args
        return -high, -low
    if not all(map(math.isfinite, (end for pair in args for end in pair))):
        return _ANY
    return _of_finite(item, args)


def _of_finite(item: Node, args: list[Interval]) -> Interval:
    """The same for operations that make NaN or infinities of infinite operands."""
    op = item.op
    if op is Op.ADD:
        (low, high), (other_low, other_high) = args
        return low + other_low, high + other_high
    if op is Op.SUB:
        (low, high), (other_low, other_high) = args
        return low - other_high, high - other_low
    if op is Op.MUL:
        ends = [a * b for a in args[0] for b in args[1]]
        return min(ends), max(ends)
    if op is Op.DIV and item.args[1].op is Op.CONST and args[1][0]:
        ends = [end / args[1][0] for end in args[0]]
        return min(ends), max(ends)
    if op is Op.ABS:
        return 0.0, max(map(abs, args[0]))
    return _ANY
