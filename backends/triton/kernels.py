"""The table of the portable kernels: one entry a kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attndsl.passes.tiles.plan import BACKWARD_KV, BACKWARD_Q, FORWARD

from ..device.library import row_statistics
from ..kernels.arguments import arguments_of
from ..kernels.config import INTERPRETED
from ..kernels.kernel import FixedKernel, Kernel, Task
from . import tiles
from .generate import attention_text, extra_text, stored_text
from .generate_gradients import BOUNDS, COLUMNS, DIAGONALS, EXACT, PAIRS, ROWS, STORED

if TYPE_CHECKING:
    from ..emit.facts import KernelFacts
    from ..kernels.compile import Argument
    from ..kernels.config import Config
    from ..kernels.kernel import Job
    from ..kernels.machine import Machine

_EXTRA = ("weights", "tile_gradients")
_FOUR_WAVES = (4, 2, 1)
"""Forwards gain by four: see M14 in docs/measured.md."""


def _arguments(function: Any, facts: KernelFacts, config: Config) -> list[Argument]:
    return arguments_of(function, facts, {})


def _no_constants(facts: KernelFacts) -> dict[str, int | bool]:
    return {}


def _like_dq(job: Job, machine: Machine) -> tuple[Config, ...]:
    if machine.target is None:
        return INTERPRETED
    return tiles.BACKWARD_Q.candidates(tiles.widths_of(job.facts), machine.shared)


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="forward",
        family="portable",
        tasks=frozenset({Task.FORWARD}),
        entry="attention_forward",
        text=attention_text,
        configs=tiles.FORWARD.configs,
        arguments=_arguments,
        loop=FORWARD,
        loop_name="forward",
        templates=("forward",),
        derives=False,
        waves=_FOUR_WAVES,
    ),
    Kernel(
        name="backward_kv",
        family="portable",
        tasks=frozenset({Task.BACKWARD}),
        entry="attention_backward_kv",
        text=attention_text,
        configs=tiles.BACKWARD_KV.configs,
        arguments=_arguments,
        loop=BACKWARD_KV,
        loop_name="kv_pass",
        templates=("weights", "backward_kv"),
        sums=COLUMNS,
        waves=(2, 1),
    ),
    Kernel(
        name="backward_q",
        family="portable",
        tasks=frozenset({Task.BACKWARD}),
        entry="attention_backward_q",
        text=attention_text,
        configs=tiles.BACKWARD_Q.configs,
        arguments=_arguments,
        loop=BACKWARD_Q,
        loop_name="q_pass",
        templates=("weights", "backward_q"),
        sums=ROWS,
        waves=_FOUR_WAVES,
    ),
    Kernel(
        name="tangent",
        family="portable",
        tasks=frozenset({Task.TANGENT}),
        entry="attention_tangent",
        text=attention_text,
        configs=tiles.TANGENT.configs,
        arguments=_arguments,
        loop=BACKWARD_Q,
        loop_name="q_pass",
        templates=("weights", "tangent"),
        waves=_FOUR_WAVES,
    ),
    Kernel(
        name="distances",
        family="portable",
        tasks=frozenset({Task.DISTANCES}),
        entry="distances",
        text=extra_text,
        configs=tiles.DISTANCES.configs,
        arguments=_arguments,
        templates=(*_EXTRA, "distances"),
        sums=DIAGONALS,
    ),
    Kernel(
        name="pairs",
        family="portable",
        tasks=frozenset({Task.PAIRS}),
        entry="pairs",
        text=extra_text,
        configs=tiles.PAIRS.configs,
        arguments=_arguments,
        templates=(*_EXTRA, "pair_sums", "pairs"),
        sums=PAIRS,
    ),
    Kernel(
        name="stored",
        family="portable",
        tasks=frozenset({Task.STORED}),
        entry="stored",
        text=stored_text,
        configs=tiles.STORED.configs,
        arguments=_arguments,
        templates=("stored", "pair_sums"),
        sums=STORED,
    ),
    Kernel(
        name="scatter_bounds",
        family="portable",
        tasks=frozenset({Task.SCATTERED}),
        entry="scattered",
        text=extra_text,
        configs=tiles.SCATTER_BOUNDS.configs,
        arguments=_arguments,
        templates=(*_EXTRA, "scattered"),
        derives=False,
        sums=BOUNDS,
    ),
    Kernel(
        name="scatter_sums",
        family="portable",
        tasks=frozenset({Task.SCATTERED, Task.BOUNDED}),
        entry="scattered",
        text=extra_text,
        configs=tiles.SCATTER_SUMS.configs,
        arguments=_arguments,
        templates=(*_EXTRA, "scattered"),
        sums=EXACT,
    ),
)
"""In the order in which a task launches them."""

FIXED: tuple[FixedKernel, ...] = (
    FixedKernel("row_statistics", row_statistics, _no_constants, _like_dq),
)
