"""The family of kernels for few rows of queries over many keys, as in decoding.

A program of another family goes along all live keys of its rows. Where rows are few there are few
programs, and most of the GPU waits. Here programs share the live tiles of the same rows.

Non-goals: gradients, tangents and dropout, which other families run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..emit.facts import block_widths
from ..kernels.arguments import capture_arguments, origin
from ..kernels.bound_calls import KernelLaunch, OneKernelForward, last_arguments, rows_of
from ..kernels.device import on_device, stream_of
from ..kernels.kernel import Job, Task
from ..kernels.tile_lists import lists_of
from ..kernels.work_counters import Counts
from ..memory_order import empty_fp32, wide_dtype
from .decode_kernels import FORWARDS, KERNELS, NAME
from .decode_tiles import (
    COUNTS_OF_GRAPHS,
    MOST_QUERIES,
    UnitPrograms,
    joins_parts,
    members_of,
    most_parts,
    programs_of,
    shape_of,
    sharing_of,
)
from .family import Portable, empty_results, facts_of_task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.pipeline import Lowered

    from ..base import BoundForward, Call, Wants
    from ..kernels.bound_calls import NewTensor
    from ..kernels.kernel import FixedKernel, Kernel
    from ..kernels.launch_spec import LaunchSpec
    from .decode_tiles import DecodeShape

_MOST_BESIDE_OTHERS = 64
"""Rows of heads that share keys, in calls that another family would run too. Calls with more have
not been measured beside Hopper's kernels."""
_MOST_PROGRAMS = 65535
"""CUDA's limit for the second and the third number of a program."""


