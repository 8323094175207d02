"""Gradients of what a sink mentions, from each row's statistics.

With s the sink's logit and lse the row's log-sum-exp, s included, its weight is exp(s - lse), and
it weighs a value of zero: the gradient of s is -exp(s - lse) * delta (the softmax's derivative,
with delta = rowsum(dO * O) - dlse), summed over the rows of its head. Sinks: G. Xiao et al.,
Efficient Streaming Language Models with Attention Sinks (arXiv 2309.17453), section 3.

Rows are few beside pairs, so that torch adds them up, in fp64 and in a fixed order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attndsl.ir import leaf_names

from ..log_sum import log_sum
from ..tiled.capture_gradients import CaptureSums
from ..tiled.step_plan import QueryStep
from ..tiled.tile_expressions import Expressions

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, CallGradients, Wants


def without_sinks(lowered: Lowered, wants: Wants) -> Wants:
    """``wants`` but for the tensors and params that the sink alone has gradients for."""
    program, derivative = lowered.program, lowered.derivative
    if program.sink is None:
        return wants
    others = {str(item.load.value) for item in derivative.tensors}
    others |= {item.name for item in derivative.params}
    if program.dropout is not None:
        others |= leaf_names(program.dropout)
    alone = leaf_names(program.sink) - others
    return replace(wants, tensors=wants.tensors - alone, params=wants.params - alone)


def add_sink_gradients(
    lowered: Lowered,
    call: Call,
    lse: torch.Tensor,
    delta: torch.Tensor,
    wants: Wants,
    found: CallGradients,
) -> CallGradients:
    """``found`` with the sink's part of the gradients that ``wants`` names.

    Args:
        lowered: The program, which has a sink.
        call: As of the backward.
        lse: See :mod:`..log_sum`.
        delta: (batch, heads, q_len or more) fp32; what is beyond q_len is not read.
        wants: All gradients that are asked for.
        found: Those that the kernels made, of :func:`without_sinks`.
    """
    sink = lowered.program.sink
    assert sink is not None
    names = leaf_names(sink)
    asked = replace(wants, tensors=wants.tensors & names, params=wants.params & names)
    if not asked.tensors and not asked.params:
        return found
    sums = CaptureSums(call, asked)
    if lse.numel():
        _, batch, heads, q_len = lse.shape
        head = QueryStep((0, batch), (0, heads), (0, 1), ())
        nothing = delta[:, :, :1, None]
        tile = Expressions(call).tile(head, (0, min(1, call.k.shape[2])), nothing)
        (logit,) = tile.evaluate(sink)
        rows = log_sum(lse).of_sink(logit, delta[..., :q_len, None])
        total = -rows.sum(2, keepdim=True, dtype=torch.float64)
        sums.add(sums.of(sink), total, tile)
    return found.plus(sums.tensors(), sums.params())
