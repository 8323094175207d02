"""Tiled attention in plain torch, for CPUs: memory proportional to the lengths, dead tiles skipped.

What is computed is what :mod:`..dense.reference` defines, in fp32 for half types (fp64 for fp64).

A *step* is one tile row of queries for a box of heads; its *spans* are slices of consecutive keys
that cover every tile of that row with a live pair (see :mod:`.plan`). One matrix product serves a
whole span of all the heads of a step, so that Python's and torch's cost a call is spread over many
pairs, and the scores of a step at a time are what fits into a cache.

Plain scores are torch's own attention, span by span (:mod:`.plain`).

The forward normalises scores span by span as they come (online softmax: M. Milakov, N. Gimelshein,
arXiv 1805.02867). The backward makes them again from ``lse``, by the formulas of FlashAttention-2
(arXiv 2307.08691), section 3.1: with P the softmax weights, D dropout's factors, dW = dO V^T and
delta = rowsum(dO * O) - dlse, the final score's gradient is dS = P * (D * dW - delta). Everything
the program mentions gets its gradient from dS by the symbolic derivative.

Determinism: every sum is made in one order that depends on shapes and tile kinds alone.

Non-goals: checked mode, second derivatives (:mod:`attndsl.runtime.higher` has those).
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attndsl.ir import SCORE, Op, const
from attndsl.passes.differentiate import vjp

from ..base import Backend, Gradients
from ..dense.draws import heads_of, rows_of
from ..dense.interpret import gated
from ..dense.philox import keep_factor, kept_at
from ..dense.reference import check_meaning
from ..memory_order import arranged_like, empty_like, wide_dtype
from .capture_gradients import CaptureSums
from .lives import Lives
from .plain import Biases, PlainRows, is_plain
from .plan import BLOCK_M, Plans
from .torch_tiles import Expressions, work_dtype

if TYPE_CHECKING:
    from attndsl.ir import Program
    from attndsl.pipeline import Lowered

    from ..base import Backward, Call
    from .plan import Range, Span, Step
    from .torch_tiles import Tile

_UNCHANGED: AbstractContextManager[object] = nullcontext()
_ONE = const(1.0)
_FINAL, _RAW = range(2)
"""Buffers of scores; :class:`Scorer` fills them."""
_WEIGHTS = 1
"""The forward's other buffer, which needs no raw scores beside the final ones."""
_SLOPES = 2
"""The backward's other buffer."""


