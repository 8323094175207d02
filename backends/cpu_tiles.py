"""What the CPU backend's two directions share: its steps, its operands, expressions on a tile.

A *step* is one tile row of queries for a box of heads; its *spans* are slices of consecutive keys
that cover every tile of that row with a live pair. One matrix product serves a whole span of all
the heads of a step, so that Python's and torch's cost a call is spread over many pairs, and the
scores of a step at a time are what fits into a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attndsl.ir import SCORE, Op, toposort
from attndsl.passes.inside import reads_inside

from .draws import heads_of, rows_of
from .interpret import RULES, Scope, scope_of
from .philox import keep_factor, kept_at

if TYPE_CHECKING:
    from attndsl.ir import Node, Program

    from .base import Call


Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Span:
    """Keys ``columns[0] <= row < columns[1]``; ``partial`` are those where the mask decides."""

    columns: Range
    partial: tuple[Range, ...]

    @property
    def width(self) -> int:
        """Number of keys."""
        return self.columns[1] - self.columns[0]

    @property
    def full(self) -> bool:
        """Whether some keys are live for all rows of the step."""
        return sum(stop - start for start, stop in self.partial) < self.width


@dataclass(frozen=True, slots=True)
class Step:
    """Query rows of a box of heads, and the spans of keys that they meet."""

    batches: Range
    heads: Range
    """Query heads: all of them if there are several batches; else whole groups, or part of one."""
    rows: Range
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """A step's part of tensors laid out as matrices: (batch * kv_heads, group, length, width)."""

    matrices: slice
    members: slice
    rows: slice
    shape: tuple[int, int, int]
    """Batch entries, query heads and rows of the step."""

    def queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """(matrices, group * rows, width) of a tensor (matrices, group, length, width)."""
        part = tensor[self.matrices, self.members, self.rows]
        return part.flatten(1, 2)

    def store(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``value``, laid out as :meth:`queries` gives it."""
        part = tensor[self.matrices, self.members, self.rows]
        part.copy_(value.reshape(part.shape))

    def pairs(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view (batch, heads, rows, width) of contiguous (matrices, group * rows, width)."""
        return tensor.view(*self.shape, tensor.shape[-1])


def place_of(step: Step, call: Call) -> Place:
    """Where ``step`` lies."""
    kv_heads = call.k.shape[1]
    group = call.q.shape[1] // kv_heads
    (b, b_stop), (h, h_stop) = step.batches, step.heads
    first = b * kv_heads + h // group
    last = (b_stop - 1) * kv_heads + (h_stop - 1) // group + 1
    within = h_stop - h < group
    members = slice(h % group, h % group + h_stop - h) if within else slice(0, group)
    return Place(
        slice(first, last),
        members,
        slice(*step.rows),
        (b_stop - b, h_stop - h, step.rows[1] - step.rows[0]),
    )


def work_dtype(call: Call) -> torch.dtype:
    """What everything is computed and accumulated in."""
    return torch.float64 if call.q.dtype is torch.float64 else torch.float32


def matrices(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """(batch, heads, length, width) as contiguous (batch * kv_heads, group, length, width)."""
    batch, heads, length, width = tensor.shape
    kv_heads = call.k.shape[1]
    shape = (batch * kv_heads, heads // max(1, kv_heads), length, width)
    return tensor.to(work_dtype(call)).contiguous().view(shape)


def keys_of(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """Keys or values as contiguous (batch * kv_heads, length, width)."""
    return tensor.to(work_dtype(call)).contiguous().flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of a span's pairs: (matrices, group * rows, width)."""

    raw: torch.Tensor
    final: torch.Tensor
    """-inf at dead pairs. The same tensor as ``raw`` where that need not be kept."""
    tile: Tile
    """Its score is ``raw``."""
    partial: tuple[tuple[Range, torch.Tensor], ...]
    """Columns within the span, and which of their pairs are live; those of others all are."""


class Scorer:
    """Makes the scores of a call's spans.

    Args:
        program: What the scores are.
        call: Its arguments.
        buffers: The first one holds final scores; the second one raw scores, where they are kept.
        keep_raw: Whether raw scores are needed beside the final ones.
    """

    def __init__(self, program: Program, call: Call, buffers: Buffers, keep_raw: bool) -> None:
        self._program = program
        self._scale = call.scale
        self._buffers = buffers
        self._plain = program.score is SCORE
        self._raw_buffer = 1 if keep_raw and not self._plain else 0
        self.expressions = Expressions(call)

    def span(
        self, step: Step, place: Place, span: Span, queries: torch.Tensor, keys: torch.Tensor
    ) -> Scored:
        """Scores of queries (matrices, group * rows, dim) by keys (matrices, width, dim)."""
        raw = self._buffers.take(self._raw_buffer, place, span.width)
        torch.baddbmm(raw, queries, keys.mT, beta=0, alpha=self._scale, out=raw)
        tile = self.expressions.tile(step, span.columns, place.pairs(raw))
        partial = []
        if self._program.mask is not None:
            for columns in span.partial:
                start = columns[0] - span.columns[0]
                within = (start, start + columns[1] - columns[0])
                part = self.expressions.tile(step, columns, tile.scope.score[..., slice(*within)])
                (live,) = part.evaluate(self._program.mask)
                partial.append((within, live))
        final = raw
        if not self._plain:
            (score,) = tile.evaluate(self._program.score)
            final = self._buffers.take(0, place, span.width)
            place.pairs(final).copy_(score)
        found = Scored(raw, final, tile, tuple(partial))
        fill(place.pairs(final), found, -torch.inf)
        return found


def fill(pairs: torch.Tensor, scored: Scored, value: float) -> torch.Tensor:
    """Write ``value`` over the dead pairs of ``pairs`` (batch, heads, rows, width)."""
    other = pairs.new_full((), value)
    for (start, stop), live in scored.partial:
        part = pairs[..., start:stop]
        # Half the time of masked_fill_, and not fooled by NaN as a product would be.
        torch.where(live, part, other, out=part)
    return pairs


class Buffers:
    """Room for the pairs of one span, used again for every span: fresh pages cost more than sums.

    Args:
        steps: What there must be room for.
        number: How many buffers.
        like: Of the dtype and device.
    """

    def __init__(self, steps: list[Step], number: int, like: torch.Tensor) -> None:
        size = max((_most_pairs(step) for step in steps), default=0)
        self._flat = like.new_empty((number, size))

    def take(self, number: int, place: Place, width: int) -> torch.Tensor:
        """Buffer ``number`` as (matrices, group * rows, width); what it held is lost."""
        count = place.matrices.stop - place.matrices.start
        size = place.shape[0] * place.shape[1] * place.shape[2] * width
        return self._flat[number, :size].view(count, -1, width)


def _most_pairs(step: Step) -> int:
    heads = (step.batches[1] - step.batches[0]) * (step.heads[1] - step.heads[0])
    return heads * (step.rows[1] - step.rows[0]) * max(span.width for span in step.spans)


class Expressions:
    """Evaluates expressions on the pairs of a tile.

    As :func:`~.interpret.evaluate`, but where a lookup's indices are plain names of consecutive
    positions (``bias[b, h, q, kv]``) it takes a view in place of gathering element by element.
    """

    def __init__(self, call: Call) -> None:
        nothing = torch.empty((1, 1, 1, 1), dtype=work_dtype(call), device=call.q.device)
        self._base = scope_of(call, nothing)
        self._step: Step | None = None
        """The step of the last tile, and what its tiles share."""
        self._ranges: dict[str, Range] = {}
        self._variables: dict[str, torch.Tensor] = {}
        self._orders: dict[tuple[Node, ...], list[Node]] = {}
        group = call.q.shape[1] // max(1, call.k.shape[1])
        self._starts: dict[str, int] = {"b": 0, "h": 0} | ({"hkv": 0} if group == 1 else {})
        for name, offset, index in (
            ("q", call.q_offset, call.q_index),
            ("kv", call.kv_offset, call.kv_index),
        ):
            if index is None and not isinstance(offset, torch.Tensor):
                self._starts[name] = offset

    def tile(self, step: Step, columns: Range, score: torch.Tensor) -> Tile:
        """The tile of ``step`` at ``columns``, with ``score`` (batch, heads, rows, columns)."""
        base = self._base
        if step is not self._step:
            self._step = step
            self._ranges = {
                "b": step.batches, "h": step.heads, "hkv": step.heads, "q": step.rows,
            }  # fmt: skip
            self._variables = {
                name: _narrow(base.variables[name], _DIMS[name], place)
                for name, place in self._ranges.items()
            }
        kv = _narrow(base.variables["kv"], _DIMS["kv"], columns)
        variables = {**self._variables, "kv": kv}
        ranges = {**self._ranges, "kv": columns}
        scope = Scope(variables, base.sizes, base.params, base.tensors, score)
        logical = {
            name: (start + ranges[name][0], start + ranges[name][1])
            for name, start in self._starts.items()
        }
        return Tile(self, scope, logical)

    def order(self, roots: tuple[Node, ...]) -> list[Node]:
        """The nodes below ``roots``, operands first."""
        found = self._orders.get(roots)
        if found is None:
            found = self._orders[roots] = list(toposort(*roots))
        return found


def _narrow(tensor: torch.Tensor, dim: int, place: Range) -> torch.Tensor:
    return tensor.narrow(dim, place[0], place[1] - place[0])


_DIMS = {"b": 0, "h": 1, "hkv": 1, "q": 2, "kv": 3}


@dataclass(frozen=True, slots=True)
class Tile:
    """The pairs of one span, or of a part of it."""

    expressions: Expressions
    scope: Scope
    ranges: dict[str, Range]
    """Logical positions of the names that run over consecutive ones."""

    def evaluate(self, *roots: Node) -> tuple[torch.Tensor, ...]:
        """Values of ``roots``, each of four dims of full size or 1; not to be written to."""
        values: dict[Node, torch.Tensor] = {}
        for item in self.expressions.order(roots):
            if item.op is Op.LOAD and item.args:
                values[item] = self._load(item, values)
            else:
                args = tuple(values[arg] for arg in item.args)
                values[item] = RULES[item.op](item, args, self.scope)
        return tuple(values[root] for root in roots)

    def view(self, load: Node, tensor: torch.Tensor) -> torch.Tensor | None:
        """What ``load`` looks up in ``tensor``, as a view of four dims; None if there is none."""
        names = [str(arg.value) if arg.op is Op.VAR else "" for arg in load.args]
        if len({_DIMS.get(name) for name in names}) < len(names):
            return None
        spans = [self.ranges.get(name, (-1, -1)) for name in names]
        if not reads_inside(spans, tensor.shape):
            return None
        for dim, (start, stop) in enumerate(spans):
            tensor = tensor.narrow(dim, start, stop - start)
        order = sorted(range(len(names)), key=lambda dim: _DIMS[names[dim]])
        tensor = tensor.permute(order)
        present = {_DIMS[name] for name in names}
        for dim in range(4):
            if dim not in present:
                tensor = tensor.unsqueeze(dim)
        return tensor

    def _load(self, load: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor:
        tensor = self.scope.tensors[str(load.value)]
        found = self.view(load, tensor)
        if found is None:
            args = tuple(values[arg] for arg in load.args)
            return RULES[Op.LOAD](load, args, self.scope)
        kinds = {"bool": torch.bool, "int": torch.int64, "float": self.scope.dtype}
        return found.to(kinds[load.dtype.value])


def dropout_factor(p: torch.Tensor, step: Step, columns: Range, call: Call) -> torch.Tensor:
    """Factor of each weight that dropout with probability ``p`` gives."""
    numbers = heads_of(call, step.batches, step.heads)
    rows, keys = rows_of(call, "q", step.rows), rows_of(call, "kv", columns)
    return keep_factor(kept_at(call.seed, p, numbers, rows, keys), p)
