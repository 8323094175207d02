"""Forward-mode derivatives of a call by the program's symbolic derivative, in torch operations.

With P the softmax weights, D dropout's factors and a dot for the derivative along the tangents:
dot(lse) = sum P dot(score), dot(P) = P (dot(score) - dot(lse)), dot(out) = dot(P D) V + P D dot(V);
the sums run over a row's pairs and its sink.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attndsl.ir import SCORE, Op, const
from attndsl.passes.differentiate import vjp

from ..log_sum import log_sum, of_one_number
from .interpret import evaluate, sides_of, times
from .row_blocks import attend_pairs, dense_pairs, group, own_weights, ungroup, where_live
from .row_lookups import clamped_indices, product_of_rows, rows_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from ..base import Call, Tangents
    from .interpret import LeafValues

_ONE = const(1.0)


def tangent(
    lowered: Lowered, call: Call, moved: Tangents, first_row: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Derivatives of ``out`` and ``lse`` along ``moved``.

    Args:
        lowered: The program.
        call: Its arguments; memory is proportional to its q_len * kv_len.
        moved: The direction.
        first_row: Row of the first query, among those of dropout.
    """
    program = lowered.program
    dense = dense_pairs(program, call, first_row)
    scope, work = dense.scope, dense.score.dtype
    raw = torch.zeros_like(dense.score)
    if moved.q is not None:
        raw = raw + ungroup(group(moved.q, call) @ call.k.mT, call).to(work)
    if moved.k is not None:
        raw = raw + ungroup(group(call.q, call) @ moved.k.mT, call).to(work)
    # Of the score as written, whose factors are those of the derivative that kernels use.
    factors = {item.load: item.factor for item in lowered.derivative.tensors}
    factors |= {item.product: item.factor for item in lowered.derivative.products}
    terms = [(SCORE, lowered.derivative.score), *factors.items()]
    terms += [(leaf, f) for leaf, f in _leaves(program.score).items() if leaf.op is Op.PARAM]
    d_score = where_live(
        dense.live, _along(terms, scope, raw * call.scale, moved.captures), 0.0
    ).expand(dense.score.shape)
    if program.weights is None:
        _, lse = attend_pairs(program, call, replace(dense, keep=None))
        bound = log_sum(lse)
        weights = torch.exp(bound.taken_off(dense.score))
        d_lse = times(weights, d_score).sum(-1, keepdim=True)
        if program.sink is not None:
            (sink,) = evaluate((program.sink,), scope)
            sink_terms = list(_leaves(program.sink).items())
            d_sink = _along(sink_terms, scope, None, moved.captures)
            d_lse = d_lse + bound.of_sink(sink, d_sink)
        d_weights = times(weights, d_score - d_lse)
    else:
        weights = own_weights(program.weights, dense)
        final = replace(scope, score=dense.score)
        own_terms = list(_leaves(program.weights).items())
        d_weights = where_live(dense.live, _along(own_terms, final, d_score, moved.captures), 0.0)
        d_lse = torch.zeros_like(dense.score[..., :1])
    if dense.keep is not None and program.dropout is not None:
        d_weights = d_weights * dense.keep
        (p,) = evaluate((program.dropout,), scope)
        d_p = _along(list(_leaves(program.dropout).items()), scope, None, moved.captures)
        # keep = 1 / (1 - p), so its derivative by p is keep ** 2; clamped p has none.
        d_keep = torch.where((p >= 0) & (p < 1), d_p * dense.keep**2, 0.0)
        d_weights = d_weights + weights * d_keep
        weights = weights * dense.keep
    weights, d_weights = (x.expand(raw.shape).to(call.v.dtype) for x in (weights, d_weights))
    d_out = group(d_weights, call) @ call.v
    if moved.v is not None:
        d_out = d_out + group(weights, call) @ moved.v
    return ungroup(d_out, call), of_one_number(d_lse.squeeze(-1))


def _leaves(root: Node) -> dict[Node, Node]:
    return vjp(root, _ONE)


def _along(
    terms: list[tuple[Node, Node]],
    scope: LeafValues,
    score: torch.Tensor | None,
    captures: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """The sum of each factor times its leaf's tangent: four dims, of full size or 1."""
    total = torch.zeros((1, 1, 1, 1), dtype=scope.dtype, device=scope.device)
    for leaf, factor in terms:
        if leaf.op is Op.DOT:
            moved = _moved_product(leaf, scope, captures)
        else:
            moved = score if leaf.op is Op.SCORE else captures.get(str(leaf.value))
        if moved is None or moved.numel() == 0:
            continue
        moved = moved.to(scope.dtype)
        if leaf.op is Op.LOAD and leaf.args:
            moved = moved[clamped_indices(evaluate(leaf.args, scope), moved)]
        elif leaf.op not in (Op.SCORE, Op.DOT):
            moved = moved.reshape(1, 1, 1, 1)
        (value,) = evaluate((factor,), scope)
        total = total + times(moved, value)
    return total


def _moved_product(
    item: Node, scope: LeafValues, captures: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """The tangent of a DOT: each side's with the other side."""
    both = sides_of(item, scope)
    total = None
    for moving in (0, 1):
        tangent_of_side = captures.get(both[moving][0])
        if tangent_of_side is None:
            continue
        tensors = [scope.tensors[name] for name, _ in both]
        tensors[moving] = tangent_of_side
        rows = [
            rows_at(tensor.to(scope.dtype), indices)
            for tensor, (_, indices) in zip(tensors, both, strict=True)
        ]
        part = product_of_rows(*rows)
        total = part if total is None else total + part
    return total
