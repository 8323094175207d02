"""Indices of captured tensors: ``table[h]``, ``table[h, q - kv]``, ``table[h][q - kv]``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.ir import DType, load

from . import arithmetic as ar
from .casting import dtype_of
from .places import refusal
from .symbols import Symbol, View

if TYPE_CHECKING:
    from attndsl.ir import Node

    from .tracer import Tracer

_WHOLE = slice(None)


def index(tracer: Tracer, target: Any, indices: Any) -> Symbol | View:
    """``target[indices]``, a value of one pair once all dims are indexed."""
    if isinstance(target, torch.Tensor):
        target = View(tracer, target, (None,) * target.dim())
    if not isinstance(target, View):
        raise refusal(
            f"a {type(target).__name__} is indexed by a value that differs from pair to pair",
            "make it a tensor: torch.tensor(values)[index]",
        )
    given = list(indices) if isinstance(indices, tuple) else [indices]
    free = [dim for dim, found in enumerate(target.indices) if found is None]
    places = [n for n, item in enumerate(given) if item is Ellipsis]
    if places:
        given[places[0] : places[0] + 1] = [_WHOLE] * (len(free) - len(given) + 1)
    if len(given) > len(free):
        raise refusal(
            f"{len(given)} indices of a tensor with {len(free)} dim(s) left", "drop some of them"
        )
    found = list(target.indices)
    for dim, item in zip(free, given, strict=False):
        if isinstance(item, slice):
            if (item.start, item.stop, item.step) != (None, None, None):
                raise refusal("a slice beside a traced index", "slice the tensor before the call")
            continue
        found[dim] = _index_node(tracer, item, target.tensor, dim)
    view = View(tracer, target.tensor, tuple(found), target.casts)
    return view if view.ndim else _element(tracer, view)


def _index_node(tracer: Tracer, item: Any, tensor: torch.Tensor, dim: int) -> Node:
    if item is None:
        raise refusal("None adds a dim, and a value of one pair has none", "drop it")
    node = tracer.node(item)
    if node.dtype is not DType.INT:
        raise refusal(
            f"an index is an int, and this is a {node.dtype.value}",
            "write .to(torch.int64), or torch.where for a condition",
        )
    return tracer.from_end(node, tensor, dim)


def _element(tracer: Tracer, view: View) -> Symbol:
    name = tracer.capture(view.tensor).name
    loaded = load(name, dtype_of(view.tensor.dtype), *(i for i in view.indices if i is not None))
    for dtype in view.casts:
        loaded = ar.to(loaded, dtype)
    return Symbol(tracer, loaded)
