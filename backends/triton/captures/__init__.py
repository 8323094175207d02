"""Gradients of captures that have kernels of their own: the table of kinds, one module each.

A module says whose gradients it makes, has its kernels with what they add up, and launches them.
Device code lies in ``templates/``. What attention kernels make themselves says
:mod:`...gradients.gradient_plan`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...gradients.gradient_plan import captures_of
from ...gradients.row_col_sums import Lines, line_gradients
from .distance_sums import BY_DISTANCE
from .pair_gradients import BY_PAIRS, OF_STORED
from .scatter_sums import BY_ANY_PAIRS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.pipeline import Lowered

    from ...base import CallGradients, Wants
    from ...gradients.gradient_plan import GradientPlan
    from ...kernels.kernel import Task
    from .kind import BackwardState, OwnKernels

KINDS: tuple[OwnKernels, ...] = (BY_DISTANCE, BY_PAIRS, OF_STORED, BY_ANY_PAIRS)
"""The first that takes a capture makes its gradient; what none takes is sums along lines."""
_BY_NAME: Mapping[str, OwnKernels] = {kind.name: kind for kind in KINDS}
BY_TASK: Mapping[Task, OwnKernels] = {
    task: kind for kind in KINDS for kernel in kind.kernels for task in kernel.tasks
}


def extra_tasks(lowered: Lowered, plan: GradientPlan) -> list[tuple[Task, Wants | None]]:
    """The tasks that :func:`run_extra` launches, and the gradients that each is for."""
    return [each for share in plan.shares for each in _BY_NAME[share.kind].launched(lowered, share)]


def run_extra(state: BackwardState, plan: GradientPlan, found: CallGradients) -> CallGradients:
    """``found`` with the gradients that ``plan`` has kernels of their own for."""
    for share in plan.shares:
        if state.is_empty:
            wants = captures_of(state.call, share.names)
            found = found.plus(*line_gradients(state.call, wants, Lines(), None, None))
        else:
            found = _BY_NAME[share.kind].make(state, share, found)
    return found._replace(stored_ds=None)
