"""A program's kernels as text to read, on machines that need not have the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attndsl.errors import UnsupportedError
from attndsl.ir import DType

from ..base import UNWRITTEN, Wants
from ..emit.facts import facts_of, with_gradients
from ..emit.leaf_names import CaptureFacts
from ..emit.local_names import placeholders, with_names
from ..emit.tangent_programs import moved_name
from ..kernels.kernel import Task, first_with, jobs_of, kernels_of, plan_of, task_named
from ..kernels.module_headers import TAIL, headed
from ..kernels.target import machine_of
from ..triton.captures import extra_tasks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attndsl.pipeline import Lowered

    from ..base import Call, Written
    from ..emit.facts import KernelFacts
    from ..kernels.kernel import Family, Job
    from ..kernels.target import Target


def source_of(
    families: tuple[Family, ...], lowered: Lowered, call: Call, direction: str, wanted: Wants,
    written: Written = UNWRITTEN,
) -> str:  # fmt: skip
    """Text of the modules that ``call`` would use, ``forward``, ``backward`` or ``tangent``.

    Tangents are along q, k, v and, if a kernel moves them, what ``wanted`` names. The text differs
    from the compiled one in what ``written`` says: its head, and names and lines of locals.

    Raises:
        UnsupportedError: The first family does not run ``call``; says why.
    """
    task = _task_of(families[0], direction)
    if not kernels_of(families[0], task):
        families = families[1:]
    if task is Task.FORWARD_TANGENT:
        wanted = Wants()
    lines = plan_of(families, lowered, call, wanted).lines if task is Task.BACKWARD else wanted
    refused = families[0].why_not(lowered, call, task, None, lines)
    if refused is not None:
        others = families[1].name
        raise UnsupportedError(
            refused, hint=f"the {others} kernels run such calls: use backend={others!r}"
        )
    machine = machine_of("cuda:90")
    jobs = _jobs(families, lowered, call, task, wanted)
    return "\n\n".join(_shown(job.on(machine), machine, written) for job in jobs) + TAIL


def _shown(job: Job, machine: Target, written: Written) -> str:
    """A job's module with the tile sizes that are tried first, for people to read."""
    job = replace(job, facts=replace(job.facts, locals=placeholders(written.names)))
    config = job.kernel.configs(job, machine)[0]
    text = with_names(job.text(config, machine), written.names)
    return headed(text, job, config, machine, written)


def _task_of(family: Family, direction: str) -> Task:
    """Task that a family runs for a direction that users name."""
    if direction == "tangent" and kernels_of(family, Task.FORWARD_TANGENT):
        return Task.FORWARD_TANGENT
    return task_named(direction)


def _jobs(
    families: tuple[Family, ...], lowered: Lowered, call: Call, task: Task, wanted: Wants
) -> Iterator[Job]:
    """Jobs that ``task`` of a call runs, in order."""
    if task in (Task.TANGENT, Task.FORWARD_TANGENT):
        facts = with_gradients(facts_of(lowered.program, call), wanted)
        yield from jobs_of(families[0], task, lowered, with_all_tangents(lowered, facts))
    elif task is Task.FORWARD:
        yield from families[0].jobs(lowered, call, task, None, None)
    else:
        plan = plan_of(families, lowered, call, wanted)
        yield from families[0].jobs(lowered, call, task, None, plan.lines)
        for extra, own in extra_tasks(lowered, plan):
            family = first_with(families, extra)
            assert family is not None
            yield from family.jobs(lowered, call, extra, None, own)


def with_all_tangents(lowered: Lowered, facts: KernelFacts) -> KernelFacts:
    """``facts`` for tangents along q, k, v and all whose gradients are in it."""
    program = lowered.program
    kinds = zip(facts.captures, facts.capture_types, facts.capture_aligned, strict=True)
    found = [
        (replace(capture, name=moved_name(program, capture.name)), kind, aligned)
        for capture, kind, aligned in kinds
        if capture.name in facts.tensor_gradients
    ]
    found += [
        (CaptureFacts(moved_name(program, name), DType.FLOAT, 0, 32, False), "fp32", False)
        for name in facts.param_gradients
    ]
    captures, types, aligned_ones = zip(*found, strict=True) if found else ((), (), ())
    return replace(
        facts,
        tensor_gradients=(),
        param_gradients=(),
        captures=(*facts.captures, *captures),
        capture_types=(*facts.capture_types, *types),
        capture_aligned=(*facts.capture_aligned, *aligned_ones),
        moving_operands="qkv",
        moving_captures=(*facts.tensor_gradients, *facts.param_gradients),
    )