class CPUBackend(Backend):
    """Runs every program wherever torch runs, in memory proportional to the lengths."""

    name = "cpu"
    differentiable = False

    def __init__(self) -> None:
        self._plans = Plans()

    def why_not(self, device: torch.device) -> str | None:
        """None: it is made of torch operations, and runs wherever they do."""
        return None

    def check(self, lowered: Lowered, call: Call) -> None:
        """Refuse what has no meaning; see :func:`~..dense.reference.check_meaning`."""
        check_meaning(lowered.program)

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`."""
        with torch.no_grad(), _without_autocast(call.q.device.type):
            return _forward(lowered, call, self._plans.of(lowered, call))

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> Gradients:
        """See :class:`~attndsl.backends.base.Backend`."""
        with torch.no_grad(), _without_autocast(call.q.device.type):
            steps = self._plans.of(lowered, call)
            return _backward(lowered, call, backward, steps)


def _without_autocast(kind: str) -> AbstractContextManager[object]:
    """Autocast would round the products' operands, which are of the dtype to compute in."""
    # To turn off what is not on takes 10 us.
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _UNCHANGED


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
    found = tensor.to(work_dtype(call))
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
        self._raw_buffer = _RAW if keep_raw and not self._plain else _FINAL
        self.expressions = Expressions(call)
        self.lives = Lives(program.mask, call, self.expressions)

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
                score = tile.scope.score[..., slice(*within)]
                partial.append((within, self.lives.of(step, columns, score)))
        final = raw
        if not self._plain:
            (score,) = tile.evaluate(self._program.score)
            final = self._buffers.take(_FINAL, place, span.width)
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


def dropout_factor(p: torch.Tensor, step: Step, columns: Range, call: Call) -> torch.Tensor:
    """Factor of each weight that dropout with probability ``p`` gives."""
    numbers = heads_of(call, step.batches, step.heads)
    rows, keys = rows_of(call, "q", step.rows), rows_of(call, "kv", columns)
    return keep_factor(kept_at(call.seed, p, numbers, rows, keys), p)


def _forward(lowered: Lowered, call: Call, steps: list[Step]) -> tuple[torch.Tensor, torch.Tensor]:
    program = lowered.program
    batch, heads, q_len, _ = call.q.shape
    q = matrices(call.q, call)
    k, v = keys_of(call.k, call), keys_of(call.v, call)
    # No view is returned: torch refuses to write to views that an autograd function returns.
    out = empty_like(call.q, v.shape[-1], wide_dtype(call.wide))
    lse = q.new_full((batch, heads, q_len), -torch.inf)
    written_at_once = out.dtype is q.dtype and out.is_contiguous()
    rows = (out if written_at_once else q.new_empty(out.shape)).view(*q.shape[:-1], v.shape[-1])
    rows.zero_()
    rows_of_lse = lse.view(*q.shape[:-1], 1)
    buffers = Buffers(steps, 2, q)
    scorer = Scorer(program, call, buffers, keep_raw=False)
    plain, biases = is_plain(program, call), Biases(call, scorer.lives)
    for step in steps:
        place = place_of(step, call)
        own = _Rows(program, call, step, place, buffers, scorer)
        plain_rows = PlainRows(call, step, place, biases)
        queries = place.queries(q)
        for span in step.spans:
            columns = slice(*span.columns)
            keys, values = k[place.matrices, columns], v[place.matrices, columns]
            found = plain_rows.attend(span, queries, keys, values) if plain else None
            if found is None:
                own.add(span, scorer.span(step, place, span, queries, keys), values)
            else:
                own.merge(*found)
        result, logarithm = own.finish()
        place.store(rows, result)
        place.store(rows_of_lse, logarithm)
    if not written_at_once:
        out.copy_(rows.view(out.shape))
    return out, lse


class _Rows:
    """The rows of a step, while its spans come in. Tensors are (matrices, group * rows, ...)."""

    def __init__(
        self,
        program: Program,
        call: Call,
        step: Step,
        place: Place,
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
        self._lse: torch.Tensor
        """Log-sum-exp of the spans so far."""
        self._alive: torch.Tensor

    def add(self, span: Span, scored: Scored, values: torch.Tensor) -> None:
        """Take in a span; overwrites its final scores."""
        if self._program.weights is None:
            self._add_softmax(span, scored, values)
        else:
            self._add_own(span, scored, values)

    def _add_softmax(self, span: Span, scored: Scored, values: torch.Tensor) -> None:
        score = scored.final
        peak = score.amax(-1, keepdim=True)
        # As in SDPA: torch's softmax is one pass, and faster than torch.exp (see M22 in
        # docs/measured.md).
        weights = self._buffers.take(_WEIGHTS, self._place, span.width)
        torch.softmax(score, -1, out=weights)
        if _may_be_subnormal(self._program, weights):
            torch.threshold_(weights, math.exp(_least_power(weights)), 0.0)
        # The greatest weight is exp(0) / total.
        lse = peak - weights.amax(-1, keepdim=True).log_()
        # A row is dead if the mask leaves nothing, or if all scores are -inf.
        dead = peak == -torch.inf
        # On other devices looking takes longer than writing.
        if dead.device.type != "cpu" or bool(dead.any()):
            weights.masked_fill_(dead, 0.0)
            lse.masked_fill_(dead, -torch.inf)
        self._drop(span, scored, weights)
        self.merge(torch.bmm(weights, values), lse)

    def merge(self, part: torch.Tensor, lse: torch.Tensor) -> None:
        """Take in the output and the log-sum-exp of a span."""
        if self._sum is None:
            self._sum, self._lse = part, lse
            return
        both = torch.logaddexp(self._lse, lse)
        shift = _finite(both)
        self._sum.mul_(torch.exp(self._lse - shift)).addcmul_(part, torch.exp(lse - shift))
        self._lse = both

    def _add_own(self, span: Span, scored: Scored, values: torch.Tensor) -> None:
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
        if self._sum is None:
            self._sum = torch.bmm(scored.final, values)
            self._alive = alive
        else:
            self._sum.baddbmm_(scored.final, values)
            self._alive = self._alive | alive

    def _drop(self, span: Span, scored: Scored, weights: torch.Tensor) -> None:
        if self._program.dropout is not None:
            (p,) = scored.tile.evaluate(self._program.dropout)
            keep = dropout_factor(p, self._step, span.columns, self._call)
            self._place.pairs(weights).mul_(keep)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (matrices, group * rows, value_dim) and lse (matrices, group * rows, 1)."""
        assert self._sum is not None, "a step has at least one span"
        if self._program.weights is not None:
            log = self._alive.to(self._sum.dtype).log()
            log = log.expand(*self._place.shape, 1).reshape(*self._sum.shape[:-1], 1)
            return self._sum, log
        if self._program.sink is None:
            return self._sum, self._lse
        nothing = self._place.pairs(self._lse)
        tile = self._expressions.tile(self._step, (0, 1), nothing)
        (sink,) = tile.evaluate(self._program.sink)
        both = torch.logaddexp(self._lse, sink.expand(nothing.shape).reshape(self._lse.shape))
        self._sum.mul_(torch.exp(self._lse - _finite(both)))
        # Rows with no live pair stay what they are.
        return self._sum, torch.where(self._lse == -torch.inf, -torch.inf, both)


def _may_be_subnormal(program: Program, x: torch.Tensor) -> bool:
    """Whether weights may be subnormal numbers, which make products on CPUs many times slower.

    Those of plain scores hardly are. This depends on nothing but the program, so that parts of a
    call have the bits of the whole.
    """
    return program.score is not SCORE and x.device.type == "cpu"


def _least_power(x: torch.Tensor) -> float:
    """Weights of smaller powers are of no account. Products of all others with 1e-7 are normal."""
    return 0.8 * math.log(torch.finfo(x.dtype).tiny)


def _exp_(program: Program, powers: torch.Tensor) -> torch.Tensor:
    """In place, the weights of ``powers``, which are about 0 at most. NaN stays NaN.

    Weights of no account are 0. Their powers would make the exponential slow too: see M45 in
    docs/measured.md.
    """
    if not _may_be_subnormal(program, powers):
        return powers.exp_()
    least = _least_power(powers)
    return torch.threshold_(powers.clamp_min_(least - 1.0).exp_(), math.exp(least), 0.0)


def _finite(x: torch.Tensor) -> torch.Tensor:
    """What to subtract from exponents, so that exp(-inf - x) is 0 also where x is -inf."""
    return x.clamp_min(torch.finfo(x.dtype).min)


def _backward(lowered: Lowered, call: Call, backward: Backward, steps: list[Step]) -> Gradients:
    """See :class:`~attndsl.backends.base.Backend`; ``steps`` are those of the forward."""
    run = _Gradients(lowered, call, backward, steps)
    for step in steps:
        run.add(step)
    return run.gradients()


class _Gradients:
    """One call's gradients, while its steps are done one after the other."""

    def __init__(self, lowered: Lowered, call: Call, backward: Backward, steps: list[Step]) -> None:
        out, lse, grad_out, grad_lse, wants = backward
        self._program = program = lowered.program
        self._call = call
        self._wants = wants
        self._slope = lowered.derivative.score
        self._q = matrices(call.q, call)
        self._k, self._v = keys_of(call.k, call), keys_of(call.v, call)
        self._grad_out = matrices(grad_out, call)
        self._out = matrices(out, call)
        self._lse = matrices(lse.unsqueeze(-1), call)
        self._grad_lse = None if grad_lse is None else matrices(grad_lse.unsqueeze(-1), call)
        self._dq = torch.zeros_like(self._q) if wants.q else None
        self._dk = torch.zeros_like(self._k) if wants.k else None
        self._dv = torch.zeros_like(self._v) if wants.v else None
        self._buffers = Buffers(steps, 3, self._q)
        self._scorer = Scorer(program, call, self._buffers, keep_raw=True)
        self._sums = CaptureSums(call, wants)
        self._score_terms = self._sums.of_score(lowered.derivative)
        self._sink_terms = self._sums.of(program.sink)
        self._dropout_terms = self._sums.of(program.dropout)
        self._weight_terms = self._sums.of(program.weights)
        self._weight_slope = const(0.0)
        if program.weights is not None:
            self._weight_slope = vjp(program.weights, _ONE).get(SCORE, const(0.0))
        self._scores_matter = bool(wants.q or wants.k or self._score_terms)

    def add(self, step: Step) -> None:
        """Add what the rows of ``step`` contribute."""
        place = place_of(step, self._call)
        queries, grad_out = place.queries(self._q), place.queries(self._grad_out)
        lse = place.queries(self._lse)
        dead = lse == -torch.inf
        delta = (grad_out * place.queries(self._out)).sum(-1, keepdim=True)
        if self._grad_lse is not None:
            delta = delta - place.queries(self._grad_lse)
        delta = torch.where(dead, 0.0, delta)
        # exp(score - inf) is 0: rows with no live pair have no weights.
        lse = torch.where(dead, torch.inf, lse)
        dq = queries.new_zeros(queries.shape) if self._dq is not None else None
        for span in step.spans:
            columns = slice(*span.columns)
            keys, values = self._k[place.matrices, columns], self._v[place.matrices, columns]
            scored = self._scorer.span(step, place, span, queries, keys)
            d_score = self._weights(step, place, span, scored, lse, delta, grad_out, values)
            if not self._scores_matter:
                continue
            pairs = place.pairs(d_score)
            self._sums.add(self._score_terms, pairs, scored.tile)
            scale = self._call.scale
            if self._slope.op is Op.CONST:
                scale *= float(self._slope.value or 0.0)
            else:
                (slope,) = scored.tile.evaluate(self._slope)
                pairs.copy_(gated(pairs, pairs * slope))
            if dq is not None:
                dq.baddbmm_(d_score, keys, alpha=scale)
            if self._dk is not None:
                target = self._dk[place.matrices, columns]
                target.baddbmm_(d_score.mT, queries, alpha=scale)
        if dq is not None and self._dq is not None:
            place.store(self._dq, dq)
        if self._sink_terms and self._program.sink is not None:
            tile = self._scorer.expressions.tile(step, (0, 1), place.pairs(lse))
            (sink,) = tile.evaluate(self._program.sink)
            d_sink = -torch.exp(sink - place.pairs(lse)) * place.pairs(delta)
            self._sums.add(self._sink_terms, d_sink, tile)

    def _weights(
        self,
        step: Step,
        place: Place,
        span: Span,
        scored: Scored,
        lse: torch.Tensor,
        delta: torch.Tensor,
        grad_out: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """The final score's gradient, after adding dV; overwrites the final scores."""
        program = self._program
        final = place.pairs(scored.final)
        own = self._scorer.expressions.tile(step, span.columns, final)
        if program.weights is None:
            weights = _exp_(program, scored.final.sub_(lse))
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
            self._dv[place.matrices, slice(*span.columns)].baddbmm_(kept.mT, grad_out)
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
            slopes.sub_(delta).mul_(weights)
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
