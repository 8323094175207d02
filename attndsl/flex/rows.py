"""Reductions over short captured rows: ``table[b].sum(-1)``, ``torch.isin(kv_idx, listed)``.

The language has no loop over a row's elements. A short row of known length is written out, element
by element.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from . import arithmetic as ar
from . import lookups
from .places import refusal
from .symbols import Symbol, View

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.ir import Node

    from .tracer import Tracer

_LONGEST = 32
"""Elements that are written out; programs of more would compile slowly."""


def _any(elements: list[Node]) -> Node:
    return reduce(ar.either, elements, ar.FALSE)


def _all(elements: list[Node]) -> Node:
    return reduce(ar.both, elements, ar.TRUE)


def _sum(elements: list[Node]) -> Node:
    return reduce(ar.add, map(ar.number, elements))


def _prod(elements: list[Node]) -> Node:
    return reduce(ar.mul, map(ar.number, elements))


def _mean(elements: list[Node]) -> Node:
    return ar.div(_sum([ar.floating(x) for x in elements]), len(elements))


_FOLDS: dict[str, Callable[[list[Node]], Node]] = {
    "any": _any,
    "all": _all,
    "sum": _sum,
    "prod": _prod,
    "mean": _mean,
    "amax": lambda elements: reduce(ar.maximum, elements),
    "amin": lambda elements: reduce(ar.minimum, elements),
}


def over_row(
    tracer: Tracer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Symbol | None:
    """The result of a reduction of a captured row, or None where ``name`` is none of one.

    Raises:
        TraceError: The row is too long, or has no fixed length.
    """
    if name in _FOLDS and isinstance(args[0], View) and args[0].ndim == 1:
        dims = (*args[1:], kwargs.get("dim", -1))[:1]
        if set(kwargs) <= {"dim"} and dims[0] in (-1, 0, None, (-1,), (0,), [-1], [0]):
            fold = _FOLDS[name]
            return Symbol(tracer, fold(_elements(tracer, args[0])))
    if name in ("dot", "inner") and len(args) == 2 and all(_is_row(x) for x in args):
        left, right = (_elements(tracer, x) for x in args)
        if len(left) == len(right):
            return Symbol(tracer, _sum([ar.mul(a, b) for a, b in zip(left, right, strict=True)]))
    if name == "isin" and len(args) == 2 and not kwargs and _is_row(args[1]):
        value = tracer.node(args[0])
        found = [ar.compare("==", value, x) for x in _elements(tracer, args[1])]
        return Symbol(tracer, _any(found))
    return None


def _is_row(value: Any) -> bool:
    return isinstance(value, View | torch.Tensor) and value.ndim == 1


def _elements(tracer: Tracer, row: View | torch.Tensor) -> list[Node]:
    """The elements of a row, each as a lookup."""
    size = row.shape[0]
    if not isinstance(size, int) or not 0 < size <= _LONGEST:
        raise refusal(
            f"a row of {size} elements is reduced, and rows of 1 to {_LONGEST} are written out",
            "compute the reduction for all rows before the call and capture its result",
        )
    return [tracer.node(lookups.index(tracer, row, place)) for place in range(size)]
