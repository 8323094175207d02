"""torch's own attention for CPUs, as one call each way."""

from __future__ import annotations

import torch

from ..log_sum import is_far

flash_attention = torch._C._VariableFunctions._scaled_dot_product_flash_attention_for_cpu
"""(q, k, v, is_causal=, attn_mask=, scale=): output, and log-sum-exp (batch, heads, rows).

To look it up in ``torch.ops`` takes 9 us.
"""
flash_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""(grad_out, q, k, v, out, lse, dropout, is_causal, attn_mask=, scale=): dQ, dK and dV."""


def is_spoilt(out: torch.Tensor, lse: torch.Tensor) -> bool:
    """Whether torch's results may not be used.

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
