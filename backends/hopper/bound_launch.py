"""Calls that are bound to Hopper's launches.

A bound call is one of a graph, see :mod:`..kernels.bound_calls`: what a launch needs beside
elements and addresses is there already.

Non-goals: tiles by lists, lookups by pairs, gradients of captures, backwards that take turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..base import CallGradients
from ..kernels.arguments import call_numbers
from ..kernels.bound_calls import allocator, last_arguments, rows_of
from ..kernels.tile_lists import STATISTICS_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..base import Backward, Call
    from ..kernels.bound_calls import LastArguments
    from .hopper_layout import HopperLayout
    from .launch import TensorMaps

FLOAT_BYTES = 4


class Launches:
    """Launch state that bound calls of one layout share."""

    __slots__ = ("_counts", "_counts_of", "_index", "device", "layout", "lse", "maps", "new")

    def __init__(
        self,
        layout: HopperLayout,
        maps: TensorMaps,
        counts_of: Callable[[torch.device, int], torch.Tensor],
        device: torch.device,
    ) -> None:
        """Share what launches of ``layout`` on ``device`` need.

        Args:
            layout: Of the calls.
            maps: Tensor maps by view and address.
            counts_of: Gives memory in which the programs of a launch on a stream count.
            device: Where the calls run.
        """
        self.layout, self.maps, self.device, self._counts_of = layout, maps, device, counts_of
        self.new, self.lse = allocator(device.type), rows_of(layout)
        self._index = device.index
        self._counts: dict[int, torch.Tensor] = {}

    def stream(self) -> int | None:
        """Handle of the device's current stream; None where another device is the current one."""
        index = self._index
        if index is None:
            return 0
        if torch._C._cuda_getDevice() != index:
            return None
        return int(torch._C._cuda_getCurrentRawStream(index))

    def counter(self, stream: int) -> tuple[int, ...]:
        """Address of the memory that programs count in, or none: :mod:`..kernels.work_counters`."""
        if not self.layout.drawn:
            return ()
        if self._index is not None and torch.cuda.is_current_stream_capturing():
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

    def __call__(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the forward."""
        q, k, v, *captures = operands
        own, layout = self.own, self.own.layout
        if (stream := own.stream()) is None:
            with torch.cuda.device(own.device):
                return self(operands)
        order = layout.orders.out
        out = own.new(order.shape, order.strides, q.dtype)
        lse = own.new(*own.lse, torch.float32)
        self.run(
            layout.programs,
            stream,
            [
                *own.maps.together(layout.operands, q, k, v, out), lse.data_ptr(),
                *own.counter(stream), *(self.last.now(captures) if captures else self.last.values),
            ],
        )  # fmt: skip
        return out, lse


@dataclass(frozen=True, slots=True)
class BackwardLaunch:
    """See :meth:`attndsl.backends.base.Backend.bound_backward`."""

    own: Launches
    run: Callable[[int, int, Sequence[object]], None]
    last: LastArguments
    prepare: Callable[[int, int, Sequence[object]], None]
    prepare_last: list[object]
    dq_of: Callable[[int, int, Sequence[object]], None]
    dq_last: list[object]
    dtype: torch.dtype
    """Dtype of the gradients."""
    programs: tuple[int, int]
    """Numbers of programs of the kernel before the backward and of the one after it."""

    def __call__(self, operands: Sequence[torch.Tensor], backward: Backward) -> CallGradients:
        """Launch the backward, what comes before and what makes dQ."""
        q, k, v, *captures = operands
        own, layout = self.own, self.own.layout
        if (stream := own.stream()) is None:
            with torch.cuda.device(own.device):
                return self(operands, backward)
        out, lse, grad_out, grad_lse, wanted = backward
        batch, heads, padded = layout.statistics
        rows, orders = batch * heads * padded, layout.orders
        kind, new = self.dtype, own.new
        memory = new((rows * (3 + layout.columns),), (1,), torch.float32)
        dk = new(orders.k.shape, orders.k.strides, kind)
        dv = new(orders.v.shape, orders.v.strides, kind)
        first = memory.data_ptr()
        shift, rest, delta, sums = (first + part * rows * FLOAT_BYTES for part in range(4))
        dlse = lse if grad_lse is None else grad_lse
        self.prepare(
            self.programs[0], stream,
            [
                out.data_ptr(), grad_out.data_ptr(), lse.data_ptr(), dlse.data_ptr(), shift, rest,
                delta, sums, *self.prepare_last,
            ],
        )  # fmt: skip
        self.run(
            layout.programs, stream,
            [
                *own.maps.together(layout.operands, q, k, v, grad_out, memory),
                shift, sums, dk.data_ptr(), dv.data_ptr(),
                *own.counter(stream), *(self.last.now(captures) if captures else self.last.values),
            ],
        )  # fmt: skip
        dq = None
        if wanted.q:
            dq = new(orders.q.shape, orders.q.strides, kind)
            self.dq_of(self.programs[1], stream, [sums, dq.data_ptr(), rest, *self.dq_last])
        return CallGradients(dq, dk if wanted.k else None, dv if wanted.v else None)


def forward_of(own: Launches, call: Call) -> ForwardLaunch | None:
    """Launcher of calls like ``call``, or None where more has to be done for each."""
    layout = own.layout
    numbers = [*call_numbers(layout.sizes, call), layout.heads_per_wave["forward"]]
    last = last_arguments(layout, call, numbers)
    if last is None or layout.facts.pair_tiles or layout.lists or call.room is not None:
        return None
    return ForwardLaunch(own, layout.launches["forward"].run, last)


def backward_of(own: Launches, call: Call, backward: Backward) -> BackwardLaunch | None:
    """Launcher of backwards like ``backward``, or None where more has to be done for each."""
    layout, facts = own.layout, own.layout.facts
    out, _, _, grad_lse, wanted = backward
    launches, orders, (batch, heads, padded) = layout.launches, layout.orders, layout.statistics
    q_len = call.q.shape[2]
    numbers = [
        *call_numbers(layout.sizes, call), padded, *orders.k.rows, *orders.v.rows,
        layout.heads_per_wave["backward_kv"],
    ]  # fmt: skip
    last = last_arguments(layout, call, numbers)
    if (
        last is None or facts.pair_tiles or layout.lists or call.room is not None
        or layout.stores or layout.sums
        or (grad_lse is not None and not grad_lse.is_contiguous())
    ):  # fmt: skip
        return None
    return BackwardLaunch(
        own=own,
        run=launches["backward_kv"].run,
        last=last,
        prepare=launches["prepare_backward"].run,
        prepare_last=[*out.stride()[:3], *layout.grad_strides, heads, q_len],
        dq_of=launches["dq_from_sums"].run,
        dq_last=[call.scale, *orders.q.rows, heads, q_len],
        dtype=torch.float32 if wanted.wide else call.q.dtype,
        programs=(padded // STATISTICS_ROWS * batch * heads, layout.statistics.dq_programs),
    )
