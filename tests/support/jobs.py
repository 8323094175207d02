"""Jobs of Hopper's kernels by the kernels' names, and what the backends say of calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.backends.engine.kernel_listing import source_of
from attndsl.backends.hopper.family import Hopper
from attndsl.backends.hopper.generate import generate
from attndsl.backends.hopper.kernels import KERNELS
from attndsl.backends.hopper.support import why_not
from attndsl.backends.kernels.kernel import Job, Task
from attndsl.backends.kernels.target import machine_of
from attndsl.backends.triton.family import Portable

if TYPE_CHECKING:
    import torch

    from attndsl.backends.base import Call, Wants
    from attndsl.backends.emit.facts import KernelFacts
    from attndsl.backends.gradients.gradient_plan import GradientPlan
    from attndsl.backends.kernels.config import Config
    from attndsl.passes.tiles.tile_plan import LoopPlan
    from attndsl.pipeline import Lowered

HOPPER = {kernel.name: kernel for kernel in KERNELS}
"""Hopper's kernels."""
TASKS = {"forward": Task.FORWARD, "backward": Task.BACKWARD, "tangent": Task.FORWARD_TANGENT}
"""What Hopper's kernels do, by what users call it."""


def job_of(lowered: Lowered, facts: KernelFacts, name: str) -> Job:
    return Job(HOPPER[name], lowered, facts)


def task_of(name: str) -> Task:
    """What the kernel of a name does."""
    return HOPPER[name].task


def text_of(lowered: Lowered, facts: KernelFacts, name: str, loop: LoopPlan, config: Config) -> str:
    return generate(job_of(lowered, facts, name), loop, config)


def plan_loop(lowered: Lowered, facts: KernelFacts, name: str, config: Config) -> LoopPlan:
    return job_of(lowered, facts, name).plan(config)


def configs_of(lowered: Lowered, facts: KernelFacts, name: str) -> tuple[Config, ...]:
    return HOPPER[name].configs(job_of(lowered, facts, name), machine_of("cuda:90"))


def hopper_source(lowered: Lowered, call: Call, direction: str, wants: Wants) -> str:
    return source_of((Hopper(), Portable()), lowered, call, direction, wants)


def shares_of(lowered: Lowered, call: Call, wants: Wants) -> GradientPlan:
    return Hopper().plan_gradients(lowered, call, wants)


def why_portable(
    lowered: Lowered,
    call: Call,
    direction: str,
    grad_out: torch.Tensor | None = None,
    wants: Wants | None = None,
) -> str | None:
    """Why Hopper's kernels do not run a direction of a call."""
    return why_not(lowered, call, TASKS[direction], grad_out, wants)
