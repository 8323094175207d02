"""Dense attention over some rows of queries, in torch operations alone.

What is computed is what :mod:`.reference` defines. The operations are differentiable any number of
times, and nothing here depends on the value of a tensor, so that ``torch.func`` transforms apply.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..log_sum import of_one_number, settled
from .dropout_counters import kept_pairs
from .interpret import LeafValues, evaluate, scope_of
from .philox import keep_factor

if TYPE_CHECKING:
    from attndsl.ir import Node, Program

    from ..base import Call


@dataclass(frozen=True, slots=True)
class Dense:
    """All pairs of a call, up to the final score. Tensors are (batch, heads, q_len, kv_len)."""

    scope: LeafValues
    """Leaves, with the raw score."""
    live: torch.Tensor | None
    score: torch.Tensor
    """Final, and -inf at dead pairs."""
    keep: torch.Tensor | None
    """Factor of each weight that dropout gives; broadcasts."""


def dense_pairs(program: Program, call: Call, first_row: int = 0) -> Dense:
    """The pairs of ``call``, whose first query is row ``first_row`` of those of its dropout."""
    work = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    raw = ungroup(group(call.q, call) @ call.k.mT, call).to(work) * call.scale
    scope = scope_of(call, raw)
    live = None
    if program.mask is not None:
        with torch.no_grad():
            (live,) = evaluate((program.mask,), scope)
    (score,) = evaluate((program.score,), scope)
    keep = None
    if program.dropout is not None:
        (p,) = evaluate((program.dropout,), scope)
        keep = keep_factor(kept_pairs(call, p, first_row), p)
    return Dense(scope, live, where_live(live, score, -torch.inf).expand(raw.shape), keep)


def attend_pairs(program: Program, call: Call, dense: Dense) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` and ``lse`` of :class:`~..base.Backend` from the pairs of ``call``."""
    if program.weights is None:
        weights, lse = softmax(program, dense)
    else:
        weights = own_weights(program.weights, dense)
        lse = of_one_number(liveness(dense).to(dense.score.dtype).log())
    if dense.keep is not None:
        weights = weights * dense.keep
    weights = group(weights.to(call.v.dtype), call)
    live = live_to_part(program, call, dense)
    if call.wide:  # The product of rounded operands, not rounded itself.
        work = dense.score.dtype
        return ungroup(live_product(weights.to(work), call.v.to(work), live), call), lse
    return ungroup(live_product(weights, call.v, live), call), lse


def live_to_part(program: Program, call: Call, dense: Dense) -> torch.Tensor | None:
    """The live pairs as :func:`group` has them, if :func:`live_product` is to look at them."""
    if not program.bounded or dense.live is None:
        return None
    return group(dense.live.expand(dense.score.shape), call)


def live_product(
    weights: torch.Tensor, rows: torch.Tensor, live: torch.Tensor | None
) -> torch.Tensor:
    """``weights @ rows``; dead pairs add nothing to it, whatever their rows have.

    Args:
        weights: (..., n, m), 0 at dead pairs.
        rows: (..., m, dim).
        live: (..., n, m) bool; None for the plain product, in which 0 times NaN is NaN.
    """
    if live is None:
        return weights @ rows
    wrong = ~rows.isfinite()
    found = weights @ rows.masked_fill(wrong, 0.0)
    reached = live.to(found.dtype) @ wrong.to(found.dtype) > 0.0
    # A factor, since its gradient is NaN too.
    return found * torch.where(reached, torch.nan, 1.0).to(found.dtype)


def group(rows: torch.Tensor, call: Call) -> torch.Tensor:
    """(batch, heads, q_len, n) as (batch, kv_heads, group * q_len, n): a matrix for each of k's."""
    batch, heads, q_len, width = rows.shape
    kv_heads = call.k.shape[1]
    count = heads // max(1, kv_heads)
    return rows if count == 1 else rows.reshape(batch, kv_heads, count * q_len, width)


def ungroup(rows: torch.Tensor, call: Call) -> torch.Tensor:
    """Undo :func:`group`: rows as (batch, heads, q_len, n)."""
    batch, heads, q_len, _ = call.q.shape
    return rows.reshape(batch, heads, q_len, rows.shape[-1])


def where_live(live: torch.Tensor | None, value: torch.Tensor, other: float) -> torch.Tensor:
    """``value`` at live pairs, and ``other`` elsewhere."""
    return value if live is None else torch.where(live, value, other)


def liveness(dense: Dense) -> torch.Tensor:
    """Bool (batch, heads, q_len): rows with a live pair."""
    shape = dense.score.shape
    if dense.live is None:
        return torch.full(shape[:-1], shape[-1] > 0, dtype=torch.bool, device=dense.score.device)
    return dense.live.expand(shape).any(-1)


def softmax(program: Program, dense: Dense) -> tuple[torch.Tensor, torch.Tensor]:
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
    lse = torch.stack((torch.where(dead, -torch.inf, shift), torch.log(total)))
    return powers / total, settled(lse.squeeze(-1))


def own_weights(root: Node, dense: Dense) -> torch.Tensor:
    """The program's own weights (batch, heads, q_len, kv_len), 0 at dead pairs."""
    (weights,) = evaluate((root,), replace(dense.scope, score=dense.score))
    return where_live(dense.live, weights, 0.0).expand(dense.score.shape)
