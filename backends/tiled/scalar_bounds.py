"""A mask's bounds in a box of pairs (:mod:`attndsl.passes.tiles.intervals`), on Python's numbers.

For questions about one box or a few, where tensors would take longer to make than to ask.

Non-goals: masks that read captured tensors, heads or batch entries; values of keys; floats, which
programs round to fp32 at each operation, and Python does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from attndsl.foundation.caches import memoised
from attndsl.ir import DType, Op, toposort
from attndsl.passes.evaluate import Environment, evaluate_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.ir import Node
    from attndsl.passes.evaluate import Value
    from attndsl.pipeline import Lowered

    from ..base import Call
    from .step_plan import Range

_OTHERS = frozenset({Op.LOAD, Op.DOT, Op.SCORE, Op.POW})
"""Operations other than names and operations on 64-bit ints. A power may have any length."""
_Order = tuple["Node", ...]
"""Nodes to evaluate, operands first; the last one is the result."""


class _Orders(NamedTuple):
    may: _Order
    must: _Order
    rows: tuple[_Order, ...]
    """Orders for the values of rows."""


class ScalarBounds(NamedTuple):
    """The bounds of a call's mask. Positions are logical ones, and ranges are not empty."""

    orders: _Orders
    names: Mapping[str, Value]
    """Sizes and params."""
    q_offset: int
    kv_offset: int

    @property
    def of_one_row(self) -> bool:
        """True if boxes have to be of one row."""
        return bool(self.orders.rows)

    def may(self, q: Range, kv: Range) -> bool:
        """False only where no pair of the box is live."""
        return bool(self._value(self.orders.may, q, kv))

    def must(self, q: Range, kv: Range) -> bool:
        """True only where every pair of the box is live."""
        return bool(self._value(self.orders.must, q, kv))

    def _value(self, order: _Order, q: Range, kv: Range) -> Value:
        names = {
            **self.names, "$q_low": q[0], "$q_high": q[1] - 1, "$kv_low": kv[0],
            "$kv_high": kv[1] - 1,
        }  # fmt: skip
        for number, row in enumerate(self.orders.rows):
            found = evaluate_in(row, Environment({**self.names, "q": q[0]}))
            names[f"$row{number}_low"] = names[f"$row{number}_high"] = found
        return evaluate_in(order, Environment(names))


def bounds_of(lowered: Lowered, call: Call) -> ScalarBounds | None:
    """The bounds of a call's mask, or None where they are of more than numbers and positions."""
    sparsity = lowered.sparsity
    bounds, q_offset, kv_offset = sparsity.bounds, call.q_offset, call.kv_offset
    if type(q_offset) is not int or type(kv_offset) is not int:
        return None
    if (
        bounds is None or sparsity.by_batch or sparsity.by_head or bounds.columns or bounds.cells
        or call.q_index is not None or call.kv_index is not None or call.tiles is not None
    ):  # fmt: skip
        return None
    orders = _orders(bounds.may, bounds.must, bounds.rows)
    params = {name: x for name, x in call.params.items() if not isinstance(x, torch.Tensor)}
    if orders is None or len(params) < len(call.params):
        return None
    names = {**call.sizes, **params} if params else call.sizes
    return ScalarBounds(orders, names, q_offset, kv_offset)


def boundary(holds: Callable[[int], bool], inside: int, outside: int) -> int:
    """The last place where it holds, from ``inside`` on to ``outside``, where it does not."""
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        if holds(middle):
            inside = middle
        else:
            outside = middle
    return inside


@memoised("orders of bounds of masks", 256)
def _orders(may: Node, must: Node, rows: tuple[Node, ...]) -> _Orders | None:
    found = _Orders(_order(may), _order(must), tuple(map(_order, rows)))
    every = {item for order in (found.may, found.must, *found.rows) for item in order}
    fits = not any(item.dtype is DType.FLOAT or item.op in _OTHERS for item in every)
    return found if fits else None


def _order(root: Node) -> _Order:
    return tuple(toposort(root))
