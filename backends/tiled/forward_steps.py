"""The CPU backend's output, step by step.

Scores are normalised span by span as they come (online softmax: M. Milakov, N. Gimelshein,
arXiv 1805.02867).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..log_sum import LogSumParts
from .matrices import StepResults, add_part, place_of
from .sdpa_spans import SpanAttention
from .span_scores import Scorer, add_product, least_power, live_product, may_be_subnormal

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call
    from .matrices import StepPlace
    from .span_scores import Scored
    from .step_plan import KeySpan, QueryStep


@dataclass(slots=True)
class _StepSums:
    """The rows of a step, while its spans come in. Tensors are (matrices, group * rows, ...)."""

    place: StepPlace
    queries: torch.Tensor
    out: torch.Tensor | None = None
    """Output of the spans so far, as if there were no others."""
    lse: LogSumParts | None = None
    """Log-sum-exp of the spans so far."""
    alive: torch.Tensor | None = None
    """Rows with a live pair in the spans so far, where weights are no softmax."""

    def merge(self, part: torch.Tensor, lse: LogSumParts) -> None:
        """Take in the output and the log-sum-exp of a span."""
        if self.out is None or self.lse is None:
            self.out, self.lse = part, lse
        else:
            self.lse = add_part(self.out, self.lse, part, lse)


class StepOutputs:
    """Makes one call's output and log-sum-exp.

    Args:
        lowered: The program.
        call: Its arguments.
        steps: All steps.
        plain: Whether torch's own attention makes spans.
    """

    def __init__(self, lowered: Lowered, call: Call, steps: list[QueryStep], plain: bool) -> None:
        self._program = program = lowered.program
        self._call = call
        self._steps = steps
        self._results = StepResults(call)
        self._results.out.zero_()
        self._results.lse.shift.fill_(-torch.inf)
        self._results.lse.rest.zero_()
        self._scorer = scorer = Scorer(program, call, steps, plain, keep_raw=False)
        self._sdpa = SpanAttention(scorer, call, program.bounded) if plain else None

    def _add(self, step: QueryStep) -> None:
        place = place_of(step, self._call)
        sums = _StepSums(place, place.queries(self._scorer.q))
        for span in step.spans:
            if self._sdpa is None:
                self._add_span(sums, span)
            elif (found := self._sdpa.forward(place, span, sums.queries)) is not None:
                sums.merge(*found)
            else:
                for part in span.parts():
                    self._add_span(sums, part)
        out, logarithm = self._finished(sums)
        place.store(self._results.out, out)
        for of_all, own in zip(self._results.lse, logarithm, strict=True):
            place.store(of_all, own)

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`attndsl.backends.base.Backend.forward`."""
        for step in self._steps:
            self._add(step)
        return self._results.as_given()

    def _add_span(self, sums: _StepSums, span: KeySpan) -> None:
        scored = self._scorer.span(sums.place, span, sums.queries)
        values = self._scorer.v[sums.place.matrices, slice(*span.columns)]
        if self._program.weights is None:
            sums.merge(*self._softmax(scored, span, values))
        else:
            self._add_own(sums, scored, span, values)

    def _softmax(
        self, scored: Scored, span: KeySpan, values: torch.Tensor
    ) -> tuple[torch.Tensor, LogSumParts]:
        score = scored.final
        peak = score.amax(-1, keepdim=True)
        # As in SDPA: torch's softmax is one pass, and faster than torch.exp (see M22 in
        # docs/dev/measured.md).
        weights = self._scorer.room(scored.place, span.width)
        torch.softmax(score, -1, out=weights)
        if may_be_subnormal(self._program, weights):
            torch.threshold_(weights, math.exp(least_power(weights)), 0.0)
        # The greatest weight is exp(0) / total.
        rest = weights.amax(-1, keepdim=True).log_().neg_()
        # A row is dead if the mask leaves nothing, or if all scores are -inf.
        dead = peak == -torch.inf
        # On other devices looking takes longer than writing.
        if dead.device.type != "cpu" or bool(dead.any()):
            weights.masked_fill_(dead, 0.0)
            rest.masked_fill_(dead, 0.0)
        self._drop(scored, span, weights)
        return live_product(weights, values, scored.live), LogSumParts(peak, rest)

    def _add_own(
        self, sums: _StepSums, scored: Scored, span: KeySpan, values: torch.Tensor
    ) -> None:
        place = sums.place
        final = place.pairs(scored.final)
        assert self._program.weights is not None
        tile = self._scorer.expressions.tile(place.step, span.columns, final)
        (weights,) = tile.evaluate(self._program.weights)
        final.copy_(weights)
        scored.fill(scored.final, 0.0)
        alive = torch.full((1, 1, 1, 1), span.full, device=final.device)
        for _, live in scored.partial:
            alive = alive | live.any(-1, keepdim=True)
        self._drop(scored, span, scored.final)
        if sums.out is None or sums.alive is None:
            sums.out, sums.alive = live_product(scored.final, values, scored.live), alive
        else:
            add_product(sums.out, scored.final, values, scored.live)
            sums.alive = sums.alive | alive

    def _drop(self, scored: Scored, span: KeySpan, weights: torch.Tensor) -> None:
        if (dropped := self._scorer.drop(scored, span)) is not None:
            scored.place.pairs(weights).mul_(dropped[1])

    def _finished(self, sums: _StepSums) -> tuple[torch.Tensor, LogSumParts]:
        """Output (matrices, group * rows, value_dim) and lse (matrices, group * rows, 1)."""
        out, lse, place = sums.out, sums.lse, sums.place
        assert out is not None, "a step has at least one span"
        if lse is None:
            assert sums.alive is not None
            log = sums.alive.to(out.dtype).log()
            log = log.expand(*place.shape, 1).reshape(*out.shape[:-1], 1)
            return out, LogSumParts(log, torch.zeros_like(log))
        if self._program.sink is None:
            return out, lse
        nothing = place.pairs(lse.shift)
        tile = self._scorer.expressions.tile(place.step, (0, 1), nothing)
        (sink,) = tile.evaluate(self._program.sink)
        sink = sink.expand(nothing.shape).reshape(lse.shift.shape)
        # Rows with no live pair stay what they are.
        sink = torch.where(lse.shift == -torch.inf, -torch.inf, sink)
        both, own, _ = lse.merged(LogSumParts(sink, torch.zeros_like(sink)))
        return out.mul_(own), both
