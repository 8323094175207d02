"""Scores of the CPU backend's spans.

Non-goals: what is made of scores: outputs (:mod:`.forward_steps`) and gradients
(:mod:`.backward_steps`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attndsl.ir import SCORE

from ..dense import row_blocks as dense
from ..dense.dropout_counters import heads_of, rows_of
from ..dense.philox import keep_factor, kept_at
from .live_masks import LiveMasks
from .matrices import keys_of, matrices
from .step_plan import SPAN
from .tile_expressions import Expressions

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.ir import Program

    from ..base import Call
    from .matrices import StepPlace
    from .step_plan import KeySpan, QueryStep, Range
    from .tile_expressions import Tile

    Live = Callable[[], torch.Tensor]

_FINAL, _RAW = range(2)
"""Rooms of scores; the last one is for what is made of them."""


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of a span's pairs: (matrices, group * rows, width)."""

    place: StepPlace
    raw: torch.Tensor
    final: torch.Tensor
    """-inf at dead pairs. The same tensor as ``raw`` where that need not be kept."""
    tile: Tile
    """Its score is ``raw``."""
    partial: tuple[tuple[Range, torch.Tensor], ...]
    """Columns within the span, and which of their pairs are live; those of others all are."""
    bounded: bool
    """See :class:`~attndsl.ir.Program`."""

    def fill(self, pairs: torch.Tensor, value: float) -> None:
        """Write ``value`` over the dead pairs of ``pairs``, laid out as the scores."""
        pairs = self.place.pairs(pairs)
        other = pairs.new_full((), value)
        for (start, stop), live in self.partial:
            part = pairs[..., start:stop]
            # Half the time of masked_fill_, and not fooled by NaN as a product would be.
            torch.where(live, part, other, out=part)

    @property
    def live(self) -> Live | None:
        """Give the live pairs, laid out as the scores, where :func:`live_product` has to look."""
        return self._live if self.bounded and self.partial else None

    def _live(self) -> torch.Tensor:
        found = torch.ones(self.final.shape, dtype=torch.bool, device=self.final.device)
        self.fill(found, False)
        return found


class Scorer:
    """Makes the scores of a call's spans.

    Room for the pairs of one span is used again for every span: fresh pages cost more than sums.

    Args:
        program: What the scores are.
        call: Its arguments.
        steps: What there must be room for.
        plain: Whether spans come in parts, which are rarely needed: room that nobody writes to
            takes no memory.
        keep_raw: Whether raw scores are needed beside the final ones.

    Attributes:
        q: See :func:`.matrices.matrices`.
        k: See :func:`.matrices.keys_of`.
        v: The same.
        expressions: Those of the call.
        live_masks: The same.
    """

    def __init__(
        self, program: Program, call: Call, steps: list[QueryStep], plain: bool, keep_raw: bool
    ) -> None:
        self._program = program
        self._call = call
        self.q = matrices(call.q, call)
        self.k, self.v = keys_of(call.k, call), keys_of(call.v, call)
        size = max((_most_pairs(step, plain) for step in steps), default=0)
        self._room = self.q.new_empty((3 if keep_raw else 2, size))
        self._is_raw = program.score is SCORE
        self._raw = _RAW if keep_raw and not self._is_raw else _FINAL
        self.expressions = Expressions(call)
        self.live_masks = LiveMasks(program.mask, call, self.expressions)

    def span(self, place: StepPlace, span: KeySpan, queries: torch.Tensor) -> Scored:
        """Scores of queries (matrices, group * rows, dim) by the keys of a span."""
        raw = self._take(self._raw, place, span.width)
        keys = self.k[place.matrices, slice(*span.columns)]
        torch.baddbmm(raw, queries, keys.mT, beta=0, alpha=self._call.scale, out=raw)
        tile = self.expressions.tile(place.step, span.columns, place.pairs(raw))
        partial = []
        if self._program.mask is not None:
            for columns in span.partial:
                start = columns[0] - span.columns[0]
                within = (start, start + columns[1] - columns[0])
                score = tile.scope.score[..., slice(*within)]
                partial.append((within, self.live_masks.of(place.step, columns, score)))
        final = raw
        if not self._is_raw:
            (score,) = tile.evaluate(self._program.score)
            final = self._take(_FINAL, place, span.width)
            place.pairs(final).copy_(score)
        found = Scored(place, raw, final, tile, tuple(partial), self._program.bounded)
        found.fill(final, -torch.inf)
        return found

    def room(self, place: StepPlace, width: int) -> torch.Tensor:
        """Room beside scores, (matrices, group * rows, width); what it held is lost."""
        return self._take(-1, place, width)

    def _take(self, number: int, place: StepPlace, width: int) -> torch.Tensor:
        count = place.matrices.stop - place.matrices.start
        return self._room[number, : math.prod(place.shape) * width].view(count, -1, width)

    def drop(self, scored: Scored, span: KeySpan) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Probability of dropout, and the factor of each weight; None without dropout."""
        if self._program.dropout is None:
            return None
        (p,) = scored.tile.evaluate(self._program.dropout)
        call, step = self._call, scored.place.step
        numbers = heads_of(call, step.batches, step.heads)
        rows, keys = rows_of(call, "q", step.rows), rows_of(call, "kv", span.columns)
        return p, keep_factor(kept_at(call.seed, p, numbers, rows, keys), p)


def _most_pairs(step: QueryStep, plain: bool) -> int:
    heads = (step.batches[1] - step.batches[0]) * (step.heads[1] - step.heads[0])
    widest = max(span.width for span in step.spans)
    return heads * (step.rows[1] - step.rows[0]) * (min(widest, SPAN) if plain else widest)


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
    docs/dev/measured.md.
    """
    if not may_be_subnormal(program, powers):
        return powers.exp_()
    least = least_power(powers)
    return torch.threshold_(powers.clamp_min_(least - 1.0).exp_(), math.exp(least), 0.0)
