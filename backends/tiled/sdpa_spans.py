"""Spans of plain scores by torch's own attention for CPUs, which is faster than its parts.

torch adds a mask to scores. So a NaN of a dead pair would spread, and such spans are left to
:mod:`.cpu`.

The backward is torch's own too: given output and log-sum-exp of whole rows, it makes what a span
adds to their gradients.

Non-goals: scores that the program changes, weights of its own, dropout, gradients of captures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from attndsl.ir import SCORE, reads_score

from .sdpa import flash_attention, flash_gradients, is_spoilt
from .step_plan import SPAN
from .tile_expressions import work_dtype

if TYPE_CHECKING:
    from attndsl.ir import Node, Program

    from ..base import Backward, Call
    from .live_masks import LiveMasks
    from .span_scores import StepPlace
    from .step_plan import KeySpan, QueryStep

    Bias = tuple[torch.Tensor, torch.Tensor | None]

_KEPT = 16
"""Spans of a call whose bias is kept."""
_MOST_KEPT = 1 << 20
"""Numbers of such a one, at most."""


def is_plain(program: Program, call: Call) -> bool:
    """Return True if torch's own attention makes all that a span of the forward needs."""
    return (
        program.score is SCORE and program.weights is None and program.dropout is None
        and not _reads_score(program.mask) and call.q.device.type == "cpu"
        and call.q.shape[3] == call.v.shape[3]
    )  # fmt: skip


def wants_no_more(backward: Backward) -> bool:
    """Return True if only gradients of q, k and v are wanted, by nothing but the output's."""
    wants = backward.wanted
    return backward.grad_lse is None and not wants.tensors and not wants.params


@lru_cache(maxsize=256)
def _reads_score(mask: Node | None) -> bool:
    """Cached :func:`~attndsl.ir.reads_score`, which takes 4 us and more."""
    return reads_score(mask)


