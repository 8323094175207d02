"""torch's own attention for CPUs, as one call each way, and which calls it may make.

Its kernels take the last stride of operands and of the output for 1. torch checks that of none, and
makes the output like q.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attndsl.foundation.caches import memoised
from attndsl.ir import SCORE, reads_score

from ..log_sum import is_far
from ..memory_order import rows_apart, rows_contiguous

if TYPE_CHECKING:
    from attndsl.ir import Node, Program

    from ..base import Backward, Call

# To look it up in ``torch.ops`` takes 9 us.
_attention = torch._C._VariableFunctions._scaled_dot_product_flash_attention_for_cpu
_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def is_plain(program: Program, call: Call) -> bool:
    """Return True if torch's own attention makes all that the forward needs."""
    return (
        program.score is SCORE and program.weights is None and program.dropout is None
        and not _reads_score(program.mask) and call.q.device.type == "cpu"
        and call.q.shape[3] == call.v.shape[3]
    )  # fmt: skip


@memoised("uses of scores in masks", 256)
def _reads_score(mask: Node | None) -> bool:
    """Cached :func:`~attndsl.ir.reads_score`, which takes 4 us and more."""
    return reads_score(mask)


def is_plain_backward(backward: Backward) -> bool:
    """Return True if torch's own backward makes all that is wanted of a plain call.

    That is gradients of q, k and v by nothing but the output's, from log-sum-exps near 0.
    """
    wants = backward.wanted
    more = backward.grad_lse is not None or wants.tensors or wants.params
    return not more and not is_far(backward.lse[0])


def flash_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output, and log-sum-exp (batch, heads, rows), of operands of any strides."""
    found: tuple[torch.Tensor, torch.Tensor] = _attention(
        rows_apart(q), rows_contiguous(k), rows_contiguous(v), is_causal=is_causal,
        attn_mask=attn_mask, scale=scale,
    )  # fmt: skip
    return found


def flash_gradients(
    grad_out: torch.Tensor, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    results: tuple[torch.Tensor, torch.Tensor], *, scale: float, is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dQ, dK and dV, of operands, output and its gradient of any strides."""
    out, lse = results
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _gradients(
        rows_contiguous(grad_out), *map(rows_contiguous, operands), rows_contiguous(out), lse, 0.0,
        is_causal, attn_mask=attn_mask, scale=scale,
    )  # fmt: skip
    return found


def is_spoilt(out: torch.Tensor, lse: torch.Tensor) -> bool:
    """Tell whether torch's results may not be used.

    Torch takes a row for one without keys, with an output and a log-sum-exp of 0, if all its scores
    are -inf, or NaN and fewer than a vector of the processor holds. A row of which both are right
    is computed again elsewhere, and stays what it is. And its log-sum-exps in fp32 are not exact
    enough if they are far from 0.

    Args:
        out: (..., rows, dim).
        lse: (..., rows).
    """
    if is_far(lse):
        return True
    if int(torch.count_nonzero(lse)) == lse.numel():
        return False
    return bool((out[lse == 0.0] == 0.0).all(-1).any())


def is_nan(*results: torch.Tensor) -> bool:
    """Tell whether dead pairs may have spoilt ``results``; True too where infinities cancel.

    torch adds a mask to scores, and multiplies gradients by weights of 0: a dead pair's NaN or
    infinity becomes a NaN of its row.
    """
    return math.isnan(sum(float(found.sum()) for found in results))
