"""Weights as a product of a factor that varies with pairs and a factor that does not.

``sigmoid(score) / kv_len`` is a sum of sigmoids, divided once: what all weights of a head have in
common is multiplied with a row's sum instead of with each weight.

Non-goals: factors of rows or columns, and of sums' terms.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import Op, const, dependencies, node

if TYPE_CHECKING:
    from attndsl.ir import Node

_OF_HEAD = frozenset({"b", "h"})


def split_factor(weights: Node) -> tuple[Node, Node | None]:
    """``(rest, factor)`` with ``rest * factor`` the FLOAT expression ``weights``.

    ``factor`` varies with batch entry and head at most; None for 1.
    """
    deps = dependencies(weights)
    rest, factor = weights, None

    def is_common(item: Node) -> bool:
        return deps[item] <= _OF_HEAD

    while rest.op in (Op.MUL, Op.DIV) and not is_common(rest):
        left, right = rest.args
        if is_common(right):
            own = right if rest.op is Op.MUL else node(Op.DIV, const(1.0), right)
            rest = left
        elif rest.op is Op.MUL and is_common(left):
            own, rest = left, right
        else:
            break
        factor = own if factor is None else node(Op.MUL, factor, own)
    return rest, factor
