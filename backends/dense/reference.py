"""Dense attention in plain torch: the oracle of every test.

Precision. With fp64 inputs everything is fp64 (the *golden* result). With fp32 inputs everything is
fp32. With fp16 and bf16 inputs it does what eager attention does in that dtype (the *ref* result):
both matrix products run in the inputs' dtype and round their results to it; the raw score is then
scaled, changed, masked and normalised in fp32, and the weights are rounded back before they meet v.

What is defined here for all backends:

- A pair is live if the mask holds. A live pair whose score is -inf has weight 0.
- A row with no live pair, or with -inf scores only: output 0, lse -inf, all gradients 0, with a
  sink as well as without.
- ``lse`` is the natural logarithm of the softmax denominator, the sink's term included (which is
  what the backward needs, and what attention sinks do in GPT-OSS style kernels). Programs with
  ``weights`` have no denominator: lse is 0, and -inf for rows with no live pair.
- Dropout multiplies weights by 0 or 1 / (1 - p) after normalisation; lse does not see it. p is
  clamped to 0..1, and NaN counts as 1; calls refuse other numbers that the host knows before.
  ``philox`` says which pairs are dropped. The factor 1 / (1 - p) is differentiated by p, the choice
  of pairs is not.
- The scores of dead pairs may be NaN. Rows of k and v may not, as 0 * NaN is NaN in a matrix
  product, unless tensors bound the keys of each row (``Program.bounded``): what is not finite then
  reaches live pairs alone.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from attndsl.errors import AttnDSLError, UnsupportedError
from attndsl.ir import Op, const, reads_score
from attndsl.passes.differentiate import vjp

from ..base import Backend, CallGradients
from ..memory_order import arranged, arranged_like, memory_order, wide_dtype
from .adjoints import adjoints
from .interpret import LeafValues, check_lookups, evaluate, gated, sides_of
from .nan_checks import Watched, check_gradient, check_results
from .row_blocks import Dense, attend_pairs, dense_pairs, group, live_product, live_to_part, ungroup
from .row_lookups import add_elements, add_rows, gradients_of_rows, rows_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attndsl.ir import Node, Program
    from attndsl.passes.differentiate import Derivative
    from attndsl.pipeline import Lowered
    from attndsl.source import Source

    from ..base import Backward, Call, Wants


def check_meaning(program: Program) -> None:
    """Refuse a sink beside ``weights``, and a dropout probability that scores decide.

    Raises:
        UnsupportedError: No backend could say what these mean.
    """
    p = program.dropout
    if p is not None and reads_score(p):
        raise UnsupportedError(
            "the probability of 'dropout' depends on the score",
            p.span,
            "write it in terms of b, h, q, kv, params and tensors",
        )
    if program.sink is not None and program.weights is not None:
        raise UnsupportedError(
            "'sink' adds to the softmax denominator, and these 'weights' have none",
            program.sink.span,
            "drop the sink, or write weights = softmax(score)",
        )


class ReferenceBackend(Backend):
    """Runs every program on every device, in memory proportional to q_len * kv_len.

    Args:
        checked: Raise :class:`~attndsl.errors.ArgumentError` where a live pair looks a tensor up
            out of range, in place of clamping, and :class:`~attndsl.errors.NonFiniteError` where a
            result or a gradient is not finite.
        source: The text that errors of a backward point into.
    """

    name = "reference"
    differentiable = True

    def __init__(self, checked: bool = False, source: Source | None = None) -> None:
        self.checked = checked
        self._source = source

    def why_not(self, device: torch.device) -> str | None:
        """None: it runs wherever torch does."""
        return None

    def check(self, lowered: Lowered, call: Call) -> None:
        """Refuse what has no meaning; see :func:`check_meaning`."""
        check_meaning(lowered.program)

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`; torch differentiates it.

        Raises:
            ArgumentError: In checked mode, for a lookup out of range at a live pair.
            NonFiniteError: In checked mode, for a row of ``out`` or ``lse`` that is not finite.
        """
        program = lowered.program
        order = memory_order(call.q, call.v.shape[3])
        watched = None
        if torch.is_grad_enabled():
            q, k, v = map(_ordered, (call.q, call.k, call.v))
            call = call._replace(q=q, k=k, v=v)
            if self.checked:
                watched = Watched(lowered, call, self._pointing)
                call = watched.inputs(call)
        inputs = (call.q, call.k, call.v, *call.tensors.values(), *call.params.values())
        anchors = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        dense = self._dense(program, call)
        out, lse = attend_pairs(program, call, dense)
        if self.checked:
            with self._pointed(), torch.no_grad():
                check_results(program, call, dense, out, lse)
        if watched is not None:
            out, lse = watched.results(out, lse)
        # No views: torch refuses to write to views of what an autograd function or no_grad made.
        out, lse = order.empty(out).copy_(out), lse.clone()
        if anchors and torch.is_grad_enabled():
            out = _Anchor.apply(out, *anchors)  # type: ignore[no-untyped-call]
            lse = _Anchor.apply(lse, *anchors)  # type: ignore[no-untyped-call]
        return out, lse

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> CallGradients:
        """Gradients by the program's symbolic derivative, without torch's autograd.

        See :mod:`.adjoints` for the formulas.

        Raises:
            NonFiniteError: In checked mode, for a gradient that is not finite.
        """
        with torch.no_grad():
            return self._backward(lowered, call, backward)

    def _backward(self, lowered: Lowered, call: Call, backward: Backward) -> CallGradients:
        grad_out, wants = backward.grad_out, backward.wanted
        program, derivative = lowered.program, lowered.derivative
        dense = self._dense(program, call)
        found = adjoints(program, call, dense, backward)
        scope, d_score = dense.scope, found.score
        sums = GradientSums(call, wants, dense.score.dtype)
        for root, seed, within in (
            (program.sink, found.sink, scope),
            (program.weights, found.own, found.final),
            (program.dropout, found.dropout, scope),
        ):
            if root is not None and seed is not None:
                sums.add_root(root, seed, within)
        sums.add_score(derivative, d_score, scope)
        (slope,) = evaluate((derivative.score,), scope)
        d_raw = group((gated(d_score, d_score * slope) * call.scale).to(call.q.dtype), call)
        kept = found.weights if dense.keep is None else found.weights * dense.keep
        kept = group(kept.to(call.v.dtype), call)
        grad_rows = group(grad_out, call)
        # Wide ones are products of rounded operands, not rounded themselves.
        kind = wide_dtype(wants.wide)
        d_raw, kept, grad_rows = (x.to(kind or call.q.dtype) for x in (d_raw, kept, grad_rows))
        live = live_to_part(program, call, dense)
        by_key = None if live is None else live.mT
        q = group(call.q, call).to(d_raw.dtype)
        d_q = ungroup(live_product(d_raw, call.k.to(d_raw.dtype), live), call) if wants.q else None
        d_k = live_product(d_raw.mT, q, by_key) if wants.k else None
        d_v = live_product(kept.mT, grad_rows, by_key) if wants.v else None
        made = CallGradients(
            q=None if d_q is None else arranged_like(d_q, call.q, kind),
            k=None if d_k is None else arranged_like(d_k, call.k, kind),
            v=None if d_v is None else arranged_like(d_v, call.v, kind),
            tensors={name: sums.tensor(name) for name in wants.tensors},
            params={name: sums.param(name) for name in wants.params},
        )
        if self.checked:
            rows = {"q": made.q, "k": made.k, "v": made.v}
            for name, grad in {**rows, **made.tensors, **made.params}.items():
                if grad is not None:
                    with self._pointed():
                        check_gradient(lowered, call, dense, backward, name, grad)
        return made

    def _pointing(self, error: AttnDSLError) -> AttnDSLError:
        """``error``, which points into the program's own text from now on."""
        if error.span is not None and self._source is not None:
            error.span = error.span.within(self._source)
        return error

    @contextmanager
    def _pointed(self) -> Iterator[None]:
        try:
            yield
        except AttnDSLError as error:
            self._pointing(error)
            raise

    def _dense(self, program: Program, call: Call) -> Dense:
        dense = dense_pairs(program, call)
        if self.checked:
            everywhere = torch.ones_like(dense.score, dtype=torch.bool)
            live = everywhere if dense.live is None else everywhere & dense.live
            with self._pointed():
                check_lookups(program.roots(), dense.scope, live)
        return dense