class Decode(Portable):
    """Few rows. Has forwards alone."""

    name = NAME
    kernels: tuple[Kernel, ...] = KERNELS
    fixed: tuple[FixedKernel, ...] = ()
    checks_results = False
    isolates = True
    marks_entries = True

    def __init__(self, beside_others: bool = False) -> None:
        """Make it; ``beside_others`` leaves calls with many rows to the families behind it."""
        self._counts = Counts(COUNTS_OF_GRAPHS)
        self._beside_others = beside_others

    def why_not(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> str | None:  # fmt: skip
        """See :class:`~..kernels.kernel.Family`."""
        batch, heads, q_len, _ = call.q.shape
        if q_len > MOST_QUERIES:
            return f"the decode kernels support up to {MOST_QUERIES} rows of queries"
        if self._beside_others and q_len * _members(lowered, call) > _MOST_BESIDE_OTHERS:
            return f"heads that share keys have more than {_MOST_BESIDE_OTHERS} rows in total"
        if lowered.program.dropout is not None:
            return "the decode kernels do not drop weights"
        if max(batch, heads * q_len) > _MOST_PROGRAMS:
            return f"the decode kernels support up to {_MOST_PROGRAMS} batch entries and head rows"
        return None

    def most_queries(self, task: Task) -> int | None:
        """See :class:`~..kernels.kernel.Family`."""
        return MOST_QUERIES

    def jobs(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> tuple[Job, ...]:  # fmt: skip
        """One: the kernel of the call's rows."""
        facts = facts_of_task(lowered, call, task, grad_out, wanted)
        facts = replace(facts, packed_heads=True)
        batch, heads, q_len, _ = call.q.shape
        members, shape = tile_of(lowered, call, call.k, call.v)
        sharing, units = sharing_of(shape, lowered.program, facts), heads // members
        joined = joins_parts(sharing, batch, units * -(-q_len // shape.queries))
        facts = replace(facts, joined_parts=joined)
        return (Job(FORWARDS[shape], lowered, facts),)

    def forward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~..kernels.kernel.Family`."""
        q = call.q
        out, lse = empty_results(layout, call)
        ((name, kernel),) = layout.executables.items()
        plan = plan_of(layout, lowered, call)
        stream = stream_of(q.device)
        with on_device(q.device):
            lists = lists_of(layout, lowered, call, name, stream)
            room, counts = out, lse
            if plan.counted:
                room = empty_fp32(q, plan.room)
                counts = self._counts.of(q.device, stream, plan.counted)
            kernel.launch_grid(
                plan.grid,
                stream,
                [
                    q, call.k, call.v, out, lse, room, counts,
                    *numbers_of(layout, call, out.stride(), plan),
                    *capture_arguments(layout.facts, call), *lists,
                ],
            )  # fmt: skip
        return out, lse

    def bound_forward(self, layout: LaunchSpec, lowered: Lowered, call: Call) -> BoundForward:
        """See :class:`~..kernels.kernel.Family`."""
        plan, order = plan_of(layout, lowered, call), layout.orders.out
        last = last_arguments(layout, call, numbers_of(layout, call, order.strides, plan))
        if last is None or layout.lists or call.room is not None:
            return super().bound_forward(layout, lowered, call)
        (kernel,) = layout.executables.values()
        dtype = wide_dtype(call.wide) or call.q.dtype
        return DecodeForwardLaunch(
            KernelLaunch(kernel, plan.grid, last, call.q.device),
            (order.shape, order.strides, dtype), (*rows_of(layout), torch.float32),
            ((plan.room,), (1,), torch.float32), self._counts, plan.counted,
        )  # fmt: skip


def _width(layout: LaunchSpec) -> int:
    """Columns of a tile of values."""
    return block_widths(layout.facts)[1]


class DecodePlan(NamedTuple):
    """Numbers of programs, parts and counters of a call."""

    grid: tuple[int, int, int]
    room: int
    """Numbers that parts leave in memory."""
    counted: int
    """Counters of all units; 0 where all keys of a unit are one part."""
    sizes: tuple[int, int, int]
    """Members of a tile, most parts, and least tiles of a program: arguments of the kernel."""


def plan_of(layout: LaunchSpec, lowered: Lowered, call: Call) -> DecodePlan:
    """The plan of calls like ``call``."""
    batch, heads, q_len, _ = call.q.shape
    (kernel,) = layout.executables.values()
    members, shape = tile_of(lowered, call, call.k, call.v)
    units = heads // members * -(-q_len // shape.queries)
    sharing, width = sharing_of(shape, lowered.program, layout.facts), _width(layout)
    tiles = -(-call.k.shape[2] // kernel.config.block_n)
    parts = most_parts(call.k.shape[2], units, kernel.config, sharing)
    programs = UnitPrograms(parts, 1)
    if layout.facts.joined_parts:
        longest = tiles if lowered.program.bounded else None
        programs = programs_of(sharing, parts, batch * units, longest)
    room = batch * units * parts * shape.lines * (width + 2) if parts > 1 else 0
    return DecodePlan(
        (programs.number, units, batch), room, batch * units * sharing.counts_of(parts),
        (members, parts, programs.least_tiles),
    )  # fmt: skip


def numbers_of(
    layout: LaunchSpec, call: Call, steps: Sequence[int], plan: DecodePlan
) -> list[object]:
    """Arguments behind the tensors, before what the program adds. ``steps`` are the output's."""
    return [
        *layout.strides, *steps[:3], call.scale, *layout.sizes,
        origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index), *plan.sizes,
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeForwardLaunch(OneKernelForward):
    """A bound forward whose programs leave parts in memory and count them."""

    room: NewTensor
    counts: Counts
    counted: int

    def workspace(self, stream: int, lse: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Room for the parts, and their counters."""
        if not self.counted:
            return lse, lse
        counts = self.counts.of(lse.device, stream, self.counted)
        return self.launch.new(*self.room), counts


def tile_of(
    lowered: Lowered, call: Call, k: torch.Tensor, v: torch.Tensor
) -> tuple[int, DecodeShape]:
    """Heads of a tile, and its rows, of a call that reads ``k`` and ``v`` or pages of them."""
    members, columns = _members(lowered, call), k.shape[3] + v.shape[3]
    return members, shape_of(call.q.shape[2], members, k.element_size(), columns)


def _members(lowered: Lowered, call: Call) -> int:
    return members_of(call.q.shape[1] // call.k.shape[1], not lowered.sparsity.by_head)
