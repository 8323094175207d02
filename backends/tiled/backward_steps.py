"""The CPU backend's gradients, step by step; the forward is :mod:`.forward_steps`'s.

Scores are made again from ``lse``, by the formulas of FlashAttention-2 (arXiv 2307.08691), section
3.1: with P the softmax weights, D dropout's factors, dW = dO V^T and delta = rowsum(dO * O) - dlse,
the final score's gradient is dS = P * (D * dW - delta). Everything the program mentions gets its
gradient from dS by the symbolic derivative.

Non-goals: second derivatives (:mod:`attndsl.call.chunked_autograd` has those).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attndsl.ir import SCORE, Op, const
from attndsl.passes.differentiate import vjp

from ..base import CallGradients
from ..dense.interpret import gated
from ..log_sum import LogSumParts, log_sum
from .capture_gradients import CaptureSums
from .matrices import gradient_like, matrices, place_of
from .sdpa_spans import SpanAttention
from .span_scores import Scorer, add_product, exp_

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Backward, Call
    from .matrices import StepPlace
    from .span_scores import Scored
    from .step_plan import KeySpan, QueryStep

_ONE = const(1.0)


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step: tensors (matrices, group * rows, ...)."""

    place: StepPlace
    queries: torch.Tensor
    grad_out: torch.Tensor
    lse: LogSumParts
    delta: torch.Tensor | None
    """Value of each row that the gradients of all its scores share; None where not needed."""
    dq: torch.Tensor | None
    """Sum of dQ over the spans so far; None where it is not wanted."""


