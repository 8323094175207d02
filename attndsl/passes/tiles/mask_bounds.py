"""Upper and lower bounds of a mask: pairs that may be live, and pairs that surely are.

A condition that is not decided is taken to hold in the upper mask and not to hold in the lower one,
with regard to the ``not`` around it. So lower <= mask <= upper, pair by pair, whatever the
condition turns out to be. Integer sets cannot decide lookups by position, comparisons of floats and
the score. Whoever reads no tensor cannot decide what depends on captures.

Non-goals: how close the two sides are; conditions that hold or fail together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import DType, Op, const, node, toposort
from attndsl.passes.simplify import simplify_node

from .affine import why_not_affine

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from attndsl.ir import Node


def upper(mask: Node) -> Node:
    """A quasi-affine mask that holds wherever ``mask`` may; ``mask`` itself if it is one."""
    return _quasi_affine(mask, may=True)


def lower(mask: Node) -> Node:
    """A quasi-affine mask that holds only where ``mask`` surely does."""
    return _quasi_affine(mask, may=False)


def relaxed(mask: Node, unknown: Collection[str]) -> Node:
    """``mask`` where conditions on captured tensors, scores and ``unknown`` params count as met.

    Args:
        mask: BOOL.
        unknown: Names of params whose values are not known.
    """
    hidden: set[Node] = set()
    for item in toposort(mask):
        is_leaf = item.op in (Op.LOAD, Op.SCORE, Op.DOT, Op.IN)
        if is_leaf or (item.op is Op.PARAM and item.value in unknown) or hidden & {*item.args}:
            hidden.add(item)
    return simplify_node(_bound(mask, True, lambda item: item not in hidden))


def _quasi_affine(mask: Node, may: bool) -> Node:
    result = simplify_node(_bound(mask, may, lambda item: why_not_affine(item) is None))
    # Integers of several conditions together may need more than 64 bits.
    return result if why_not_affine(result) is None else const(may)


def _bound(mask: Node, may: bool, decided: Callable[[Node], bool]) -> Node:
    """One side of ``mask``, of conditions that are ``decided`` alone."""
    # Each condition has two sides, since 'not' asks for the other one.
    most: dict[Node, Node] = {}
    least: dict[Node, Node] = {}
    for item in toposort(mask):
        if item.dtype is not DType.BOOL:
            continue
        if decided(item):
            most[item] = least[item] = item
        elif item.op in (Op.AND, Op.OR):
            most[item] = node(item.op, *(most[arg] for arg in item.args))
            least[item] = node(item.op, *(least[arg] for arg in item.args))
        elif item.op is Op.NOT:
            most[item], least[item] = (node(Op.NOT, side[item.args[0]]) for side in (least, most))
        else:
            most[item], least[item] = const(True), const(False)
    return (most if may else least)[mask]
