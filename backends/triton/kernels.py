"""The table of the portable kernels: one entry a kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from attndsl.passes.tiles import tile_plan

from ..device.library import row_statistics
from ..kernels.arguments import plain_arguments
from ..kernels.config import INTERPRETED
from ..kernels.kernel import FixedKernel, Kernel, Task
from . import tiles
from .captures import KINDS
from .generate import attention_text
from .generate_gradients import COLUMNS, ROWS
from .values_by_distance import KERNEL as DISTANCE_VALUES

if TYPE_CHECKING:
    from ..kernels.config import Config
    from ..kernels.kernel import Job
    from ..kernels.target import Target

_FOUR_WAVES = (4, 2, 1)
"""Forwards gain by four: see M14 in docs/dev/measured.md."""


def _all_shifted(job: Job) -> dict[str, int | bool]:
    """Rows' statistics with a shift each: see ``row_statistics``."""
    return {"FAR": 0}


def _like_dq(job: Job, machine: Target) -> tuple[Config, ...]:
    if machine.target is None:
        return INTERPRETED
    return tiles.BACKWARD_Q.candidates(tiles.widths_of(job.facts), machine.shared)


_of_loop = partial(Kernel, family="triton", arguments=plain_arguments)

FORWARD = _of_loop(
    name="forward",
    tasks=frozenset({Task.FORWARD}),
    entry="attention_forward",
    text=partial(attention_text, None),
    configs=tiles.FORWARD.configs,
    loop=tile_plan.FORWARD,
    loop_name="forward",
    templates=("softmax", "forward"),
    derives=False,
    waves=_FOUR_WAVES,
)
BACKWARD_KV = _of_loop(
    name="backward_kv",
    tasks=frozenset({Task.BACKWARD}),
    entry="attention_backward_kv",
    configs=tiles.BACKWARD_KV.configs,
    loop=tile_plan.BACKWARD_KV,
    loop_name="kv_pass",
    templates=("weights", "backward_kv"),
    text=partial(attention_text, COLUMNS),
    waves=(2, 1),
)
BACKWARD_Q = _of_loop(
    name="backward_q",
    tasks=frozenset({Task.BACKWARD}),
    entry="attention_backward_q",
    configs=tiles.BACKWARD_Q.configs,
    loop=tile_plan.BACKWARD_Q,
    loop_name="q_pass",
    templates=("weights", "backward_q"),
    text=partial(attention_text, ROWS),
    waves=_FOUR_WAVES,
)
TANGENT = _of_loop(
    name="tangent",
    tasks=frozenset({Task.TANGENT}),
    entry="attention_tangent",
    text=partial(attention_text, None),
    configs=tiles.TANGENT.configs,
    loop=tile_plan.BACKWARD_Q,
    loop_name="q_pass",
    templates=("weights", "tangent"),
    waves=_FOUR_WAVES,
)
REPAIR = replace(FORWARD, name="repair", tasks=frozenset({Task.REPAIR}))
REPAIR_KV = replace(BACKWARD_KV, name="repair_kv", tasks=frozenset({Task.REPAIR_GRADIENTS}))
REPAIR_Q = replace(BACKWARD_Q, name="repair_q", tasks=frozenset({Task.REPAIR_GRADIENTS}))
KERNELS: tuple[Kernel, ...] = (
    FORWARD, BACKWARD_KV, BACKWARD_Q, TANGENT, REPAIR, REPAIR_KV, REPAIR_Q, DISTANCE_VALUES,
    *(kernel for kind in KINDS for kernel in kind.kernels),
)  # fmt: skip
"""In the order in which a task launches them."""

FIXED: tuple[FixedKernel, ...] = (
    FixedKernel("row_statistics", row_statistics, _all_shifted, _like_dq),
)
