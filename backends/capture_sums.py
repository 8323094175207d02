"""Gradients of captured tensors and params where torch adds them up.

Non-goals: kernels, which add up those of the score by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.ir import DType, Op, const, param
from attndsl.passes.differentiate import vjp

from .cpu_tiles import work_dtype
from .interpret import clamped_indices, gated

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.passes.differentiate import Derivative

    from .base import Call, Wants
    from .cpu_tiles import Tile

    # Leaves (LOAD, PARAM) of an expression, and its derivatives by them.
    Terms = tuple[tuple[Node, Node], ...]

_ONE = const(1.0)
_LARGE = 1 << 20
"""Elements from which a captured tensor's gradient is added up in the dtype of the work: few pairs
then meet in one element, and fp64 would cost memory that matters."""


class CaptureSums:
    """Gradients of captured tensors and params, added up tile by tile in a fixed order."""

    def __init__(self, call: Call, wants: Wants) -> None:
        """Nothing has been added to the gradients that ``wants`` names."""
        self._call = call
        self._work = work_dtype(call)
        self._tensors = {}
        for name in sorted(wants.tensors):
            like = call.tensors[name]
            dtype = self._work if like.numel() >= _LARGE else torch.float64
            self._tensors[name] = torch.zeros(like.shape, dtype=dtype, device=call.q.device)
        self._params = {
            name: torch.zeros((), dtype=torch.float64, device=call.q.device)
            for name in sorted(wants.params)
        }

    def of_score(self, derivative: Derivative) -> Terms:
        """The wanted derivatives of the final score."""
        loads = [(item.load, item.factor) for item in derivative.tensors]
        params = [(param(item.name, DType.FLOAT), item.factor) for item in derivative.params]
        return tuple(term for term in (*loads, *params) if self._is_wanted(term[0]))

    def of(self, root: Node | None) -> Terms:
        """The wanted derivatives of ``root``."""
        found = {} if root is None else vjp(root, _ONE)
        return tuple(term for term in found.items() if self._is_wanted(term[0]))

    def _is_wanted(self, leaf: Node) -> bool:
        if leaf.op is Op.PARAM:
            return str(leaf.value) in self._params
        if leaf.op is not Op.LOAD or str(leaf.value) not in self._tensors:
            return False
        return self._tensors[str(leaf.value)].numel() > 0

    def add(self, terms: Terms, seed: torch.Tensor, tile: Tile) -> None:
        """Add ``seed`` (batch, heads, rows, width or 1) times each derivative at its leaf."""
        for leaf, factor in terms:
            part = seed
            if factor is not _ONE:
                (value,) = tile.evaluate(factor)
                part = gated(seed, seed * value)
            if leaf.op is Op.PARAM:
                self._params[str(leaf.value)] += part.sum()
            else:
                self._add_at(leaf, part, tile)

    def _add_at(self, load: Node, part: torch.Tensor, tile: Tile) -> None:
        total = self._tensors[str(load.value)]
        if not load.args:
            total += part.sum()
            return
        view = tile.view(load, total)
        if view is not None:
            view += part.sum_to_size(view.shape)
            return
        indices = tile.evaluate(*load.args)
        shape = torch.broadcast_tensors(*indices)[0].shape  # type: ignore[no-untyped-call]
        flat = torch.zeros((), dtype=torch.int64, device=total.device)
        for index, size in zip(clamped_indices(indices, total), total.shape, strict=True):
            flat = flat * size + index
        flat = flat.expand(shape).reshape(-1)
        values = part.sum_to_size(shape).reshape(-1).to(total.dtype)
        # In a fixed order, for which CPUs and GPUs have different functions: with one dim
        # scatter_add_ adds one after the other there, and index_put_ sorts here.
        if total.device.type == "cuda":
            total.view(-1).index_put_((flat,), values, accumulate=True)
        else:
            total.view(-1).scatter_add_(0, flat, values)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, in their dtypes."""
        return {n: x.to(self._call.tensors[n].dtype) for n, x in self._tensors.items()}

    def params(self) -> dict[str, torch.Tensor]:
        """By name, in the dtypes of those that came as tensors."""
        found = {}
        for name, total in self._params.items():
            value = self._call.params[name]
            found[name] = total.to(value.dtype if isinstance(value, torch.Tensor) else self._work)
        return found
