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
- The scores of dead pairs may be NaN. Rows of k and v may not: 0 * NaN is NaN in a matrix product.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.ir import SCORE, Op, const
from attndsl.passes.differentiate import vjp

from ..base import Backend, Gradients, check_meaning
from ..memory_order import arranged, arranged_like, memory_order, wide_dtype
from .interpret import Scope, check_lookups, evaluate, gated, sides_of
from .pairs import Dense, attend_pairs, dense_pairs, group, own_weights, ungroup, where_live
from .rows import add_elements, add_rows, gradients_of_rows, rows_at

if TYPE_CHECKING:
    from attndsl.ir import Node, Program
    from attndsl.passes.differentiate import Derivative
    from attndsl.pipeline import Lowered

    from ..base import Backward, Call, Wants


class ReferenceBackend(Backend):
    """Runs every program on every device, in memory proportional to q_len * kv_len.

    Args:
        checked: Raise :class:`~attndsl.errors.ArgumentError` where a live pair looks a tensor up
            out of range, in place of clamping.
    """

    name = "reference"
    differentiable = True

    def __init__(self, checked: bool = False) -> None:
        self.checked = checked

    def why_not(self, device: torch.device) -> str | None:
        """None: it runs wherever torch does."""
        return None

    def check(self, lowered: Lowered, call: Call) -> None:
        """Refuse what has no meaning; see :func:`~..base.check_meaning`."""
        check_meaning(lowered.program)

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`; torch differentiates it.

        Raises:
            ArgumentError: In checked mode, for a lookup out of range at a live pair.
        """
        program = lowered.program
        order = memory_order(call.q, call.v.shape[3])
        if torch.is_grad_enabled():
            q, k, v = map(_ordered, (call.q, call.k, call.v))
            call = call._replace(q=q, k=k, v=v)
        inputs = (call.q, call.k, call.v, *call.tensors.values(), *call.params.values())
        anchors = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        out, lse = attend_pairs(program, call, self._dense(program, call))
        # No views: torch refuses to write to views of what an autograd function or no_grad made.
        out, lse = order.empty(out).copy_(out), lse.clone()
        if anchors and torch.is_grad_enabled():
            out = _Anchor.apply(out, *anchors)  # type: ignore[no-untyped-call]
            lse = _Anchor.apply(lse, *anchors)  # type: ignore[no-untyped-call]
        return out, lse

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> Gradients:
        """Gradients by the program's symbolic derivative, without torch's autograd.

        Same formulas as the kernels (FlashAttention-2, arXiv 2307.08691, section 3.1): with P the
        softmax weights, D dropout's factors, dW = dO V^T and delta = rowsum(dO * O) - dlse,
        the final score's gradient is dS = P * (D * dW - delta).
        """
        with torch.no_grad():
            return self._backward(lowered, call, backward)

    def _backward(self, lowered: Lowered, call: Call, backward: Backward) -> Gradients:
        out, lse, grad_out, grad_lse, wants = backward
        program, derivative = lowered.program, lowered.derivative
        dense = self._dense(program, call)
        scope, work = dense.scope, dense.score.dtype
        final = replace(scope, score=dense.score)
        sums = _Sums(call, wants, work)
        grad_rows = group(grad_out, call)
        d_kept = ungroup(grad_rows @ call.v.to(grad_out.dtype).mT, call).to(work)
        d_weights = d_kept if dense.keep is None else d_kept * dense.keep
        if program.weights is None:
            denominator = torch.where(lse == -torch.inf, torch.inf, lse).unsqueeze(-1)
            weights = torch.exp(dense.score - denominator)
            delta = (grad_out.to(work) * out.to(work)).sum(-1)
            if grad_lse is not None:
                delta = delta - grad_lse
            d_score = weights * (d_weights - delta.unsqueeze(-1))
            if program.sink is not None:
                (sink,) = evaluate((program.sink,), scope)
                d_sink = -torch.exp(sink - denominator) * delta.unsqueeze(-1)
                sums.add_root(program.sink, d_sink, scope)
        else:
            weights = own_weights(program.weights, dense)
            d_own = where_live(dense.live, d_weights, 0.0)
            sums.add_root(program.weights, d_own, final)
            slopes = vjp(program.weights, const(1.0))
            (slope,) = evaluate((slopes.get(SCORE, const(0.0)),), final)
            d_score = gated(d_own, d_own * slope)
        if dense.keep is not None and program.dropout is not None:
            (p,) = evaluate((program.dropout,), scope)
            # keep = 1 / (1 - p), so its derivative by p is keep ** 2; clamped p has none.
            d_p = torch.where((p >= 0) & (p < 1), d_kept * weights * dense.keep**2, 0.0)
            sums.add_root(program.dropout, d_p, scope)
        d_score = where_live(dense.live, d_score, 0.0)
        sums.add_score(derivative, d_score, scope)
        (slope,) = evaluate((derivative.score,), scope)
        d_raw = group((gated(d_score, d_score * slope) * call.scale).to(call.q.dtype), call)
        kept = weights if dense.keep is None else weights * dense.keep
        kept = group(kept.to(call.v.dtype), call)
        # Wide ones are products of rounded operands, not rounded themselves.
        kind = wide_dtype(wants.wide)
        d_raw, kept, grad_rows = (x.to(kind or call.q.dtype) for x in (d_raw, kept, grad_rows))
        d_q = ungroup(d_raw @ call.k.to(d_raw.dtype), call) if wants.q else None
        d_k = d_raw.mT @ group(call.q, call).to(d_raw.dtype) if wants.k else None
        d_v = kept.mT @ grad_rows if wants.v else None
        return Gradients(
            q=None if d_q is None else arranged_like(d_q, call.q, kind),
            k=None if d_k is None else arranged_like(d_k, call.k, kind),
            v=None if d_v is None else arranged_like(d_v, call.v, kind),
            tensors={name: sums.tensor(name) for name in wants.tensors},
            params={name: sums.param(name) for name in wants.params},
        )

    def _dense(self, program: Program, call: Call) -> Dense:
        dense = dense_pairs(program, call)
        if self.checked:
            everywhere = torch.ones_like(dense.score, dtype=torch.bool)
            live = everywhere if dense.live is None else everywhere & dense.live
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


class _Sums:
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

    def add_score(self, derivative: Derivative, seed: torch.Tensor, scope: Scope) -> None:
        """Add ``seed`` times the derivatives of the final score by all that it mentions."""
        for item in derivative.tensors:
            self.add_tensor(item.load, item.factor, seed, scope)
        for product in derivative.products:
            self.add_product(product.product, product.factor, seed, scope)
        for part in derivative.params:
            self.add_param(part.name, part.factor, seed, scope)

    def add_root(self, root: Node, seed: torch.Tensor, scope: Scope) -> None:
        """Add ``seed`` times the derivatives of ``root`` by all that it mentions."""
        for leaf, factor in vjp(root, const(1.0)).items():
            if leaf.op is Op.LOAD:
                self.add_tensor(leaf, factor, seed, scope)
            elif leaf.op is Op.PARAM:
                self.add_param(str(leaf.value), factor, seed, scope)
            elif leaf.op is Op.DOT:
                self.add_product(leaf, factor, seed, scope)

    def add_tensor(self, load: Node, factor: Node, seed: torch.Tensor, scope: Scope) -> None:
        """Add ``seed * factor`` of each pair at the element that ``load`` looks up there."""
        name = str(load.value)
        if name not in self.tensors or self.tensors[name].numel() == 0:
            return
        total = self.tensors[name]
        value, *indices = evaluate((factor, *load.args), scope)
        part = gated(seed, seed * value)
        add_elements(total, tuple(indices), part)

    def add_product(self, item: Node, factor: Node, seed: torch.Tensor, scope: Scope) -> None:
        """Add ``seed * factor`` of each pair, times each row of a DOT, to the other row."""
        both = sides_of(item, scope)
        if not any(name in self.tensors for name, _ in both):
            return
        (value,) = evaluate((factor,), scope)
        rows = [rows_at(scope.tensors[name].to(scope.dtype), places) for name, places in both]
        parts = gradients_of_rows(gated(seed, seed * value), *rows)
        for (name, indices), part in zip(both, parts, strict=True):
            total = self.tensors.get(name)
            if total is not None and total.numel():
                add_rows(total, indices, part)

    def add_param(self, name: str, factor: Node, seed: torch.Tensor, scope: Scope) -> None:
        """Add the sum of ``seed * factor`` over all pairs."""
        if name in self.params:
            (value,) = evaluate((factor,), scope)
            self.params[name] = self.params[name] + gated(seed, seed * value).sum()
