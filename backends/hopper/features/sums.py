"""Sums that a backward makes for gradients of what a score's factor and columns mention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..learned import learned_in_kernel
from .feature import Feature

if TYPE_CHECKING:
    from .feature import Job


def _of_column(job: Job) -> bool:
    return not job.is_forward and learned_in_kernel(job.lowered, job.facts).column


def _of_factor(job: Job) -> bool:
    return not job.is_forward and learned_in_kernel(job.lowered, job.facts).factor


COLUMN_SUMS = Feature("GRAD_OF_COLUMN", _of_column, given=lambda job: ["COLUMN_SUMS"])
FACTOR_SUMS = Feature("GRAD_OF_FACTOR", _of_factor, given=lambda job: ["FACTOR_SUMS"])
