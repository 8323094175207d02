"""Calls that are bound to Hopper's launches.

A bound call is one of a graph, see :mod:`..kernels.bound_calls`: what a launch needs beside
elements and addresses is there already.

Non-goals: tiles by lists, lookups by pairs, gradients of captures, backwards that take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..base import CallGradients
from ..kernels.arguments import call_numbers
from ..kernels.bound_calls import allocator, last_arguments, rows_of
from ..kernels.device import stream_if_current
from ..kernels.tile_lists import STATISTICS_ROWS
from .hopper_layout import stored_orders, sum_arguments

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..base import Backward, Call
    from ..kernels.bound_calls import LastArguments, NewTensor
    from ..kernels.launch_graphs import LaunchGraphs, OneLaunch
    from .hopper_layout import HopperLayout
    from .launch import TensorMaps

FLOAT_BYTES = 4


class Launches:
    """Launch state that bound calls of one layout share."""

    __slots__ = ("_counts", "_counts_of", "device", "graphs", "index", "layout", "maps", "new")

    def __init__(
        self,
        layout: HopperLayout,
        maps: TensorMaps,
        graphs: LaunchGraphs,
        counts_of: Callable[[torch.device, int], torch.Tensor],
        device: torch.device,
    ) -> None:
        """Share what launches of ``layout`` on ``device`` need.

        Args:
            layout: Of the calls.
            maps: Tensor maps by view and address.
            graphs: Graphs of launches by their addresses.
            counts_of: Gives memory in which the programs of a launch on a stream count.
            device: Where the calls run.
        """
        self.layout, self.maps, self.graphs = layout, maps, graphs
        self.device, self._counts_of = device, counts_of
        self.new = allocator(device.type)
        self.index = device.index
        self._counts: dict[int, torch.Tensor] = {}

    def counter(self, stream: int) -> tuple[int, ...]:
        """Address of the memory that programs count in, or none: :mod:`..kernels.work_counters`."""
        if not self.layout.drawn:
            return ()
        if self.index is not None and torch._C._cuda_isCurrentStreamCapturing():
            return (self._counts_of(self.device, stream).data_ptr(),)
        counts = self._counts.get(stream)
        if counts is None:
            counts = self._counts[stream] = self._counts_of(self.device, stream)
        return (counts.data_ptr(),)


@dataclass(frozen=True, slots=True)
class ForwardLaunch:
    """See :meth:`attndsl.backends.base.Backend.bound_forward`."""

    own: Launches
    run: Callable[[int, int, Sequence[object]], None]
    last: LastArguments
    out: NewTensor
    lse: NewTensor

    def __call__(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the forward."""
        q, k, v, *captures = operands
        own, layout = self.own, self.own.layout
        if (stream := stream_if_current(own.index)) is None:
            with torch.cuda.device(own.device):
                return self(operands)
        out, lse = own.new(*self.out), own.new(*self.lse)
        self.run(
            layout.programs,
            stream,
            [
                *own.maps.together(layout.operands, q, k, v, out), lse.data_ptr(),
                *own.counter(stream), *(self.last.now(captures) if captures else self.last.values),
            ],
        )  # fmt: skip
        return out, lse


class _SumOfHeads(NamedTuple):
    """Launch of the kernel that adds up gradients of keys of each query head."""

    run: Callable[[int, int, Sequence[object]], None]
    programs: int
    last: tuple[int, ...]
    made: tuple[NewTensor, NewTensor]
    """Memory of the sums of dK and dV."""


