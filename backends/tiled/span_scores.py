"""Scores of the CPU backend's spans, and where a step lies in tensors laid out as matrices.

Non-goals: what is made of scores: outputs (:mod:`.cpu`) and gradients (:mod:`.backward_steps`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from attndsl.ir import SCORE

from ..dense import pairs as dense
from ..dense.draws import heads_of, rows_of
from ..dense.philox import keep_factor, kept_at
from ..memory_order import rows_contiguous
from .live_masks import LiveMasks
from .step_plan import BLOCK_M, SPAN
from .tile_expressions import Expressions, work_dtype

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.ir import Program

    from ..base import Call
    from .step_plan import KeySpan, QueryStep, Range
    from .tile_expressions import Tile

    Live = Callable[[], torch.Tensor]

FINAL, RAW = range(2)
"""Buffers of scores; :class:`Scorer` fills them."""


@dataclass(frozen=True, slots=True)
class StepPlace:
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


def place_of(step: QueryStep, call: Call) -> StepPlace:
    """Place of ``step`` in tensors laid out as matrices."""
    kv_heads = call.k.shape[1]
    group = call.q.shape[1] // kv_heads
    (b, b_stop), (h, h_stop) = step.batches, step.heads
    first = b * kv_heads + h // group
    last = (b_stop - 1) * kv_heads + (h_stop - 1) // group + 1
    within = h_stop - h < group
    members = slice(h % group, h % group + h_stop - h) if within else slice(0, group)
    return StepPlace(
        slice(first, last),
        members,
        slice(*step.rows),
        (b_stop - b, h_stop - h, step.rows[1] - step.rows[0]),
    )


def matrices(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """(batch, heads, length, width) as contiguous (batch * kv_heads, group, length, width)."""
    batch, heads, length, width = tensor.shape
    kv_heads = call.k.shape[1]
    shape = (batch * kv_heads, heads // max(1, kv_heads), length, width)
    return tensor.to(work_dtype(call)).contiguous().view(shape)


def keys_of(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """Keys or values as (batch * kv_heads, length, width).

    They are copied to be contiguous where several tile rows read them. One row of a long cache
    reads them once, which is what a copy takes.
    """
    found = rows_contiguous(tensor, work_dtype(call))
    if call.q.shape[2] > BLOCK_M:
        found = found.contiguous()
    return found.flatten(0, 1)


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

    def live(self, place: StepPlace) -> torch.Tensor:
        """The live pairs, bool (matrices, group * rows, width)."""
        found = torch.ones(self.final.shape, dtype=torch.bool, device=self.final.device)
        fill(place.pairs(found), self, False)
        return found

    def live_to_part(self, program: Program, place: StepPlace) -> Live | None:
        """The function that gives them, if :func:`live_product` is to look at them."""
        return partial(self.live, place) if program.bounded and self.partial else None


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
        self._raw_buffer = RAW if keep_raw and not self._plain else FINAL
        self.expressions = Expressions(call)
        self.live_masks = LiveMasks(program.mask, call, self.expressions)

    def span(
        self,
        step: QueryStep,
        place: StepPlace,
        span: KeySpan,
        queries: torch.Tensor,
        keys: torch.Tensor,
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
                score = tile.scope.score[..., slice(*within)]
                partial.append((within, self.live_masks.of(step, columns, score)))
        final = raw
        if not self._plain:
            (score,) = tile.evaluate(self._program.score)
            final = self._buffers.take(FINAL, place, span.width)
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


def live_product(
    weights: torch.Tensor, rows: torch.Tensor, live: Live | None, by_key: bool = False
) -> torch.Tensor:
    """``weights @ rows``; dead pairs add nothing to it, whatever their rows have.

    On CPUs live pairs are looked at where the plain product is not finite; elsewhere to look would
    wait for the device.

    Args:
        weights: (matrices, n, m), 0 at dead pairs.
        rows: (matrices, m, dim).
        live: Gives the live pairs (matrices, n, m); None for the plain product.
        by_key: Whether it gives (matrices, m, n).
    """
    found = torch.bmm(weights, rows)
    if live is None or (found.device.type == "cpu" and bool(found.isfinite().all())):
        return found
    return dense.live_product(weights, rows, live().mT if by_key else live())


def add_product(
    total: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, live: Live | None,
    scale: float = 1.0, by_key: bool = False,
) -> None:  # fmt: skip
    """Add ``scale`` times :func:`live_product` to ``total``."""
    if live is None:
        total.baddbmm_(weights, rows, alpha=scale)
    else:
        total.add_(live_product(weights, rows, live, by_key), alpha=scale)


class Buffers:
    """Room for the pairs of one span, used again for every span: fresh pages cost more than sums.

    Args:
        steps: What there must be room for.
        number: How many buffers.
        like: Of the dtype and device.
        plain: Whether spans come in parts, which are rarely needed: room that nobody writes to
            takes no memory.
    """

    def __init__(
        self, steps: list[QueryStep], number: int, like: torch.Tensor, plain: bool = False
    ) -> None:
        size = max((_most_pairs(step, plain) for step in steps), default=0)
        self._flat = like.new_empty((number, size))

    def take(self, number: int, place: StepPlace, width: int) -> torch.Tensor:
        """Buffer ``number`` as (matrices, group * rows, width); what it held is lost."""
        count = place.matrices.stop - place.matrices.start
        size = place.shape[0] * place.shape[1] * place.shape[2] * width
        return self._flat[number, :size].view(count, -1, width)


def _most_pairs(step: QueryStep, plain: bool) -> int:
    heads = (step.batches[1] - step.batches[0]) * (step.heads[1] - step.heads[0])
    widest = max(span.width for span in step.spans)
    return heads * (step.rows[1] - step.rows[0]) * (min(widest, SPAN) if plain else widest)


def dropout_factor(p: torch.Tensor, step: QueryStep, columns: Range, call: Call) -> torch.Tensor:
    """Factor of each weight that dropout with probability ``p`` gives."""
    numbers = heads_of(call, step.batches, step.heads)
    rows, keys = rows_of(call, "q", step.rows), rows_of(call, "kv", columns)
    return keep_factor(kept_at(call.seed, p, numbers, rows, keys), p)


def may_be_subnormal(program: Program, x: torch.Tensor) -> bool:
    """Return True if weights may be subnormal, which makes products on CPUs many times slower.

    Those of plain scores hardly are. This depends on nothing but the program, so that parts of a
    call have the bits of the whole.
    """
    return program.score is not SCORE and x.device.type == "cpu"


def least_power(x: torch.Tensor) -> float:
    """Weights of smaller powers are of no account. Products of all others with 1e-7 are normal."""
    return 0.8 * math.log(torch.finfo(x.dtype).tiny)


def exp_(program: Program, powers: torch.Tensor) -> torch.Tensor:
    """In place, the weights of ``powers``, which are about 0 at most. NaN stays NaN.

    Weights of no account are 0. Their powers would make the exponential slow too: see M45 in
    docs/measured.md.
    """
    if not may_be_subnormal(program, powers):
        return powers.exp_()
    least = least_power(powers)
    return torch.threshold_(powers.clamp_min_(least - 1.0).exp_(), math.exp(least), 0.0)
