"""Sums that a backward makes beside dQ, dK and dV.

They are for gradients of what a score's factor and columns mention, and to tell that dK or dV are
not finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...memory_order import empty_fp32
from ..capture_sums import learned_in_kernel
from .feature import Buffer, Feature

if TYPE_CHECKING:
    import torch

    from ...base import Call
    from ...kernels.config import Config
    from .feature import ModuleSpec


def _of_column(spec: ModuleSpec) -> bool:
    return not spec.is_forward and learned_in_kernel(spec.lowered, spec.facts).column


def _of_factor(spec: ModuleSpec) -> bool:
    return not spec.is_forward and learned_in_kernel(spec.lowered, spec.facts).factor


def _checks_results(spec: ModuleSpec) -> bool:
    return spec.lowered.program.bounded and not spec.has_tangents


def _column_sums(call: Call, config: Config) -> torch.Tensor:
    """(batch, heads, kv_len) fp32: sums of dS."""
    return empty_fp32(call.k, *call.q.shape[:2], call.k.shape[2])


def _factor_sums(call: Call, config: Config) -> torch.Tensor:
    """(batch, heads, parts) fp32: sums of K * dK before the scale."""
    return empty_fp32(call.k, *call.q.shape[:2], 2 * -(-call.k.shape[2] // config.block_n))


def _checks(call: Call, config: Config) -> torch.Tensor:
    """(2, batch, kv_heads, kv_len) fp32: see :attr:`...base.CallGradients.checks`."""
    return empty_fp32(call.k, 2, *call.k.shape[:3])


COLUMN_SUMS = Feature(
    "GRAD_OF_COLUMN", _of_column, sums=(Buffer("COLUMN_SUMS", "*fp32", _column_sums),)
)
FACTOR_SUMS = Feature(
    "GRAD_OF_FACTOR", _of_factor, sums=(Buffer("FACTOR_SUMS", "*fp32", _factor_sums),)
)
CHECKS = Feature("CHECKS_RESULTS", _checks_results, sums=(Buffer("CHECKS", "*fp32", _checks),))
"""Checks of dK and dV have memory of their own; those of outputs are in log-sum-exps."""