@dataclass(frozen=True, slots=True, eq=False)
class BackwardLaunch:
    """See :meth:`attndsl.backends.base.Backend.bound_backward`. Equal to itself alone."""

    own: Launches
    run: Callable[[int, int, Sequence[object]], None]
    last: LastArguments
    prepare: Callable[[int, int, Sequence[object]], None]
    prepare_last: list[object]
    dq_of: Callable[[int, int, Sequence[object]], None]
    dq_last: list[object]
    programs: tuple[int, int]
    """Numbers of programs of the kernel before the backward and of the one after it."""
    rows: int
    """Rows of all heads, padded."""
    made: tuple[NewTensor, NewTensor, NewTensor, NewTensor]
    """Memory of row statistics and sums, dK, dV and dQ."""
    sum_of_heads: _SumOfHeads | None = None
    """Sums of dK and dV where these are of each query head."""

    def __call__(self, operands: Sequence[torch.Tensor], backward: Backward) -> CallGradients:
        """Launch the backward, what comes before and what makes dQ."""
        own, new = self.own, self.own.new
        if (stream := stream_if_current(own.index)) is None:
            with torch.cuda.device(own.device):
                return self(operands, backward)
        out, lse, grad_out, grad_lse, wanted = backward
        memory, dk, dv = new(*self.made[0]), new(*self.made[1]), new(*self.made[2])
        dq = new(*self.made[3]) if wanted.q else None
        sums = [] if self.sum_of_heads is None else [new(*made) for made in self.sum_of_heads.made]
        read = (*operands, out, lse, grad_out, lse if grad_lse is None else grad_lse)
        written = (memory, dk, dv, *sums) if dq is None else (memory, dk, dv, *sums, dq)
        launches = partial(self._launches, stream, read, written)
        if own.index is None:
            for run, programs, arguments in launches():
                run(programs, stream, arguments)
        else:
            key = (self, stream, *[x.data_ptr() for x in read], *[x.data_ptr() for x in written])
            own.graphs.launch(key, stream, launches)
        if sums:
            dk, dv = sums
        return CallGradients(dq, dk if wanted.k else None, dv if wanted.v else None)

    def _launches(
        self, stream: int, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]
    ) -> list[OneLaunch]:
        """The kernels, in order.

        Args:
            stream: That of the launch.
            read: The call's tensors, output, log-sum-exp, and the gradients of both.
            written: Memory of statistics and sums, dK, dV, their sums over heads if these are made,
                and dQ if it is wanted.
        """
        q, k, v, *captures, out, lse, grad_out, dlse = read
        memory, dk, dv, *others = written
        totals = 0 if self.sum_of_heads is None else len(self.sum_of_heads.made)
        sums_of_keys, dq = others[:totals], others[totals:]
        own, layout = self.own, self.own.layout
        first, step = memory.data_ptr(), self.rows * FLOAT_BYTES
        shift, rest, delta, sums = first, first + step, first + 2 * step, first + 3 * step
        found: list[OneLaunch] = [
            (
                self.prepare, self.programs[0],
                [
                    out.data_ptr(), grad_out.data_ptr(), lse.data_ptr(), dlse.data_ptr(), shift,
                    rest, delta, sums, *self.prepare_last,
                ],
            ),
            (
                self.run, layout.programs,
                [
                    *own.maps.together(layout.operands, q, k, v, grad_out, memory),
                    shift, sums, dk.data_ptr(), dv.data_ptr(), *own.counter(stream),
                    *(self.last.now(captures) if captures else self.last.values),
                ],
            ),
        ]  # fmt: skip
        if dq:
            found.append(
                (self.dq_of, self.programs[1], [sums, dq[0].data_ptr(), rest, *self.dq_last])
            )
        if self.sum_of_heads is not None:
            pointers = [x.data_ptr() for x in (dk, dv, *sums_of_keys)]
            found.append(
                (
                    self.sum_of_heads.run,
                    self.sum_of_heads.programs,
                    [*pointers, *self.sum_of_heads.last],
                )
            )
        return found


def forward_of(own: Launches, call: Call) -> ForwardLaunch | None:
    """Launcher of calls like ``call``, or None where more has to be done for each."""
    layout = own.layout
    numbers = [*call_numbers(layout.sizes, call), layout.heads_per_wave["forward"]]
    last = last_arguments(layout, call, numbers)
    if last is None or layout.facts.pair_tiles or layout.lists or call.room is not None:
        return None
    order, run = layout.orders.out, layout.launches["forward"].run
    out = order.shape, order.strides, call.q.dtype
    return ForwardLaunch(own, run, last, out, (*rows_of(layout), torch.float32))


def backward_of(own: Launches, call: Call, backward: Backward) -> BackwardLaunch | None:
    """Launcher of backwards like ``backward``, or None where more has to be done for each."""
    layout, facts = own.layout, own.layout.facts
    out, _, _, grad_lse, wanted = backward
    launches, orders, (batch, heads, padded) = layout.launches, layout.orders, layout.statistics
    q_len = call.q.shape[2]
    numbers = [
        *call_numbers(layout.sizes, call), padded,
        *(x for own in stored_orders(layout) for x in own.rows),
        layout.heads_per_wave["backward_kv"],
    ]  # fmt: skip
    last = last_arguments(layout, call, numbers)
    if (
        last is None or facts.pair_tiles or layout.lists or call.room is not None
        or layout.stores or layout.sums
        or (grad_lse is not None and not grad_lse.is_contiguous())
    ):  # fmt: skip
        return None
    rows, dtype = batch * heads * padded, torch.float32 if wanted.wide else call.q.dtype
    dk, dv, dq = ((x.shape, x.strides, dtype) for x in (orders.k, orders.v, orders.q))
    of_heads = None
    if facts.heads_apart:
        of_heads = _SumOfHeads(launches["sum_of_heads"].run, *sum_arguments(layout), (dk, dv))
        dk, dv = ((x.shape, x.strides, torch.float32) for x in stored_orders(layout))
    return BackwardLaunch(
        own=own,
        run=launches["backward_kv"].run,
        last=last,
        prepare=launches["prepare_backward"].run,
        prepare_last=[*out.stride()[:3], *layout.grad_strides, heads, q_len],
        dq_of=launches["dq_from_sums"].run,
        dq_last=[call.scale, *orders.q.rows, heads, q_len],
        programs=(padded // STATISTICS_ROWS * batch * heads, layout.statistics.dq_programs),
        rows=rows,
        made=(((rows * (3 + layout.columns),), (1,), torch.float32), dk, dv, dq),
        sum_of_heads=of_heads,
    )
