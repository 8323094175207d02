"""Tiled attention in plain torch, for CPUs: memory proportional to the lengths, dead tiles skipped.

What is computed is what :mod:`..dense.reference` defines, in fp32 for half types (fp64 for fp64).

A *step* is one tile row of queries for a box of heads; its *spans* are slices of consecutive keys
that cover every tile of that row with a live pair (see :mod:`.step_plan`). One matrix product
serves a whole span of all the heads of a step, so that Python's and torch's cost a call is spread
over many pairs, and the scores of a step at a time are what fits into a cache.

Plain scores are torch's own attention, span by span (:mod:`.sdpa_spans`), and those of few rows
need no plan (:mod:`.sdpa_single`), nor do those of causal calls (:mod:`.sdpa_causal`).

The forward normalises scores span by span as they come (online softmax: M. Milakov, N. Gimelshein,
arXiv 1805.02867). The backward (:mod:`.backward_steps`) makes them again from ``lse``.

Determinism: every sum is made in one order that depends on shapes and tile kinds alone.

Non-goals: checked mode, second derivatives (:mod:`attndsl.runtime.higher` has those).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from ..base import Backend
from ..dense.reference import check_meaning
from ..log_sum import LogSum, is_far, settled
from ..memory_order import empty_like, wide_dtype
from .backward_steps import StepGradients
from .merging import merge_
from .sdpa_causal import Triangles, attend, gradients
from .sdpa_single import in_one_piece
from .sdpa_spans import Biases, PlainRows, is_plain, wants_no_more
from .span_scores import (
    Buffers,
    Scorer,
    add_product,
    dropout_factor,
    fill,
    keys_of,
    least_power,
    live_product,
    matrices,
    may_be_subnormal,
    place_of,
)
from .step_plan import Plans, limits_of

if TYPE_CHECKING:
    from attndsl.ir import Program
    from attndsl.pipeline import Lowered

    from ..base import Backward, Call, Gradients
    from .span_scores import Scored, StepPlace
    from .step_plan import KeySpan, QueryStep

_UNCHANGED: AbstractContextManager[object] = nullcontext()
_WEIGHTS = 1
"""The forward's other buffer, which needs no raw scores beside the final ones."""


