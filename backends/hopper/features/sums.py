"""Sums that a backward makes for gradients of what a score's factor and columns mention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..learned import learned_in_kernel
from .feature import Feature

if TYPE_CHECKING:
    from .feature import ModuleSpec


def _of_column(spec: ModuleSpec) -> bool:
    return not spec.is_forward and learned_in_kernel(spec.lowered, spec.facts).column


def _of_factor(spec: ModuleSpec) -> bool:
    return not spec.is_forward and learned_in_kernel(spec.lowered, spec.facts).factor


COLUMN_SUMS = Feature("GRAD_OF_COLUMN", _of_column, given=lambda spec: ["COLUMN_SUMS"])
FACTOR_SUMS = Feature("GRAD_OF_FACTOR", _of_factor, given=lambda spec: ["FACTOR_SUMS"])
