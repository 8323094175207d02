"""torch's own attention for CPUs, as one call each way."""

from __future__ import annotations

import torch

flash_attention = torch._C._VariableFunctions._scaled_dot_product_flash_attention_for_cpu
"""(q, k, v, is_causal=, attn_mask=, scale=): output, and log-sum-exp (batch, heads, rows).

To look it up in ``torch.ops`` takes 9 us.
"""
flash_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""(grad_out, q, k, v, out, lse, dropout, is_causal, attn_mask=, scale=): dQ, dK and dV."""


def is_spoilt(out: torch.Tensor, lse: torch.Tensor) -> bool:
    """Whether torch has taken a row for one without keys: its output and log-sum-exp are 0.

    It does so with rows of -inf, and with rows of NaN that have fewer keys than a vector of the
    processor. A row of which both are right is computed again elsewhere, and stays what it is.

    Args:
        out: (..., rows, dim).
        lse: (..., rows).
    """
    if int(torch.count_nonzero(lse)) == lse.numel():
        return False
    return bool((out[lse == 0.0] == 0.0).all(-1).any())
