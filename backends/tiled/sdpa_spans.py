"""Spans of plain scores by torch's own attention for CPUs, which is faster than its parts.

torch adds a mask to scores. So a NaN of a dead pair would spread, and such spans are left to
:mod:`.forward_steps` and :mod:`.backward_steps`.

The backward is torch's own too: given output and log-sum-exp of whole rows, it makes what a span
adds to their gradients.

Non-goals: scores that the program changes, weights of its own, dropout, gradients of captures.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from ..log_sum import LogSumParts
from .sdpa import flash_attention, flash_gradients, is_nan, is_spoilt
from .step_plan import SPAN

if TYPE_CHECKING:
    from ..base import Call
    from .live_masks import LiveMasks
    from .matrices import StepPlace
    from .span_scores import Scorer
    from .step_plan import KeySpan

    Bias = tuple[torch.Tensor, torch.Tensor | None]

_KEPT = 16
"""Spans of a call whose bias is kept."""
_MOST_KEPT = 1 << 20
"""Numbers of such a one, at most."""


class SpanAttention:
    """Makes the spans of a call of plain scores.

    Args:
        scorer: Gives keys, values and live pairs.
        call: The call.
        bounded: See :class:`~attndsl.ir.Program`: rows of k and v may be NaN where no pair is live.
    """

    def __init__(self, scorer: Scorer, call: Call, bounded: bool) -> None:
        self._k, self._v = scorer.k.unsqueeze(1), scorer.v.unsqueeze(1)
        self._scale, self._bounded = call.scale, bounded
        self._biases = Biases(scorer.live_masks, scorer.q)

    def forward(
        self, place: StepPlace, span: KeySpan, queries: torch.Tensor
    ) -> tuple[torch.Tensor, LogSumParts] | None:
        """Output and log-sum-exp over a span, or None where torch may have spoiled them.

        Tensors are (matrices, group * rows, dim), with a dim of 1 for log-sum-exps.
        """
        bias, live = self._biases.of(place, span)
        q, k, v = self._operands(place, span, queries)
        part, lse = flash_attention(q, k, v, attn_mask=bias, scale=self._scale)
        part, lse = part.squeeze(1), lse.squeeze(1).unsqueeze(-1)
        if bias is not None and (is_nan(lse) or (self._bounded and is_nan(part))):
            return None
        # Of rows without a live pair torch says 0.
        if live is not None:
            lse = torch.where(live, lse, -torch.inf)
        if is_spoilt(part, lse.squeeze(-1)):
            return None
        return part, LogSumParts(lse, torch.zeros_like(lse))

    def backward(
        self, place: StepPlace, span: KeySpan, queries: torch.Tensor, grad_out: torch.Tensor,
        results: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:  # fmt: skip
        """Terms that a span adds to dQ, and its dK and dV; None where torch may have spoiled them.

        Tensors are those of :meth:`forward`. The ``results`` are output and log-sum-exp of whole
        rows, infinite for rows with no live pair.
        """
        bias, _ = self._biases.of(place, span)
        out, lse = results
        found = flash_gradients(
            grad_out.unsqueeze(1), self._operands(place, span, queries),
            (out.unsqueeze(1), lse.squeeze(-1).unsqueeze(1)), attn_mask=bias, scale=self._scale,
        )  # fmt: skip
        dq, dk, dv = (x.squeeze(1) for x in found)
        # Where dK alone is spoilt, it is without torch's backward too.
        if bias is not None and (is_nan(dq, dv) or (self._bounded and is_nan(dk))):
            return None
        return dq, dk, dv

    def _operands(
        self, place: StepPlace, span: KeySpan, queries: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        columns = slice(*span.columns)
        keys, values = (x[place.matrices, :, columns] for x in (self._k, self._v))
        return queries.unsqueeze(1), keys, values


class Biases:
    """Biases that masks add to scores of spans, one for all spans with the same live pairs.

    Args:
        live_masks: Those of the call.
        like: Of the dtype and device.
    """

    def __init__(self, live_masks: LiveMasks, like: torch.Tensor) -> None:
        self._live_masks = live_masks
        self._kept: dict[object, Bias] = {}
        self._room = like.new_empty(0)
        """Zeros, which biases that are not kept are written to one after the other."""
        self._written: list[torch.Tensor] = []
        """Parts of these that are no zeros."""

    def of(
        self, place: StepPlace, span: KeySpan
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Bias that the mask adds to a span's scores, (1 or matrices, 1, group * rows, width).

        Also the rows that have a live pair, bool (1 or matrices, group * rows, 1); None where all
        have. Both are good until the next ones are asked for.
        """
        if not span.partial:
            return None, None
        # Spans of a causal mask are longer from step to step, and end alike. If the mask decides at
        # the end alone, the bias is the end of one that is as long or longer.
        ends = span.full and span.partial[0][1] == span.columns[1]
        columns = span.partial if ends else (span.columns, *span.partial)
        key = self._live_masks.key(place.step, *columns)
        found = None if key is None else self._kept.get(key)
        if found is None or found[0].shape[-1] < span.width:
            found = self._made(place, span, key is not None, SPAN if ends else 0)
            fits = found[0].numel() <= _MOST_KEPT
            if key is not None and fits and (key in self._kept or len(self._kept) < _KEPT):
                self._kept[key] = found
        return found[0][..., -span.width :], found[1]

    def _made(self, place: StepPlace, span: KeySpan, is_kept: bool, width: int) -> Bias:
        """The bias of a span, and of live keys before it up to a ``width`` that can be kept."""
        lives = [self._live_masks.of(place.step, columns) for columns in span.partial]
        batch, heads, rows = place.shape
        if all(live.shape[0] == live.shape[1] == 1 for live in lives):
            batch = heads = 1
        lines = rows * max(batch * heads, _members(place))
        more = max(0, width - span.width) if is_kept and lines * width <= _MOST_KEPT else 0
        bias = self._zeros((batch, heads, rows, more + span.width), is_kept)
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

    def _zeros(self, shape: tuple[int, ...], is_kept: bool) -> torch.Tensor:
        """New zeros, or room that was used before: see M61 in docs/dev/measured.md."""
        if is_kept:
            return self._room.new_zeros(shape)
        for part in self._written:
            part.zero_()
        self._written.clear()
        size = math.prod(shape)
        if self._room.numel() < size:
            self._room = self._room.new_zeros(size)
        return self._room[:size].view(shape)


def _members(place: StepPlace) -> int:
    """Number of query heads of a step that have a key head in common."""
    number: int = place.matrices.stop - place.matrices.start
    return place.shape[0] * place.shape[1] // number


def _by_matrices(found: torch.Tensor, place: StepPlace) -> torch.Tensor:
    """(1 or matrices, 1, group * rows, width) of (1 or batch, 1 or heads, rows, width)."""
    number = place.matrices.stop - place.matrices.start
    if found.shape[0] == found.shape[1] == 1:
        found, number = found.expand(1, _members(place), -1, -1), 1
    return found.reshape(number, 1, -1, found.shape[-1])
