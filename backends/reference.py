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
- Dropout multiplies weights by 0 or 1 / (1 - p) after normalisation, p clamped to 0..1; lse does
  not see it. ``philox`` says which pairs are dropped. The factor 1 / (1 - p) is differentiated by
  p, the choice of pairs is not.
- The scores of dead pairs may be NaN. Rows of k and v may not: 0 * NaN is NaN in a matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.ir import SCORE, Op, const
from attndsl.passes.differentiate import vjp

from .base import Gradients, check_meaning
from .interpret import Scope, check_lookups, clamped_indices, evaluate, gated, scope_of
from .philox import uniform

if TYPE_CHECKING:
    from attndsl.ir import Node, Program
    from attndsl.pipeline import Lowered

    from .base import Call, Wants


@dataclass(frozen=True, slots=True)
class _Dense:
    """All pairs of a call, up to the final score. Tensors are (batch, heads, q_len, kv_len)."""

    scope: Scope
    """Leaves, with the raw score."""
    live: torch.Tensor | None
    score: torch.Tensor
    """Final, and -inf at dead pairs."""
    keep: torch.Tensor | None
    """Factor of each weight that dropout gives; broadcasts."""


class ReferenceBackend:
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
        """Refuse what has no meaning; see :func:`~.base.check_meaning`."""
        check_meaning(lowered.program)

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~attndsl.backends.base.Backend`; torch differentiates it, once.

        Raises:
            ArgumentError: In checked mode, for a lookup out of range at a live pair.
        """
        program = lowered.program
        dense = self._dense(program, call)
        if program.weights is None:
            weights, lse = _softmax(program, dense)
        else:
            weights = _own_weights(program.weights, dense)
            lse = _liveness(dense).to(dense.score.dtype).log()
        if dense.keep is not None:
            weights = weights * dense.keep
        out = _ungroup(_group(weights.to(call.v.dtype), call) @ call.v, call)
        inputs = (call.q, call.k, call.v, *call.tensors.values(), *call.params.values())
        anchors = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        if anchors and torch.is_grad_enabled():
            out = _Anchor.apply(out, *anchors)  # type: ignore[no-untyped-call]
            lse = _Anchor.apply(lse, *anchors)  # type: ignore[no-untyped-call]
        return out, lse

    def backward(
        self,
        lowered: Lowered,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        wants: Wants,
    ) -> Gradients:
        """Gradients by the program's symbolic derivative, without torch's autograd.

        Same formulas as the kernels (FlashAttention-2, arXiv 2307.08691, section 3.1): with P the
        softmax weights, D dropout's factors, dW = dO V^T and delta = rowsum(dO * O) - dlse,
        the final score's gradient is dS = P * (D * dW - delta).
        """
        with torch.no_grad():
            return self._backward(lowered, call, out, lse, grad_out, grad_lse, wants)

    def _backward(
        self,
        lowered: Lowered,
        call: Call,
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        wants: Wants,
    ) -> Gradients:
        program, derivative = lowered.program, lowered.derivative
        dense = self._dense(program, call)
        scope, work = dense.scope, dense.score.dtype
        final = replace(scope, score=dense.score)
        sums = _Sums(call, wants, work)
        d_kept = _ungroup(_group(grad_out, call) @ call.v.mT, call).to(work)
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
            weights = _own_weights(program.weights, dense)
            d_own = _where_live(dense.live, d_weights, 0.0)
            sums.add_root(program.weights, d_own, final)
            slopes = vjp(program.weights, const(1.0))
            (slope,) = evaluate((slopes.get(SCORE, const(0.0)),), final)
            d_score = gated(d_own, d_own * slope)
        if dense.keep is not None and program.dropout is not None:
            (p,) = evaluate((program.dropout,), scope)
            # keep = 1 / (1 - p), so its derivative by p is keep ** 2; clamped p has none.
            inside = (p >= 0) & (p < 1)
            d_p = torch.where(inside, d_kept * weights * dense.keep**2, 0.0)
            sums.add_root(program.dropout, d_p, scope)
        d_score = _where_live(dense.live, d_score, 0.0)
        for item in derivative.tensors:
            sums.add_tensor(item.load, item.factor, d_score, scope)
        for part in derivative.params:
            sums.add_param(part.name, part.factor, d_score, scope)
        (slope,) = evaluate((derivative.score,), scope)
        d_raw = _group((gated(d_score, d_score * slope) * call.scale).to(call.q.dtype), call)
        kept = weights if dense.keep is None else weights * dense.keep
        return Gradients(
            q=_ungroup(d_raw @ call.k, call) if wants.q else None,
            k=d_raw.mT @ _group(call.q, call) if wants.k else None,
            v=_group(kept.to(call.v.dtype), call).mT @ _group(grad_out, call) if wants.v else None,
            tensors={
                name: sums.tensors[name].to(call.tensors[name].dtype) for name in wants.tensors
            },
            params={name: sums.param(name) for name in wants.params},
        )

    def _dense(self, program: Program, call: Call) -> _Dense:
        work = torch.float64 if call.q.dtype is torch.float64 else torch.float32
        raw = _ungroup(_group(call.q, call) @ call.k.mT, call).to(work) * call.scale
        scope = scope_of(call, raw)
        live = None
        if program.mask is not None:
            with torch.no_grad():
                (live,) = evaluate((program.mask,), scope)
        if self.checked:
            everywhere = torch.ones_like(raw, dtype=torch.bool)
            check_lookups(program.roots(), scope, everywhere if live is None else everywhere & live)
        (score,) = evaluate((program.score,), scope)
        keep = None
        if program.dropout is not None:
            batch, heads, q_len, kv_len = raw.shape
            (p,) = evaluate((program.dropout,), scope)
            drawn = uniform(call.seed, batch, heads, q_len, kv_len, raw.device)
            p = p.clamp(0.0, 1.0)
            kept = (drawn >= p.to(torch.float32)) & (p < 1)
            keep = torch.where(kept, 1 / torch.where(kept, 1 - p, 1.0), 0.0)
        return _Dense(scope, live, _where_live(live, score, -torch.inf).expand(raw.shape), keep)


def _group(rows: torch.Tensor, call: Call) -> torch.Tensor:
    """(batch, heads, q_len, n) as (batch, kv_heads, group * q_len, n): a matrix for each of k's."""
    batch, heads, q_len, width = rows.shape
    kv_heads = call.k.shape[1]
    group = heads // max(1, kv_heads)
    return rows if group == 1 else rows.reshape(batch, kv_heads, group * q_len, width)


def _ungroup(rows: torch.Tensor, call: Call) -> torch.Tensor:
    batch, heads, q_len, _ = call.q.shape
    return rows.reshape(batch, heads, q_len, rows.shape[-1])


def _where_live(live: torch.Tensor | None, value: torch.Tensor, other: float) -> torch.Tensor:
    return value if live is None else torch.where(live, value, other)


def _liveness(dense: _Dense) -> torch.Tensor:
    """Bool (batch, heads, q_len): rows with a live pair."""
    shape = dense.score.shape
    if dense.live is None:
        return torch.full(shape[:-1], shape[-1] > 0, dtype=torch.bool, device=dense.score.device)
    return dense.live.expand(shape).any(-1)


def _softmax(program: Program, dense: _Dense) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and lse, with finite gradients for rows with no live pair."""
    score = dense.score
    rows = (*score.shape[:-1], 1)
    floor = score.new_full(rows, -torch.inf)
    peak = score.detach().amax(-1, keepdim=True) if score.shape[-1] else floor
    dead = peak == -torch.inf
    sink = None
    if program.sink is not None:
        (sink,) = evaluate((program.sink,), dense.scope)
        peak = torch.maximum(peak, sink.detach())
    shift = torch.where(dead, 0.0, peak)
    powers = torch.exp(score - shift)
    total = powers.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(torch.where(dead, -torch.inf, sink - shift))
    total = torch.where(dead, 1.0, total)
    lse = torch.where(dead, -torch.inf, shift + torch.log(total))
    return powers / total, lse.squeeze(-1)


def _own_weights(root: Node, dense: _Dense) -> torch.Tensor:
    (weights,) = evaluate((root,), replace(dense.scope, score=dense.score))
    return _where_live(dense.live, weights, 0.0).expand(dense.score.shape)


class _Anchor(torch.autograd.Function):
    """The first argument, with zero gradients for the others where they have no part in it."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.likes = [(x.shape, x.dtype, x.device) for x in inputs]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (torch.zeros(s, dtype=t, device=d) for s, t, d in ctx.likes)
        return (grad, *zeros)


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

    def param(self, name: str) -> torch.Tensor:
        """The gradient of a param, in its dtype if it came as a tensor."""
        value = self._call.params[name]
        total = self.params[name]
        return total.to(value.dtype) if isinstance(value, torch.Tensor) else total

    def add_root(self, root: Node, seed: torch.Tensor, scope: Scope) -> None:
        """Add ``seed`` times the derivatives of ``root`` by all that it mentions."""
        for leaf, factor in vjp(root, const(1.0)).items():
            if leaf.op is Op.LOAD:
                self.add_tensor(leaf, factor, seed, scope)
            elif leaf.op is Op.PARAM:
                self.add_param(str(leaf.value), factor, seed, scope)

    def add_tensor(self, load: Node, factor: Node, seed: torch.Tensor, scope: Scope) -> None:
        """Add ``seed * factor`` of each pair at the element that ``load`` looks up there."""
        name = str(load.value)
        if name not in self.tensors or self.tensors[name].numel() == 0:
            return
        total = self.tensors[name]
        value, *indices = evaluate((factor, *load.args), scope)
        part = gated(seed, seed * value)
        if not indices:
            self.tensors[name] = total + part.sum()
            return
        shape = torch.broadcast_tensors(*indices)[0].shape  # type: ignore[no-untyped-call]
        places = clamped_indices(tuple(indices), total)
        self.tensors[name] = total.index_put(places, part.sum_to_size(shape), accumulate=True)

    def add_param(self, name: str, factor: Node, seed: torch.Tensor, scope: Scope) -> None:
        """Add the sum of ``seed * factor`` over all pairs."""
        if name in self.params:
            (value,) = evaluate((factor,), scope)
            self.params[name] = self.params[name] + gated(seed, seed * value).sum()