class StepGradients:
    """Makes one call's gradients.

    Args:
        lowered: The program.
        call: Its arguments.
        backward: What came of the forward, and what is wanted.
        steps: All steps.
        plain: Whether torch's own backward makes what is wanted of a span.
    """

    def __init__(
        self, lowered: Lowered, call: Call, backward: Backward, steps: list[QueryStep], plain: bool
    ) -> None:
        out, lse, grad_out, grad_lse, wants = backward
        self._program = program = lowered.program
        self._call = call
        self._wants = wants
        self._steps = steps
        self._slope = lowered.derivative.score
        self._scorer = scorer = Scorer(program, call, steps, plain, keep_raw=True)
        self._sdpa = SpanAttention(scorer, call, program.bounded) if plain else None
        self._grad_out = matrices(grad_out, call)
        self._out = matrices(out, call)
        self._lse = LogSumParts(*(matrices(x, call) for x in log_sum(lse)))
        self._grad_lse = None if grad_lse is None else matrices(grad_lse.unsqueeze(-1), call)
        self._dq = torch.zeros_like(scorer.q) if wants.q else None
        self._dk = torch.zeros_like(scorer.k) if wants.k else None
        self._dv = torch.zeros_like(scorer.v) if wants.v else None
        self._sums = CaptureSums(call, wants)
        self._score_terms = self._sums.of_score(lowered.derivative)
        self._sink_terms = self._sums.of(program.sink)
        self._dropout_terms = self._sums.of(program.dropout)
        self._weight_terms = self._sums.of(program.weights)
        self._weight_slope = const(0.0)
        if program.weights is not None:
            self._weight_slope = vjp(program.weights, _ONE).get(SCORE, const(0.0))
        self._scores_matter = bool(wants.q or wants.k or self._score_terms)

    def _add(self, step: QueryStep) -> None:
        """Add the contributions of the rows of ``step``."""
        place = place_of(step, self._call)
        queries, grad_out = place.queries(self._scorer.q), place.queries(self._grad_out)
        # torch's own backward makes it itself.
        delta = None if self._sdpa is not None else self._delta(place, grad_out)
        lse = LogSumParts(*map(place.queries, self._lse))
        dq = queries.new_zeros(queries.shape) if self._dq is not None else None
        rows = StepRows(place, queries, grad_out, lse, delta, dq)
        for span in step.spans:
            if self._sdpa is None:
                self._add_span(rows, span)
            elif not self._add_plain(rows, span, self._sdpa):
                for part in span.parts():
                    self._add_span(rows, part)
        if dq is not None and self._dq is not None:
            place.store(self._dq, dq)
        if self._sink_terms and self._program.sink is not None and delta is not None:
            own = LogSumParts(*map(place.pairs, lse))
            tile = self._scorer.expressions.tile(step, (0, 1), own.shift)
            (sink,) = tile.evaluate(self._program.sink)
            d_sink = -own.of_sink(sink, place.pairs(delta))
            self._sums.add(self._sink_terms, d_sink, tile)

    def _delta(self, place: StepPlace, grad_out: torch.Tensor) -> torch.Tensor:
        delta = (grad_out * place.queries(self._out)).sum(-1, keepdim=True)
        if self._grad_lse is not None:
            delta = delta - place.queries(self._grad_lse)
        return torch.where(place.queries(self._lse.shift) == -torch.inf, 0.0, delta)

    def _add_plain(self, rows: StepRows, span: KeySpan, sdpa: SpanAttention) -> bool:
        """Add a span's gradients by torch's own backward; False where it may have spoiled them."""
        place = rows.place
        results = place.queries(self._out), rows.lse.without_dead() + rows.lse.rest
        found = sdpa.backward(place, span, rows.queries, rows.grad_out, results)
        if found is None:
            return False
        columns = slice(*span.columns)
        totals = (None if x is None else x[place.matrices, columns] for x in (self._dk, self._dv))
        for total, part in zip((rows.dq, *totals), found, strict=True):
            if total is not None:
                total.add_(part)
        return True

    def _add_span(self, rows: StepRows, span: KeySpan) -> None:
        """Add a span's gradients."""
        place, columns = rows.place, slice(*span.columns)
        if rows.delta is None:
            rows = replace(rows, delta=self._delta(place, rows.grad_out))
        scored = self._scorer.span(place, span, rows.queries)
        d_score = self._weights(rows, span, scored)
        if not self._scores_matter:
            return
        pairs = place.pairs(d_score)
        self._sums.add(self._score_terms, pairs, scored.tile)
        scale = self._call.scale
        if self._slope.op is Op.CONST:
            scale *= float(self._slope.value or 0.0)
        else:
            (slope,) = scored.tile.evaluate(self._slope)
            pairs.copy_(gated(pairs, pairs * slope))
        if rows.dq is not None:
            keys = self._scorer.k[place.matrices, columns]
            add_product(rows.dq, d_score, keys, scored.live, scale)
        if self._dk is not None:
            total = self._dk[place.matrices, columns]
            add_product(total, d_score.mT, rows.queries, scored.live, scale, by_key=True)

    def _weights(self, rows: StepRows, span: KeySpan, scored: Scored) -> torch.Tensor:
        """The final score's gradient, after adding dV; overwrites the final scores."""
        program, place, grad_out = self._program, rows.place, rows.grad_out
        values = self._scorer.v[place.matrices, slice(*span.columns)]
        final = place.pairs(scored.final)
        own = self._scorer.expressions.tile(place.step, span.columns, final)
        if program.weights is None:
            relative = scored.final.sub_(rows.lse.without_dead()).sub_(rows.lse.rest)
            weights = exp_(program, relative)
            if program.bounded:  # A row whose log-sum-exp is NaN has made NaN of its dead pairs.
                scored.fill(weights, 0.0)
        else:
            (found,) = own.evaluate(program.weights)
            weights = torch.empty_like(scored.final)
            place.pairs(weights).copy_(found)
            scored.fill(weights, 0.0)
        dropped = self._scorer.drop(scored, span)
        kept = weights
        if dropped is not None:
            kept = (place.pairs(weights) * dropped[1]).view_as(weights)
        if self._dv is not None:
            total = self._dv[place.matrices, slice(*span.columns)]
            add_product(total, kept.mT, grad_out, scored.live, by_key=True)
        slopes = self._scorer.room(place, span.width)
        torch.bmm(grad_out, values.mT, out=slopes)
        pairs = place.pairs(slopes)
        if dropped is not None:
            p, keep = dropped
            if self._dropout_terms:
                # keep = 1 / (1 - p), so its derivative by p is keep ** 2; clamped p has none.
                d_p = torch.where((p >= 0) & (p < 1), pairs * place.pairs(kept) * keep, 0.0)
                self._sums.add(self._dropout_terms, d_p, scored.tile)
            pairs.mul_(keep)
        if program.weights is None:
            assert rows.delta is not None
            slopes.sub_(rows.delta).mul_(weights)
            scored.fill(slopes, 0.0)
            return slopes
        scored.fill(slopes, 0.0)
        self._sums.add(self._weight_terms, pairs, own)
        (slope,) = own.evaluate(self._weight_slope)
        pairs.copy_(gated(pairs, pairs * slope))
        return slopes

    def gradients(self) -> CallGradients:
        """All gradients, in the dtypes that are wanted."""
        for step in self._steps:
            self._add(step)
        call, wants = self._call, self._wants
        return CallGradients(
            q=gradient_like(self._dq, call.q, wants),
            k=gradient_like(self._dk, call.k, wants),
            v=gradient_like(self._dv, call.v, wants),
            tensors=self._sums.tensors(),
            params=self._sums.params(),
        )
