"""Plan of a backward: the family that makes each gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..kernels.kernel import Task

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Wants
    from ..gradients.plan import GradientPlan
    from ..kernels.kernel import Family


def plan_of(
    families: tuple[Family, ...], lowered: Lowered, call: Call, wanted: Wants
) -> GradientPlan:
    """Plan of gradients and their kernels, by the first family whose backward runs."""
    plan = None
    for family in families:
        plan = family.plan_gradients(lowered, call, wanted)
        if family.why_not(lowered, call, Task.BACKWARD, None, plan.lines) is None:
            break
    assert plan is not None
    return plan
