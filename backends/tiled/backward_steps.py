"""The CPU backend's gradients, step by step; the forward is :mod:`.cpu`'s.

Scores are made again from ``lse``, by the formulas of FlashAttention-2 (arXiv 2307.08691), section
3.1: with P the softmax weights, D dropout's factors, dW = dO V^T and delta = rowsum(dO * O) - dlse,
the final score's gradient is dS = P * (D * dW - delta). Everything the program mentions gets its
gradient from dS by the symbolic derivative.

Non-goals: second derivatives (:mod:`attndsl.runtime.higher` has those).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attndsl.ir import SCORE, Op, const
from attndsl.passes.differentiate import vjp

from ..base import Gradients
from ..dense.interpret import gated
from ..log_sum import LogSum, log_sum
from ..memory_order import arranged_like, wide_dtype
from .capture_gradients import CaptureSums
from .sdpa_spans import Biases, OfForward, PlainRows
from .span_scores import (
    Buffers,
    Scorer,
    add_product,
    dropout_factor,
    exp_,
    fill,
    keys_of,
    matrices,
    place_of,
)  # fmt: skip

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Backward, Call
    from .span_scores import Scored, StepPlace
    from .step_plan import KeySpan, QueryStep

_ONE = const(1.0)
_SLOPES = 2
"""The buffer beside those of scores."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step: tensors (matrices, group * rows, ...)."""

    step: QueryStep
    place: StepPlace
    queries: torch.Tensor
    grad_out: torch.Tensor
    lse: LogSum
    delta: torch.Tensor | None
    """What all scores of a row have in common in their gradients; None where nobody has asked."""
    dq: torch.Tensor | None
    """What the spans so far have added up to; None where that is not wanted."""


