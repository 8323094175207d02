"""torch's own attention for CPUs, as one call each way.

Its kernels take the last stride of operands and of the output for 1. torch checks that of none, and
makes the output like q.
"""

from __future__ import annotations

import torch

from ..log_sum import is_far
from ..memory_order import rows_apart, rows_contiguous

# To look it up in ``torch.ops`` takes 9 us.
_attention = torch._C._VariableFunctions._scaled_dot_product_flash_attention_for_cpu
_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


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
