"""torch's own attention for CPUs, as one call each way."""

from __future__ import annotations

import torch

flash_attention = torch._C._VariableFunctions._scaled_dot_product_flash_attention_for_cpu  # type: ignore[attr-defined]
"""(q, k, v, is_causal=, attn_mask=, scale=): output, and log-sum-exp (batch, heads, rows).

To look it up in ``torch.ops`` takes 9 us.
"""
flash_gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
"""(grad_out, q, k, v, out, lse, dropout, is_causal, attn_mask=, scale=): dQ, dK and dV."""