class StepGradients:
    """One call's gradients, while its steps are done one after the other.

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
        self._slope = lowered.derivative.score
        self._q = matrices(call.q, call)
        self._k, self._v = keys_of(call.k, call), keys_of(call.v, call)
        self._grad_out = matrices(grad_out, call)
        self._out = matrices(out, call)
        self._lse = LogSum(*(matrices(x, call) for x in log_sum(lse)))
        self._grad_lse = None if grad_lse is None else matrices(grad_lse.unsqueeze(-1), call)
        self._dq = torch.zeros_like(self._q) if wants.q else None
        self._dk = torch.zeros_like(self._k) if wants.k else None
        self._dv = torch.zeros_like(self._v) if wants.v else None
        self._buffers = Buffers(steps, 3, self._q, plain)
        self._scorer = Scorer(program, call, self._buffers, keep_raw=True)
        self._biases = Biases(call, self._scorer.live_masks) if plain else None
        self._sums = CaptureSums(call, wants)
        self._score_terms = self._sums.of_score(lowered.derivative)
        self._sink_terms = self._sums.of(program.sink)
        self._dropout_terms = self._sums.of(program.dropout)
        self._weight_terms = self._sums.of(program.weights)
        self._weight_slope = const(0.0)
        if program.weights is not None:
            self._weight_slope = vjp(program.weights, _ONE).get(SCORE, const(0.0))
        self._scores_matter = bool(wants.q or wants.k or self._score_terms)

    def add(self, step: QueryStep) -> None:
        """Add what the rows of ``step`` contribute."""
        place = place_of(step, self._call)
        queries, grad_out = place.queries(self._q), place.queries(self._grad_out)
        # torch's own backward makes it itself.
        delta = None if self._biases is not None else self._delta(place, grad_out)
        lse = LogSum(*map(place.queries, self._lse))
        dq = queries.new_zeros(queries.shape) if self._dq is not None else None
        rows = StepRows(step, place, queries, grad_out, lse, delta, dq)
        for span in step.spans:
            if self._biases is None or not self._add_plain(rows, span, self._biases):
                for part in span.parts() if self._biases is not None else (span,):
                    self._add_span(rows, part)
        if dq is not None and self._dq is not None:
            place.store(self._dq, dq)
        if self._sink_terms and self._program.sink is not None and delta is not None:
            own = LogSum(*map(place.pairs, lse))
            tile = self._scorer.expressions.tile(step, (0, 1), own.shift)
            (sink,) = tile.evaluate(self._program.sink)
            d_sink = -own.of_sink(sink, place.pairs(delta))
            self._sums.add(self._sink_terms, d_sink, tile)

    def _delta(self, place: StepPlace, grad_out: torch.Tensor) -> torch.Tensor:
        delta = (grad_out * place.queries(self._out)).sum(-1, keepdim=True)
        if self._grad_lse is not None:
            delta = delta - place.queries(self._grad_lse)
        return torch.where(place.queries(self._lse.shift) == -torch.inf, 0.0, delta)

    def _add_plain(self, rows: StepRows, span: KeySpan, biases: Biases) -> bool:
        """Add a span's gradients by torch's own backward; False where it may have spoiled them."""
        matrices, columns = rows.place.matrices, slice(*span.columns)
        found = PlainRows(
            self._call, rows.step, rows.place, biases, self._program.bounded
        ).gradients(
            span, rows.queries, self._k[matrices, columns], self._v[matrices, columns],
            OfForward(
                rows.grad_out, rows.place.queries(self._out),
                rows.lse.without_dead() + rows.lse.rest,
            ),
        )  # fmt: skip
        if found is None:
            return False
        dq, dk, dv = found
        if rows.dq is not None:
            rows.dq.add_(dq)
        if self._dk is not None:
            self._dk[matrices, columns].add_(dk)
        if self._dv is not None:
            self._dv[matrices, columns].add_(dv)
        return True

    def _add_span(self, rows: StepRows, span: KeySpan) -> None:
        """Add a span's gradients."""
        place, columns = rows.place, slice(*span.columns)
        if rows.delta is None:
            rows = replace(rows, delta=self._delta(place, rows.grad_out))
        keys = self._k[place.matrices, columns]
        scored = self._scorer.span(rows.step, place, span, rows.queries, keys)
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
        live = scored.live_to_part(self._program, place)
        if rows.dq is not None:
            add_product(rows.dq, d_score, keys, live, scale)
        if self._dk is not None:
            total = self._dk[place.matrices, columns]
            add_product(total, d_score.mT, rows.queries, live, scale, by_key=True)

    def _weights(self, rows: StepRows, span: KeySpan, scored: Scored) -> torch.Tensor:
        """The final score's gradient, after adding dV; overwrites the final scores."""
        program, step, place, grad_out = self._program, rows.step, rows.place, rows.grad_out
        values = self._v[place.matrices, slice(*span.columns)]
        final = place.pairs(scored.final)
        own = self._scorer.expressions.tile(step, span.columns, final)
        if program.weights is None:
            relative = scored.final.sub_(rows.lse.without_dead()).sub_(rows.lse.rest)
            weights = exp_(program, relative)
            if program.bounded:  # A row whose log-sum-exp is NaN has made NaN of its dead pairs.
                fill(place.pairs(weights), scored, 0.0)
        else:
            (found,) = own.evaluate(program.weights)
            weights = torch.empty_like(scored.final)
            fill(place.pairs(weights).copy_(found), scored, 0.0)
        keep, kept = None, weights
        if program.dropout is not None:
            (p,) = scored.tile.evaluate(program.dropout)
            keep = dropout_factor(p, step, span.columns, self._call)
            kept = (place.pairs(weights) * keep).view_as(weights)
        if self._dv is not None:
            live = scored.live_to_part(program, place)
            total = self._dv[place.matrices, slice(*span.columns)]
            add_product(total, kept.mT, grad_out, live, by_key=True)
        slopes = self._buffers.take(_SLOPES, place, span.width)
        torch.bmm(grad_out, values.mT, out=slopes)
        pairs = place.pairs(slopes)
        if keep is not None and program.dropout is not None:
            if self._dropout_terms:
                # keep = 1 / (1 - p), so its derivative by p is keep ** 2; clamped p has none.
                d_p = torch.where((p >= 0) & (p < 1), pairs * place.pairs(kept) * keep, 0.0)
                self._sums.add(self._dropout_terms, d_p, scored.tile)
            pairs.mul_(keep)
        if program.weights is None:
            assert rows.delta is not None
            slopes.sub_(rows.delta).mul_(weights)
            fill(pairs, scored, 0.0)
            return slopes
        fill(pairs, scored, 0.0)
        self._sums.add(self._weight_terms, pairs, own)
        (slope,) = own.evaluate(self._weight_slope)
        pairs.copy_(gated(pairs, pairs * slope))
        return slopes

    def gradients(self) -> Gradients:
        """All that was added, in the dtypes that are wanted."""
        call, dtype = self._call, wide_dtype(self._wants.wide)

        def like(found: torch.Tensor | None, given: torch.Tensor) -> torch.Tensor | None:
            return None if found is None else arranged_like(found.view(given.shape), given, dtype)

        return Gradients(
            q=like(self._dq, call.q),
            k=like(self._dk, call.k),
            v=like(self._dv, call.v),
            tensors=self._sums.tensors(),
            params=self._sums.params(),
        )
