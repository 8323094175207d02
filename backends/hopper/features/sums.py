"""Sums that a backward makes beside dQ, dK and dV.

They are for gradients of what a score's factor and columns mention, and to tell that dK or dV are
not finite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..capture_sums import learned_in_kernel
from .feature import Feature

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .feature import ModuleSpec


def _of_column(spec: ModuleSpec) -> bool:
    return not spec.is_forward and learned_in_kernel(spec.lowered, spec.facts).column


def _of_factor(spec: ModuleSpec) -> bool:
    return not spec.is_forward and learned_in_kernel(spec.lowered, spec.facts).factor


def _checks_results(spec: ModuleSpec) -> bool:
    return spec.lowered.program.bounded and not spec.has_tangents


def _checks(spec: ModuleSpec) -> Sequence[str]:
    return () if spec.is_forward else ["CHECKS"]


COLUMN_SUMS = Feature("GRAD_OF_COLUMN", _of_column, given=lambda spec: ["COLUMN_SUMS"])
FACTOR_SUMS = Feature("GRAD_OF_FACTOR", _of_factor, given=lambda spec: ["FACTOR_SUMS"])
CHECKS = Feature("CHECKS_RESULTS", _checks_results, given=_checks)
"""Checks of dK and dV have memory of their own; those of outputs are in log-sum-exps."""
