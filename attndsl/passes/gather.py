"""Lookups by one position alone, taken out of expressions.

A kernel has such a value once for each row or column of a tile, and a thread that looks up a value
for each of its pairs would look it up many times, each time waiting for memory.

Non-goals: lookups by both positions, arithmetic without a lookup (it costs less than a detour).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import Op, dependencies, param, toposort

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.ir import Node

_POSITIONS = frozenset({"q", "kv", "score"})


def lookups(roots: Sequence[Node | None], variable: str) -> dict[Node, Node]:
    """The largest subexpressions that look something up by ``variable`` alone.

    Args:
        roots: Expressions; None for one that is missing.
        variable: ``q`` or ``kv``.

    Returns:
        Expressions of ``b``, ``h`` and the variable in the order of their first use, and for each
        the param, ``$q_part0`` or ``$kv_part0`` and so on, that is to stand for it.
    """
    given = [root for root in roots if root is not None]
    varies = dependencies(*given)
    order = toposort(*given)
    found: set[Node] = set()
    # What a kernel itself gives an expression, such as a distance, is known only where that stands.
    local: set[Node] = set()
    for item in order:
        own = item.op is Op.LOAD and variable in varies[item]
        if own or not found.isdisjoint(item.args):
            found.add(item)
        given_here = item.op is Op.PARAM and str(item.value).startswith("$")
        if given_here or not local.isdisjoint(item.args):
            local.add(item)
    alone = {item for item in found - local if varies[item] & _POSITIONS == {variable}}
    # What only a larger one uses is part of it.
    used = {arg for item in order if item not in alone for arg in item.args} | set(given)
    largest = [item for item in order if item in alone and item in used]
    return {
        item: param(f"${variable}_part{place}", item.dtype) for place, item in enumerate(largest)
    }
