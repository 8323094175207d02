"""The family of kernels for few rows of queries over many keys, as in decoding.

A program of another family goes along all live keys of its rows. Where rows are few there are few
programs, and most of the GPU waits. Here programs share the live tiles of the same rows.

Non-goals: gradients, tangents and dropout, which other families run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..emit.facts import block_widths
from ..kernels.arguments import capture_arguments, origin
from ..kernels.device import on_device, stream_of
from ..kernels.kernel import Job, Task
from ..kernels.tile_lists import lists_of
from ..kernels.work_counters import Counts
from ..memory_order import empty_fp32
from .decode_kernels import FORWARDS, KERNELS, NAME
from .decode_tiles import (
    COUNTS_OF_GRAPHS,
    MOST_QUERIES,
    members_of,
    most_parts,
    shape_of,
    sharing_of,
)
from .family import Portable, empty_results, facts_of_task

if TYPE_CHECKING:
    import torch

    from attndsl.pipeline import Lowered

    from ..base import Call, Wants
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
        _, shape = tile_of(lowered, call, call.k, call.v)
        return (Job(FORWARDS[shape], lowered, facts),)

    def forward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~..kernels.kernel.Family`."""
        q = call.q
        batch, heads, q_len, _ = q.shape
        out, lse = empty_results(layout, call)
        ((name, kernel),) = layout.executables.items()
        members, shape = tile_of(lowered, call, call.k, call.v)
        units = heads // members * -(-q_len // shape.queries)
        sharing = sharing_of(shape, lowered.program, layout.facts)
        parts = most_parts(call.k.shape[2], units, kernel.config, sharing)
        stream = stream_of(q.device)
        with on_device(q.device):
            lists = lists_of(layout, lowered, call, name, stream)
            room, counts = out, lse
            if parts > 1:
                numbers = batch * units * parts * shape.lines
                room = empty_fp32(q, numbers * (_width(layout) + 2))
                counts = self._counts.of(q.device, stream, batch * units * sharing.counts_of(parts))
            kernel.launch_grid(
                (parts, units, batch),
                stream,
                [
                    q, call.k, call.v, out, lse, room, counts, *layout.strides,
                    *out.stride()[:3], call.scale, *layout.sizes,
                    origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index),
                    members, *capture_arguments(layout.facts, call), *lists,
                ],
            )  # fmt: skip
        return out, lse


def _width(layout: LaunchSpec) -> int:
    """Columns of a tile of values."""
    return block_widths(layout.facts)[1]


def tile_of(
    lowered: Lowered, call: Call, k: torch.Tensor, v: torch.Tensor
) -> tuple[int, DecodeShape]:
    """Heads of a tile, and its rows, of a call that reads ``k`` and ``v`` or pages of them."""
    members, columns = _members(lowered, call), k.shape[3] + v.shape[3]
    return members, shape_of(call.q.shape[2], members, k.element_size(), columns)


def _members(lowered: Lowered, call: Call) -> int:
    return members_of(call.q.shape[1] // call.k.shape[1], not lowered.sparsity.by_head)
