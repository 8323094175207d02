"""Expressions that vary with the distance ``q - kv`` alone.

A kernel can add up the gradients of such a value along the diagonals of the score matrix.

Non-goals: distances that hide in products, quotients of positions, or lookups of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import COMPARISONS, DType, Op, dependencies, toposort

if TYPE_CHECKING:
    from attndsl.ir import Node

_Multiples = tuple[int, int]
"""The factors of ``q`` and ``kv`` in a sum of their multiples and of terms without either."""


def varies_with_distance_alone(*roots: Node) -> bool:
    """Return True if ``roots`` depend on ``q`` and ``kv``, but only through ``q - kv``."""
    varies = dependencies(*roots)
    if any("score" in varies[root] for root in roots):
        return False
    return any({"q", "kv"} <= varies[root] for root in roots) and meets_distances_alone(*roots)


def meets_distances_alone(*roots: Node) -> bool:
    """Return True if positions are in ``roots`` as ``q - kv`` only, if at all.

    If so, pairs with the same distance and score have the same value.
    """
    alone = met_by_distance(*roots)
    return all(alone[root] for root in roots)


def met_by_distance(*roots: Node) -> dict[Node, bool]:
    """For each node below ``roots``, whether positions are in it as ``q - kv`` only, if at all."""
    varies, multiples = dependencies(*roots), _all_multiples(*roots)
    alone: dict[Node, bool] = {}
    for item in toposort(*roots):
        if not varies[item] & {"q", "kv"}:
            alone[item] = True
        elif item in multiples:
            alone[item] = multiples[item][0] == -multiples[item][1]
        elif item.op in COMPARISONS and all(arg in multiples for arg in item.args):
            # As if their difference were compared with 0.
            left, right = (multiples[arg] for arg in item.args)
            alone[item] = left[0] - right[0] == right[1] - left[1]
        else:
            alone[item] = bool(item.args) and all(alone[arg] for arg in item.args)
    return alone


def is_distance(index: Node) -> bool:
    """Return True if ``index`` is ``q - kv`` and terms that vary with nothing of a pair."""
    varies = dependencies(index)[index] == {"q", "kv"}
    return varies and _all_multiples(index).get(index) == (1, -1)


def _all_multiples(*roots: Node) -> dict[Node, _Multiples]:
    """Multiples of ``q`` and ``kv`` in each INT node that is a sum of such and of other terms."""
    varies = dependencies(*roots)
    multiples: dict[Node, _Multiples] = {}
    for item in toposort(*roots):
        found = _multiples(item, multiples) if varies[item] & {"q", "kv"} else (0, 0)
        if found is not None and item.dtype is DType.INT:
            multiples[item] = found
    return multiples


def _multiples(item: Node, known: dict[Node, _Multiples]) -> _Multiples | None:
    """Multiples of ``q`` and ``kv`` in an INT sum, given those of its operands."""
    if item.op is Op.VAR:
        return (int(item.value == "q"), int(item.value == "kv"))
    if any(arg not in known for arg in item.args):
        return None
    parts = [known[arg] for arg in item.args]
    if item.op is Op.NEG:
        return -parts[0][0], -parts[0][1]
    if item.op in (Op.ADD, Op.SUB):
        sign = 1 if item.op is Op.ADD else -1
        return parts[0][0] + sign * parts[1][0], parts[0][1] + sign * parts[1][1]
    if item.op is Op.MUL:
        for number, other in (item.args, item.args[::-1]):
            if number.op is Op.CONST:
                value = int(number.value)  # type: ignore[arg-type]
                return value * known[other][0], value * known[other][1]
    return None
