"""Values of expressions on the pairs of a tile, in torch operations.

The CPU backend evaluates all that a program says on them. Other backends evaluate derivatives on
them, to add up gradients of captured tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from attndsl.foundation.caches import memoised
from attndsl.ir import Op, dependencies, toposort
from attndsl.passes.distance import is_distance
from attndsl.passes.index_bounds import reads_inside

from ..dense.interpret import RULES, LeafValues, scope_of

if TYPE_CHECKING:
    from attndsl.ir import Node

    from ..base import Call
    from .step_plan import QueryStep, Range


def work_dtype(call: Call) -> torch.dtype:
    """Dtype in which everything is computed and accumulated."""
    return torch.float64 if call.q.dtype is torch.float64 else torch.float32


class Expressions:
    """Evaluates expressions on the pairs of a tile.

    As :func:`~..dense.interpret.evaluate`, but where a lookup's indices are plain names of
    consecutive positions (``bias[b, h, q, kv]``) it takes a view in place of gathering element by
    element. What varies with rows alone, or with keys alone (``q // 1000``), is evaluated once for
    all tiles, and kept in the dtype of all else: that is memory proportional to the lengths.
    """

    def __init__(self, call: Call) -> None:
        self.nothing = torch.empty((1, 1, 1, 1), dtype=work_dtype(call), device=call.q.device)
        """A score for tiles of expressions that read none."""
        self._base = scope_of(call, self.nothing)
        self._step: QueryStep | None = None
        """The step of the last tile, and the values that its tiles share."""
        self._ranges: dict[str, Range] = {}
        self._variables: dict[str, torch.Tensor] = {}
        self._lines: dict[Node, torch.Tensor] = {}
        group = call.q.shape[1] // max(1, call.k.shape[1])
        self._starts: dict[str, int] = {"b": 0, "h": 0} | ({"hkv": 0} if group == 1 else {})
        for name, offset, index in (
            ("q", call.q_offset, call.q_index),
            ("kv", call.kv_offset, call.kv_index),
        ):
            if index is None and not isinstance(offset, torch.Tensor):
                self._starts[name] = offset
        self._lengths = {"b": call.q.shape[0], "h": call.q.shape[1], "hkv": call.q.shape[1],
                         "q": call.q.shape[2], "kv": call.k.shape[2]}  # fmt: skip

    def tile(self, step: QueryStep, columns: Range, score: torch.Tensor) -> Tile:
        """The tile of ``step`` at ``columns``, with ``score`` (batch, heads, rows, columns)."""
        base = self._base
        if step is not self._step:
            self._step = step
            self._ranges = {"b": step.batches, "h": step.heads, "hkv": step.heads, "q": step.rows}
            self._variables = {
                name: _narrow(base.variables[name], _DIMS[name], place)
                for name, place in self._ranges.items()
            }
        kv = _narrow(base.variables["kv"], _DIMS["kv"], columns)
        variables = {**self._variables, "kv": kv}
        ranges = {**self._ranges, "kv": columns}
        scope = LeafValues(variables, base.sizes, base.params, base.tensors, score)
        return Tile(self, scope, self._logical(ranges), ranges)

    def _logical(self, ranges: dict[str, Range]) -> dict[str, Range]:
        return {
            name: (start + ranges[name][0], start + ranges[name][1])
            for name, start in self._starts.items()
        }

    def line(self, node: Node, ranges: dict[str, Range]) -> torch.Tensor:
        """The part within ``ranges`` of a value that varies with rows alone, or with keys alone."""
        found = self._lines.get(node)
        if found is None:
            every = {name: (0, length) for name, length in self._lengths.items()}
            whole = Tile(self, self._base, self._logical(every), every)
            found = self._lines[node] = whole.computed(tuple(toposort(node)), frozenset())[node]
        for name, dim in _DIMS.items():
            if name != "hkv" and found.shape[dim] > 1:
                found = _narrow(found, dim, ranges[name])
        return found


class _Order(NamedTuple):
    """Nodes to evaluate for some expressions, in order."""

    nodes: tuple[Node, ...]
    """Operands first, without those that lines alone are made of."""
    lines: frozenset[Node]
    """Operations among the nodes that vary with rows alone, or with keys alone."""


@memoised("orders of operations on tiles", 256)
def _order_of(roots: tuple[Node, ...]) -> _Order:
    varies, every = dependencies(*roots), list(toposort(*roots))
    needed, lines = set(roots), set()
    for item in reversed(every):
        if item not in needed:
            continue
        positions = varies[item] & {"q", "kv", "score"}
        if item.args and len(positions) == 1 and positions != {"score"}:
            lines.add(item)
        else:
            needed.update(item.args)
    return _Order(tuple(item for item in every if item in needed), frozenset(lines))


def _narrow(tensor: torch.Tensor, dim: int, place: Range) -> torch.Tensor:
    return tensor.narrow(dim, place[0], place[1] - place[0])


_DIMS = {"b": 0, "h": 1, "hkv": 1, "q": 2, "kv": 3}


@dataclass(frozen=True, slots=True)
class Tile:
    """The pairs of one span, or of a part of it."""

    expressions: Expressions
    scope: LeafValues
    ranges: dict[str, Range]
    """Logical positions of the names that run over consecutive ones."""
    places: dict[str, Range]
    """Ranges of the pairs, within those of the call."""

    def evaluate(self, *roots: Node) -> tuple[torch.Tensor, ...]:
        """Values of ``roots``, each of four dims of full size or 1; not to be written to."""
        values = self.computed(*_order_of(roots))
        return tuple(values[root] for root in roots)

    def computed(self, nodes: tuple[Node, ...], lines: frozenset[Node]) -> dict[Node, torch.Tensor]:
        """Values of ``nodes``, operands first; those of ``lines`` are parts of the call's."""
        values: dict[Node, torch.Tensor] = {}
        for item in nodes:
            if item in lines:
                values[item] = self.expressions.line(item, self.places)
            elif item.op is Op.LOAD and item.args:
                values[item] = self._load(item, values)
            else:
                args = tuple(values[arg] for arg in item.args)
                values[item] = RULES[item.op](item, args, self.scope)
        return values

    def view(self, indices: tuple[Node, ...], tensor: torch.Tensor) -> torch.Tensor | None:
        """View of ``tensor`` that has what is at ``indices``, or None where there is none.

        It has the four dims of pairs in place of the indices', and the further ones of ``tensor``.
        """
        names = [str(arg.value) if arg.op is Op.VAR else "" for arg in indices]
        if len({_DIMS.get(name) for name in names}) < len(names):
            return None
        spans = [self.ranges.get(name, (-1, -1)) for name in names]
        if not reads_inside(spans, tensor.shape[: len(names)]):
            return None
        for dim, (start, stop) in enumerate(spans):
            tensor = tensor.narrow(dim, start, stop - start)
        order = sorted(range(len(names)), key=lambda dim: _DIMS[names[dim]])
        tensor = tensor.permute(*order, *range(len(names), tensor.dim()))
        present = {_DIMS[name] for name in names}
        for dim in range(4):
            if dim not in present:
                tensor = tensor.unsqueeze(dim)
        return tensor

    def _diagonals(
        self, load: Node, index: torch.Tensor, tensor: torch.Tensor
    ) -> torch.Tensor | None:
        """Elements by distance, each row a slice of the tensor; None where they are none.

        ``index`` is the load's last one. Slices take a tenth of the time of elements.
        """
        *others, distance = load.args
        rows, columns = index.shape[2:]
        if tensor.device.type != "cpu" or index.numel() == 0 or not is_distance(distance):
            return None
        first, number = int(index[0, 0, 0, 0]) - (columns - 1), rows + columns - 1
        found = self.view(tuple(others), tensor)
        if found is None or found.shape[2:4] != (1, 1) or not {"q", "kv"} <= self.ranges.keys():
            return None
        if not reads_inside([(first, first + number)], tensor.shape[-1:]):
            return None
        line = found[:, :, 0, 0].narrow(-1, first, number).flip(-1)
        return line.unfold(-1, columns, 1).flip(-2)

    def _load(self, load: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor:
        tensor = self.scope.tensors[str(load.value)]
        found = self.view(load.args, tensor)
        if found is None:
            args = tuple(values[arg] for arg in load.args)
            found = self._diagonals(load, args[-1], tensor)
            if found is None:
                return RULES[Op.LOAD](load, args, self.scope)
        kinds = {"bool": torch.bool, "int": torch.int64, "float": self.scope.dtype}
        return found.to(kinds[load.dtype.value])
