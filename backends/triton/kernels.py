"""The table of the portable kernels: one entry a kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from attndsl.passes.tiles import plan

from ..device.library import row_statistics
from ..kernels.arguments import arguments_of
from ..kernels.config import INTERPRETED
from ..kernels.kernel import FixedKernel, Kernel, Task
from . import generate_gradients as sums
from . import tiles
from .generate import attention_text, extra_text, stored_text

if TYPE_CHECKING:
    from ..emit.facts import KernelFacts
    from ..kernels.compile import Argument
    from ..kernels.config import Config
    from ..kernels.kernel import Job
    from ..kernels.machine import Machine

_EXTRA = ("weights", "tile_gradients")
_FOUR_WAVES = (4, 2, 1)
"""Forwards gain by four: see M14 in docs/measured.md."""


def arguments(function: Any, facts: KernelFacts, config: Config) -> list[Argument]:
    """Types of all arguments of a kernel of plain Triton."""
    return arguments_of(function, facts, {})


def _all_shifted(job: Job) -> dict[str, int | bool]:
    """Rows' statistics with a shift each: see ``row_statistics``."""
    return {"FAR": 0}


def _like_dq(job: Job, machine: Machine) -> tuple[Config, ...]:
    if machine.target is None:
        return INTERPRETED
    return tiles.BACKWARD_Q.candidates(tiles.widths_of(job.facts), machine.shared)


_kernel = partial(Kernel, family="triton", arguments=arguments)
_of_loop = partial(_kernel, text=attention_text)

FORWARD = _of_loop(
    name="forward",
    tasks=frozenset({Task.FORWARD}),
    entry="attention_forward",
    configs=tiles.FORWARD.configs,
    loop=plan.FORWARD,
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
    loop=plan.BACKWARD_KV,
    loop_name="kv_pass",
    templates=("weights", "backward_kv"),
    sums=sums.COLUMNS,
    waves=(2, 1),
)
BACKWARD_Q = _of_loop(
    name="backward_q",
    tasks=frozenset({Task.BACKWARD}),
    entry="attention_backward_q",
    configs=tiles.BACKWARD_Q.configs,
    loop=plan.BACKWARD_Q,
    loop_name="q_pass",
    templates=("weights", "backward_q"),
    sums=sums.ROWS,
    waves=_FOUR_WAVES,
)
TANGENT = _of_loop(
    name="tangent",
    tasks=frozenset({Task.TANGENT}),
    entry="attention_tangent",
    configs=tiles.TANGENT.configs,
    loop=plan.BACKWARD_Q,
    loop_name="q_pass",
    templates=("weights", "tangent"),
    waves=_FOUR_WAVES,
)
REPAIR = replace(FORWARD, name="repair", tasks=frozenset({Task.REPAIR}))
REPAIR_KV = replace(BACKWARD_KV, name="repair_kv", tasks=frozenset({Task.REPAIR_GRADIENTS}))
REPAIR_Q = replace(BACKWARD_Q, name="repair_q", tasks=frozenset({Task.REPAIR_GRADIENTS}))
DISTANCES = _kernel(
    name="distances",
    tasks=frozenset({Task.DISTANCES}),
    entry="distances",
    text=extra_text,
    configs=tiles.DISTANCES.configs,
    templates=(*_EXTRA, "distances"),
    sums=sums.DIAGONALS,
)
PAIRS = _kernel(
    name="pairs",
    tasks=frozenset({Task.PAIRS}),
    entry="pairs",
    text=extra_text,
    configs=tiles.PAIRS.configs,
    templates=(*_EXTRA, "pair_sums", "pairs"),
    sums=sums.PAIRS,
)
STORED = _kernel(
    name="stored",
    tasks=frozenset({Task.STORED}),
    entry="stored",
    text=stored_text,
    configs=tiles.STORED.configs,
    templates=("stored", "pair_sums"),
    sums=sums.STORED,
)
SCATTER_BOUNDS = _kernel(
    name="scatter_bounds",
    tasks=frozenset({Task.SCATTERED, Task.SCATTERED_TOGETHER}),
    entry="scattered",
    text=extra_text,
    configs=tiles.SCATTER_BOUNDS.configs,
    templates=(*_EXTRA, "scattered"),
    derives=False,
    sums=sums.BOUNDS,
)
SCATTER_SUMS = _kernel(
    name="scatter_sums",
    tasks=frozenset({Task.SCATTERED, Task.BOUNDED}),
    entry="scattered",
    text=extra_text,
    configs=tiles.SCATTER_SUMS.configs,
    templates=(*_EXTRA, "scattered"),
    sums=sums.EXACT,
)
SCATTER_TOGETHER = _kernel(
    name="scatter_together",
    tasks=frozenset({Task.SCATTERED_TOGETHER, Task.BOUNDED_TOGETHER}),
    entry="pairs",
    text=extra_text,
    configs=tiles.PAIRS.configs,
    templates=PAIRS.templates,
    sums=sums.TOGETHER,
)
KERNELS: tuple[Kernel, ...] = (
    FORWARD, BACKWARD_KV, BACKWARD_Q, TANGENT, REPAIR, REPAIR_KV, REPAIR_Q,
    DISTANCES, PAIRS, STORED, SCATTER_BOUNDS, SCATTER_SUMS, SCATTER_TOGETHER,
)  # fmt: skip
"""In the order in which a task launches them."""

FIXED: tuple[FixedKernel, ...] = (
    FixedKernel("row_statistics", row_statistics, _all_shifted, _like_dq),
)
