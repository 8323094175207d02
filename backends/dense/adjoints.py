"""The gradients of a program's expressions, pair by pair, from those of a call's results.

Same formulas as the kernels (FlashAttention-2, arXiv 2307.08691, section 3.1): with P the softmax
weights, D dropout's factors, dW = dO V^T and delta = rowsum(dO * O) - dlse, the final score's
gradient is dS = P * (D * dW - delta).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attndsl.ir import SCORE, const
from attndsl.passes.differentiate import vjp

from ..log_sum import log_sum
from .interpret import evaluate, gated
from .row_blocks import group, own_weights, ungroup, where_live

if TYPE_CHECKING:
    from attndsl.ir import Program

    from ..base import Backward, Call
    from .interpret import LeafValues
    from .row_blocks import Dense


@dataclass(frozen=True, slots=True)
class Adjoints:
    """Gradients of the values that expressions have, (batch, heads, q_len, kv_len or 1)."""

    weights: torch.Tensor
    """The weights themselves, before dropout."""
    score: torch.Tensor
    """Gradient of the final score, 0 at dead pairs."""
    own: torch.Tensor | None
    """Gradient of the program's own weights, 0 at dead pairs."""
    sink: torch.Tensor | None
    """Gradient of the sink, for each row."""
    dropout: torch.Tensor | None
    """Gradient of the probability of dropout."""
    final: LeafValues
    """The scope of the program's own weights: the final score is its score."""


def adjoints(program: Program, call: Call, dense: Dense, backward: Backward) -> Adjoints:
    """Gradients of all expressions of ``program``."""
    out, lse, grad_out, grad_lse, _ = backward
    scope, work = dense.scope, dense.score.dtype
    final = replace(scope, score=dense.score)
    d_kept = ungroup(group(grad_out, call) @ call.v.to(grad_out.dtype).mT, call).to(work)
    d_kept = where_live(dense.live, d_kept, 0.0)
    d_weights = d_kept if dense.keep is None else d_kept * dense.keep
    d_own = d_sink = d_p = None
    if program.weights is None:
        denominator = log_sum(lse)
        weights = torch.exp(denominator.taken_off(dense.score))
        weights = where_live(dense.live, weights, 0.0)
        delta = (grad_out.to(work) * out.to(work)).sum(-1)
        if grad_lse is not None:
            delta = delta - grad_lse
        d_score = weights * (d_weights - delta.unsqueeze(-1))
        if program.sink is not None:
            (sink,) = evaluate((program.sink,), scope)
            d_sink = -denominator.of_sink(sink, delta.unsqueeze(-1))
    else:
        weights = own_weights(program.weights, dense)
        d_own = where_live(dense.live, d_weights, 0.0)
        slopes = vjp(program.weights, const(1.0))
        (slope,) = evaluate((slopes.get(SCORE, const(0.0)),), final)
        d_score = gated(d_own, d_own * slope)
    if dense.keep is not None and program.dropout is not None:
        (p,) = evaluate((program.dropout,), scope)
        # keep = 1 / (1 - p), so its derivative by p is keep ** 2; clamped p has none.
        d_p = torch.where((p >= 0) & (p < 1), d_kept * weights * dense.keep**2, 0.0)
    d_score = where_live(dense.live, d_score, 0.0)
    return Adjoints(weights, d_score, d_own, d_sink, d_p, final)