class CPUBackend(Backend):
    """Runs every program wherever torch runs, in memory proportional to the lengths."""

    name = "cpu"
    differentiable = False
    any_length = True

    def __init__(self) -> None:
        self._plans = Plans()
        self._triangles = Triangles()

    def why_not(self, device: torch.device) -> str | None:
        """None: it is made of torch operations, and runs wherever they do."""
        return None

    def check(self, lowered: Lowered, call: Call) -> None:
        """Refuse what has no meaning; see :func:`~..dense.reference.check_meaning`."""
        check_meaning(lowered.program)

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`."""
        with _without_grad(), _without_autocast(call.q.device.type):
            plain = is_plain(lowered.program, call)
            found = self._as_plain(lowered, call) if plain else None
            if found is not None:
                return found
            steps = self._plans.of(lowered, call, limits_of(call, plain))
            return _forward(lowered, call, steps, plain)

    def _as_plain(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A call of plain scores without steps; None where it has to be taken apart."""
        found = in_one_piece(lowered, call)
        if found is None and (triangle := self._triangles.of(lowered, call)) is not None:
            found = attend(call, triangle)
        return found

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> Gradients:
        """See :class:`~attndsl.backends.base.Backend`."""
        with torch.no_grad(), _without_autocast(call.q.device.type):
            plain = is_plain(lowered.program, call) and wants_no_more(backward)
            plain = plain and not is_far(backward.lse[0])
            triangle = self._triangles.of(lowered, call) if plain else None
            found = None if triangle is None else gradients(call, backward, triangle)
            if found is not None:
                return found
            steps = self._plans.of(lowered, call, limits_of(call, plain))
            run = StepGradients(lowered, call, backward, steps, plain)
            for step in steps:
                run.add(step)
            return run.gradients()


def _without_grad() -> AbstractContextManager[object]:
    # To turn off what is off takes 3 us.
    return torch.no_grad() if torch.is_grad_enabled() else _UNCHANGED


def _without_autocast(kind: str) -> AbstractContextManager[object]:
    """Autocast would round the products' operands, which are of the dtype to compute in."""
    # To turn off what is not on takes 10 us.
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _UNCHANGED


def _forward(
    lowered: Lowered, call: Call, steps: list[QueryStep], plain: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    program = lowered.program
    batch, heads, q_len, _ = call.q.shape
    q = matrices(call.q, call)
    k, v = keys_of(call.k, call), keys_of(call.v, call)
    # No view is returned: torch refuses to write to views that an autograd function returns.
    out = empty_like(call.q, v.shape[-1], wide_dtype(call.wide))
    lse = q.new_zeros((2, batch, heads, q_len))
    lse[0] = -torch.inf
    written_at_once = out.dtype is q.dtype and out.is_contiguous()
    rows = (out if written_at_once else q.new_empty(out.shape)).view(*q.shape[:-1], v.shape[-1])
    rows.zero_()
    rows_of_lse = [x.view(*q.shape[:-1], 1) for x in lse]
    buffers = Buffers(steps, 2, q, plain)
    scorer = Scorer(program, call, buffers, keep_raw=False)
    biases = Biases(call, scorer.live_masks)
    for step in steps:
        place = place_of(step, call)
        own = _Rows(program, call, step, place, buffers, scorer)
        plain_rows = PlainRows(call, step, place, biases, program.bounded)
        queries = place.queries(q)
        for span in step.spans:
            columns = slice(*span.columns)
            keys, values = k[place.matrices, columns], v[place.matrices, columns]
            found = plain_rows.attend(span, queries, keys, values) if plain else None
            if found is not None:
                part, part_lse = found
                own.merge(part, LogSum(part_lse, torch.zeros_like(part_lse)))
                continue
            for some in span.parts() if plain else (span,):
                columns = slice(*some.columns)
                keys, values = k[place.matrices, columns], v[place.matrices, columns]
                own.add(some, scorer.span(step, place, some, queries, keys), values)
        result, logarithm = own.finish()
        place.store(rows, result)
        for of_all, own_part in zip(rows_of_lse, logarithm, strict=True):
            place.store(of_all, own_part)
    if not written_at_once:
        out.copy_(rows.view(out.shape))
    return out, settled(lse)


class _Rows:
    """The rows of a step, while its spans come in. Tensors are (matrices, group * rows, ...)."""

    def __init__(
        self,
        program: Program,
        call: Call,
        step: QueryStep,
        place: StepPlace,
        buffers: Buffers,
        scorer: Scorer,
    ) -> None:
        self._program = program
        self._call = call
        self._step = step
        self._place = place
        self._buffers = buffers
        self._expressions = scorer.expressions
        self._sum: torch.Tensor | None = None
        """Output of the spans so far, as if there were no others."""
        self._lse: LogSum
        """Log-sum-exp of the spans so far."""
        self._alive: torch.Tensor

    def add(self, span: KeySpan, scored: Scored, values: torch.Tensor) -> None:
        """Take in a span; overwrites its final scores."""
        if self._program.weights is None:
            self._add_softmax(span, scored, values)
        else:
            self._add_own(span, scored, values)

    def _add_softmax(self, span: KeySpan, scored: Scored, values: torch.Tensor) -> None:
        score = scored.final
        peak = score.amax(-1, keepdim=True)
        # As in SDPA: torch's softmax is one pass, and faster than torch.exp (see M22 in
        # docs/measured.md).
        weights = self._buffers.take(_WEIGHTS, self._place, span.width)
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
        self._drop(span, scored, weights)
        live = scored.live_to_part(self._program, self._place)
        self.merge(live_product(weights, values, live), LogSum(peak, rest))

    def merge(self, part: torch.Tensor, lse: LogSum) -> None:
        """Take in the output and the log-sum-exp of a span."""
        if self._sum is None:
            self._sum, self._lse = part, lse
            return
        self._lse = merge_(self._sum, self._lse, part, lse)

    def _add_own(self, span: KeySpan, scored: Scored, values: torch.Tensor) -> None:
        assert self._program.weights is not None
        final = self._place.pairs(scored.final)
        tile = self._expressions.tile(self._step, span.columns, final)
        (weights,) = tile.evaluate(self._program.weights)
        final.copy_(weights)
        fill(final, scored, 0.0)
        alive = torch.full((1, 1, 1, 1), span.full, device=final.device)
        for _, live in scored.partial:
            alive = alive | live.any(-1, keepdim=True)
        self._drop(span, scored, scored.final)
        pairs = scored.live_to_part(self._program, self._place)
        if self._sum is None:
            self._sum = live_product(scored.final, values, pairs)
            self._alive = alive
        else:
            add_product(self._sum, scored.final, values, pairs)
            self._alive = self._alive | alive

    def _drop(self, span: KeySpan, scored: Scored, weights: torch.Tensor) -> None:
        if self._program.dropout is not None:
            (p,) = scored.tile.evaluate(self._program.dropout)
            keep = dropout_factor(p, self._step, span.columns, self._call)
            self._place.pairs(weights).mul_(keep)

    def finish(self) -> tuple[torch.Tensor, LogSum]:
        """Output (matrices, group * rows, value_dim) and lse (matrices, group * rows, 1)."""
        assert self._sum is not None, "a step has at least one span"
        if self._program.weights is not None:
            log = self._alive.to(self._sum.dtype).log()
            log = log.expand(*self._place.shape, 1).reshape(*self._sum.shape[:-1], 1)
            return self._sum, LogSum(log, torch.zeros_like(log))
        if self._program.sink is None:
            return self._sum, self._lse
        nothing = self._place.pairs(self._lse.shift)
        tile = self._expressions.tile(self._step, (0, 1), nothing)
        (sink,) = tile.evaluate(self._program.sink)
        sink = sink.expand(nothing.shape).reshape(self._lse.shift.shape)
        # Rows with no live pair stay what they are.
        sink = torch.where(self._lse.shift == -torch.inf, -torch.inf, sink)
        both, own, _ = self._lse.merged(LogSum(sink, torch.zeros_like(sink)))
        return self._sum.mul_(own), both
