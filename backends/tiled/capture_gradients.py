"""Gradients of captured tensors and params where torch adds them up.

Non-goals: kernels, which add up those of the score by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.ir import DType, Op, const, param, sides
from attndsl.passes.differentiate import vjp

from ..dense.interpret import gated, sides_of
from ..dense.row_lookups import add_elements, add_rows, gradients_of_rows, rows_at
from .tile_expressions import work_dtype

if TYPE_CHECKING:
    from collections.abc import Collection

    from attndsl.ir import Node
    from attndsl.passes.differentiate import Derivative

    from ..base import Call, Wants
    from .tile_expressions import Tile

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
        products = [(item.product, item.factor) for item in derivative.products]
        params = [(param(item.name, DType.FLOAT), item.factor) for item in derivative.params]
        return tuple(term for term in (*loads, *products, *params) if self._is_wanted(term[0]))

    def of(self, root: Node | None) -> Terms:
        """The wanted derivatives of ``root``."""
        found = {} if root is None else vjp(root, _ONE)
        return tuple(term for term in found.items() if self._is_wanted(term[0]))

    def _is_wanted(self, leaf: Node) -> bool:
        if leaf.op is Op.PARAM:
            return str(leaf.value) in self._params
        names = [side.name for side in sides(leaf)] if leaf.op is Op.DOT else [str(leaf.value)]
        if leaf.op not in (Op.LOAD, Op.DOT):
            return False
        return any(name in self._tensors and self._tensors[name].numel() > 0 for name in names)

    def add(self, terms: Terms, seed: torch.Tensor, tile: Tile) -> None:
        """Add ``seed`` (batch, heads, rows, width or 1) times each derivative at its leaf."""
        for leaf, factor in terms:
            part = seed
            if factor is not _ONE:
                (value,) = tile.evaluate(factor)
                part = gated(seed, seed * value)
            if leaf.op is Op.PARAM:
                self._params[str(leaf.value)] += part.sum()
            elif leaf.op is Op.DOT:
                self._add_product(leaf, part, tile)
            else:
                self._add_at(leaf, part, tile)

    def add_line(
        self, term: tuple[Node, Node], names: Collection[str], sums: torch.Tensor, start: int
    ) -> bool:
        """Add ``sums`` (batch, heads, distances) at ``start``; return False for any other term.

        ``names`` are tensors of values by distance, as :mod:`.distance_lookups` makes them.
        """
        leaf, factor = term
        if leaf.value not in names or factor is not _ONE:
            return False
        others = {0, 1} - {("b", "h").index(str(arg.value)) for arg in leaf.args[:-1]}
        place = self._tensors[str(leaf.value)].narrow(-1, start, sums.shape[-1])
        place += sums.sum(sorted(others), dtype=place.dtype) if others else sums
        return True

    def _add_at(self, load: Node, part: torch.Tensor, tile: Tile) -> None:
        total = self._tensors[str(load.value)]
        if not load.args:
            total += part.sum()
            return
        view = tile.view(load.args, total)
        if view is not None:
            view += part.sum_to_size(view.shape)
            return
        indices = tile.evaluate(*load.args)
        add_elements(total, indices, part)

    def _add_product(self, item: Node, part: torch.Tensor, tile: Tile) -> None:
        both = sides_of(item, tile.scope)
        rows = [rows_at(tile.scope.tensors[name].to(part.dtype), indices) for name, indices in both]
        for (name, indices), found in zip(both, gradients_of_rows(part, *rows), strict=True):
            self.add_rows(name, indices, found)

    def add_rows(self, name: str, indices: tuple[torch.Tensor, ...], rows: torch.Tensor) -> None:
        """Add ``rows`` (four dims, and that of a row) to those at ``indices``, if they matter."""
        total = self._tensors.get(name)
        if total is not None and total.numel():
            add_rows(total, indices, rows)

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
