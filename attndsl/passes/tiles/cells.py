"""Conditions that are constant over cells of pairs, such as ``blocks[q // 64, kv // 64]``.

A cell is a range of logical positions from a multiple of its size to the next one. A condition that
goes by the cells of both positions is evaluated once a pair of cells, whatever it does with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

from attndsl.ir import DType, Op, dependencies, toposort

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node

MIN_PAIRS = 64
"""Pairs of a cell from which evaluation by cells is worth it."""
_MOST = 1 << 40
"""Constants below this are looked at."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A condition, and the sizes of the cells that it is constant over."""

    condition: Node
    q_size: int
    """0 where the condition does not vary with ``q``."""
    kv_size: int


@dataclass(frozen=True, slots=True)
class _Steps:
    """An expression that grows by 1 with the position, within cells.

    It equals the position plus ``shift``, modulo ``period`` if that is not 0.
    """

    shift: int
    period: int
    size: int
    """Size of the cells between which it may jump; 0 where it never does."""


def cells_of(mask: Node) -> dict[Node, Cell]:
    """The BOOL expressions below ``mask`` that have cells of :data:`MIN_PAIRS` or more."""
    deps = dependencies(mask)
    sizes = {name: _sizes(mask, name, deps) for name in ("q", "kv")}
    found = {}
    for item in toposort(mask):
        q_size, kv_size = sizes["q"][item], sizes["kv"][item]
        both = {"q", "kv"} <= deps[item] and "score" not in deps[item]
        if item.dtype is DType.BOOL and both and q_size * kv_size >= MIN_PAIRS:
            found[item] = Cell(item, q_size, kv_size)
    return found


def _sizes(mask: Node, position: str, deps: Mapping[Node, frozenset[str]]) -> dict[Node, int]:
    """The size of the cells of ``position`` that each node is constant over; 0 for any size."""
    sizes: dict[Node, int] = {}
    steps: dict[Node, _Steps] = {}
    for item in toposort(mask):
        if position not in deps[item]:
            sizes[item] = 0
            continue
        own = _steps(item, position, steps)
        if own is not None:
            steps[item] = own
        between = _breaks(item, steps)
        sizes[item] = gcd(*(sizes[arg] for arg in item.args)) if between is None else between
        if item.op is Op.VAR:
            sizes[item] = 1
    return sizes


def _steps(item: Node, position: str, steps: Mapping[Node, _Steps]) -> _Steps | None:
    if item.op is Op.VAR and item.value == position:
        return _Steps(0, 0, 0)
    if item.op in (Op.ADD, Op.SUB, Op.MOD) and item.dtype is DType.INT:
        left, right = item.args
        if item.op is Op.ADD and right in steps:
            left, right = right, left
        number = _number(right)
        if left in steps and number is not None:
            inner = steps[left]
            if item.op is Op.MOD:
                size = gcd(inner.size, number, inner.shift)
                period = gcd(inner.period, number)
                return _Steps(inner.shift, period, size) if number > 0 else None
            shift = number if item.op is Op.ADD else -number
            return replace(inner, shift=inner.shift + shift)
    return None


def _breaks(item: Node, steps: Mapping[Node, _Steps]) -> int | None:
    """The size of cells over which ``item`` is constant though its operands are not; or None."""
    if item.op in (Op.FLOORDIV, Op.SHR) and item.dtype is DType.INT:
        number = _number(item.args[1])
        if item.op is Op.SHR and number is not None:
            number = 1 << number if 0 <= number < 32 else None
        inner = steps.get(item.args[0])
        if inner is None or number is None or number <= 0:
            return None
        return gcd(number, inner.period, inner.shift, inner.size)
    if item.op in (Op.LT, Op.LE):
        for place, arg in enumerate(item.args):
            number = _number(item.args[1 - place])
            inner = steps.get(arg)
            if inner is not None and inner.period == 0 and number is not None:
                # The first position at which the comparison changes.
                later = (item.op is Op.LE) == (place == 0)
                return abs(number - inner.shift + later)
    return None


def _number(item: Node) -> int | None:
    """The value of a constant with which sums of positions cannot wrap."""
    value = item.value if item.op is Op.CONST else None
    return value if type(value) is int and abs(value) < _MOST else None