class Biases:
    """Biases that masks add to scores of spans, one for all spans with the same live pairs."""

    def __init__(self, call: Call, lives: LiveMasks) -> None:
        """Start without biases, for a call with these live pairs."""
        self._call, self._lives = call, lives
        self._kept: dict[object, Bias] = {}
        self._room = torch.empty(0)
        """Zeros, which biases that are not kept are written to one after the other."""
        self._written: list[torch.Tensor] = []
        """Parts of these that are no zeros."""

    def of(
        self, step: QueryStep, span: KeySpan, place: StepPlace
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Bias that the mask adds to a span's scores, (1 or matrices, 1, group * rows, width).

        Also the rows that have a live pair, bool (1 or matrices, group * rows, 1); None where all
        have. Both are good until the next ones are asked for.
        """
        if not span.partial:
            return None, None
        if span.full and span.partial[0][1] == span.columns[1]:
            return self._of_end(step, span, place)
        key = self._lives.key(step, span.columns, *span.partial)
        found = None if key is None else self._kept.get(key)
        if found is None:
            found = self._made(step, span, place, key is not None)
            self._keep(key, found)
        return found

    def _of_end(self, step: QueryStep, span: KeySpan, place: StepPlace) -> Bias:
        """Bias where the mask decides at the end alone: the end of one that is as long or longer.

        Spans of a causal mask are longer from step to step, and end alike.
        """
        key = self._lives.key(step, *span.partial)
        found = None if key is None else self._kept.get(key)
        if found is None or found[0].shape[-1] < span.width:
            found = self._made(step, span, place, key is not None, 0 if key is None else SPAN)
            self._keep(key, found)
        return found[0][..., -span.width :], None

    def _keep(self, key: object | None, found: Bias) -> None:
        fits = found[0].numel() <= _MOST_KEPT
        if key is not None and fits and (key in self._kept or len(self._kept) < _KEPT):
            self._kept[key] = found

    def _zeros(self, shape: tuple[int, ...], is_kept: bool) -> torch.Tensor:
        """New zeros, or room that was used before: see M61 in docs/measured.md."""
        dtype, device = work_dtype(self._call), self._call.q.device
        if is_kept:
            return torch.zeros(shape, dtype=dtype, device=device)
        for part in self._written:
            part.zero_()
        self._written.clear()
        size = math.prod(shape)
        if self._room.numel() < size:
            self._room = torch.zeros(size, dtype=dtype, device=device)
        return self._room[:size].view(shape)

    def _made(
        self, step: QueryStep, span: KeySpan, place: StepPlace, is_kept: bool, width: int = 0
    ) -> Bias:
        """The bias of a span, and of live keys before it up to a ``width`` that can be kept."""
        lives = [self._lives.of(step, columns) for columns in span.partial]
        batch, heads, rows = place.shape
        if all(live.shape[0] == live.shape[1] == 1 for live in lives):
            batch = heads = 1
        lines = rows * max(batch * heads, _members(place))
        more = max(0, width - span.width) if lines * width <= _MOST_KEPT else 0
        shape = (batch, heads, rows, more + span.width)
        bias = self._zeros(shape, is_kept)
        for columns, live in zip(span.partial, lives, strict=True):
            start = more + columns[0] - span.columns[0]
            part = bias[..., start : start + columns[1] - columns[0]]
            part.masked_fill_(~live, -torch.inf)
            if not is_kept:
                self._written.append(part)
        if span.full:
            return _by_matrices(bias, place), None
        some = bias.amax(-1, keepdim=True) == 0.0
        return _by_matrices(bias, place), _by_matrices(some, place).squeeze(1)


def _members(place: StepPlace) -> int:
    """Number of query heads of a step that have a key head in common."""
    number: int = place.matrices.stop - place.matrices.start
    return place.shape[0] * place.shape[1] // number


def _by_matrices(found: torch.Tensor, place: StepPlace) -> torch.Tensor:
    """(1 or matrices, 1, group * rows, width) of (1 or batch, 1 or heads, rows, width)."""
    number = place.matrices.stop - place.matrices.start
    rows = place.shape[2]
    if found.shape[0] == found.shape[1] == 1:
        found, number = found.expand(1, _members(place), rows, -1), 1
    return found.reshape(number, 1, -1, found.shape[-1])


class OfForward(NamedTuple):
    """Rows of a step: (matrices, group * rows, dim), (matrices, group * rows, 1) for lse."""

    grad_out: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    """Infinite for rows with no live pair."""


@dataclass(frozen=True, slots=True)
class PlainRows:
    """The rows of a step whose scores are plain."""

    call: Call
    step: QueryStep
    place: StepPlace
    biases: Biases
    bounded: bool
    """See :class:`~attndsl.ir.Program`: rows of k and v may be NaN where no pair is live."""

    def attend(
        self, span: KeySpan, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Output and log-sum-exp of a span, or None where torch may have spoiled them.

        Args:
            span: Of the keys.
            queries: (matrices, group * rows, dim).
            keys: (matrices, width, dim).
            values: The same.

        Returns:
            (matrices, group * rows, dim) and (matrices, group * rows, 1).
        """
        bias, live = self.biases.of(self.step, span, self.place)
        part, lse = flash_attention(
            queries.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1),
            attn_mask=bias, scale=self.call.scale,
        )  # fmt: skip
        part, lse = part.squeeze(1), lse.squeeze(1).unsqueeze(-1)
        if bias is not None and math.isnan(float(lse.sum())):
            return None
        if bias is not None and self.bounded and math.isnan(float(part.sum())):
            return None
        # Of rows without a live pair torch says 0.
        if live is not None:
            lse = torch.where(live, lse, -torch.inf)
        if is_spoilt(part, lse.squeeze(-1)):
            return None
        return part, lse

    def gradients(
        self, span: KeySpan, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
        of: OfForward,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:  # fmt: skip
        """Terms that a span adds to dQ, and its dK and dV; None where torch may have spoiled them.

        Args:
            span: Of the keys.
            queries: (matrices, group * rows, dim).
            keys: (matrices, width, dim).
            values: The same.
            of: What is known of the rows.

        Returns:
            Laid out as ``queries``, ``keys`` and ``values``.
        """
        bias, _ = self.biases.of(self.step, span, self.place)
        found = flash_gradients(
            of.grad_out.unsqueeze(1),
            (queries.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1)),
            (of.out.unsqueeze(1), of.lse.squeeze(-1).unsqueeze(1)),
            attn_mask=bias, scale=self.call.scale,
        )  # fmt: skip
        dq, dk, dv = (x.squeeze(1) for x in found)
        # The gradients of a dead pair are products with 0, which NaN and infinities spoil. Where dK
        # alone is spoilt, it is without torch's backward too.
        if bias is not None and math.isnan(float(dq.sum()) + float(dv.sum())):
            return None
        if bias is not None and self.bounded and math.isnan(float(dk.sum())):
            return None
        return dq, dk, dv