class _Anchor(torch.autograd.Function):
    """The first argument, with zero gradients for the others where they have no part in it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.likes = [(x.shape, x.dtype, x.device) for x in inputs]
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (torch.zeros(s, dtype=t, device=d) for s, t, d in ctx.likes)
        return (grad, *zeros)


class _Ordered(torch.autograd.Function):
    """The argument itself, whose gradient lies in memory as it does."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.order = memory_order(value, value.shape[3])
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return arranged(grad, ctx.order)


def _ordered(value: torch.Tensor) -> torch.Tensor:
    if not value.requires_grad:
        return value
    found: torch.Tensor = _Ordered.apply(value)  # type: ignore[no-untyped-call]
    return found


class GradientSums:
    """Gradients of captured tensors and params, added up from all expressions of a program."""

    def __init__(self, call: Call, wants: Wants, work: torch.dtype) -> None:
        self._call = call
        self.tensors = {
            name: torch.zeros(call.tensors[name].shape, dtype=work, device=call.q.device)
            for name in wants.tensors
        }
        self.params = {
            name: torch.zeros((), dtype=work, device=call.q.device) for name in wants.params
        }

    def tensor(self, name: str) -> torch.Tensor:
        """The gradient of a tensor, in its dtype."""
        return self.tensors[name].to(self._call.tensors[name].dtype)

    def param(self, name: str) -> torch.Tensor:
        """The gradient of a param, in its dtype if it came as a tensor."""
        value = self._call.params[name]
        total = self.params[name]
        return total.to(value.dtype) if isinstance(value, torch.Tensor) else total

    def add_score(self, derivative: Derivative, seed: torch.Tensor, scope: LeafValues) -> None:
        """Add ``seed`` times the derivatives of the final score by all that it mentions."""
        for item in derivative.tensors:
            self.add_tensor(item.load, item.factor, seed, scope)
        for product in derivative.products:
            self.add_product(product.product, product.factor, seed, scope)
        for part in derivative.params:
            self.add_param(part.name, part.factor, seed, scope)

    def add_root(self, root: Node, seed: torch.Tensor, scope: LeafValues) -> None:
        """Add ``seed`` times the derivatives of ``root`` by all that it mentions."""
        for leaf, factor in vjp(root, const(1.0)).items():
            self.add_leaf(leaf, factor, seed, scope)

    def add_leaf(self, leaf: Node, factor: Node, seed: torch.Tensor, scope: LeafValues) -> None:
        """Add ``seed * factor`` to the gradient of a float leaf, if that is wanted."""
        if leaf.op is Op.LOAD:
            self.add_tensor(leaf, factor, seed, scope)
        elif leaf.op is Op.PARAM:
            self.add_param(str(leaf.value), factor, seed, scope)
        elif leaf.op is Op.DOT:
            self.add_product(leaf, factor, seed, scope)

    def add_tensor(self, load: Node, factor: Node, seed: torch.Tensor, scope: LeafValues) -> None:
        """Add ``seed * factor`` of each pair at the element that ``load`` looks up there."""
        name = str(load.value)
        if name not in self.tensors or self.tensors[name].numel() == 0:
            return
        total = self.tensors[name]
        value, *indices = evaluate((factor, *load.args), scope)
        part = gated(seed, seed * value)
        add_elements(total, tuple(indices), part)

    def add_product(self, item: Node, factor: Node, seed: torch.Tensor, scope: LeafValues) -> None:
        """Add ``seed * factor`` of each pair, times each row of a DOT, to the other row."""
        both = sides_of(item, scope)
        if not any(name in self.tensors for name, _ in both):
            return
        (value,) = evaluate((factor,), scope)
        tensors = [self.rows_of(scope.tensors[name].to(scope.dtype)) for name, _ in both]
        rows = [rows_at(x, places) for x, (_, places) in zip(tensors, both, strict=True)]
        parts = gradients_of_rows(gated(seed, seed * value), *rows)
        for (name, indices), part in zip(both, parts, strict=True):
            total = self.tensors.get(name)
            if total is not None and total.numel():
                add_rows(total, indices, part)

    @staticmethod
    def rows_of(tensor: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor as the gradient of another's takes them."""
        return tensor

    def add_param(self, name: str, factor: Node, seed: torch.Tensor, scope: LeafValues) -> None:
        """Add the sum of ``seed * factor`` over all pairs."""
        if name in self.params:
            (value,) = evaluate((factor,), scope)
            self.params[name] = self.params[name] + gated(seed, seed * value).sum()
