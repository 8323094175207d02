"""torch's own attention for CPUs, as one call each way.

Its kernels take the last stride of operands and of the output for 1. torch checks that of none, and
makes the output like q.
"""

from __future__ import annotations

import torch

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
