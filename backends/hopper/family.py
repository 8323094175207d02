"""Hopper's family of kernels: warp-specialised, for compute capability 9.0."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..base import CallGradients
from ..emit.facts import facts_of, with_gradients
from ..gradients.gradient_plan import plan_gradients
from ..kernels.arguments import call_numbers, capture_arguments
from ..kernels.bound_calls import bound_backward, bound_forward
from ..kernels.device import on_device, stream_of, why_no_gpu
from ..kernels.kernel import Job, Task, kernels_of
from ..kernels.launch_graphs import LaunchGraphs
from ..kernels.tile_lists import STATISTICS_ROWS, lists_of
from ..kernels.work_counters import Counts
from ..memory_order import empty_fp32, given_room, memory_order, wide_dtype
from ..triton.captures import KINDS
from .bound_launch import FLOAT_BYTES, Launches, backward_of, forward_of
from .capture_sums import Statistics, gradients_of_parts
from .features import BY_FLAG, FEATURES
from .hopper_layout import HopperLayout, layout_of, stored_orders, sum_arguments
from .jvp_launch import launch_with_tangents, readable
from .kernels import FIXED, KERNELS
from .launch import RowStatistics, TensorMaps, descriptor_strides
from .support import most_head_dim, why_not
from .tile_sizes import has_few_rows, has_few_tiles, has_heads_apart, has_small_tiles
from .tma_bias import window, with_pair_tiles
from .tma_copies import room_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.pipeline import Lowered

    from ..base import Backward, BoundBackward, BoundForward, Call, Wants
    from ..gradients.gradient_plan import GradientPlan
    from ..kernels.jvp_call import Moving
    from ..kernels.kernel import FixedKernel, Kernel
    from ..kernels.launch_spec import LaunchSpec


class Hopper:
    """Warp-specialised Gluon: forwards, by themselves and with tangents, and backwards."""

    name = "hopper"
    kernels: tuple[Kernel, ...] = KERNELS
    fixed: tuple[FixedKernel, ...] = FIXED
    tells_places = True
    checks_results = True
    isolates = False
    marks_entries = False

    def __init__(self) -> None:
        self._maps, self._graphs = TensorMaps(), LaunchGraphs()
        self._counts = Counts()

    def why_no_device(self, device: torch.device) -> str | None:
        """See :class:`~..kernels.kernel.Family`."""
        if device.type != "cuda" or torch.version.hip is not None:
            return "its kernels are for NVIDIA's Hopper GPUs"
        refusal = why_no_gpu(device)
        if refusal is not None:
            return refusal
        capability = torch.cuda.get_device_capability(device)
        if capability != (9, 0):
            return f"its kernels need compute capability 9.0, and this is {capability}"
        return None

    def why_not(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> str | None:  # fmt: skip
        """See :class:`~..kernels.kernel.Family`."""
        return why_not(lowered, call, task, grad_out, wanted)

    def most_head_dim(self, task: Task) -> int:
        """See :class:`~..kernels.kernel.Family`."""
        return most_head_dim(task)

    def most_keys(self, task: Task, head_dim: int) -> int | None:
        """None: kernels go along any number."""
        return None

    def most_queries(self, task: Task) -> int | None:
        """None: kernels go along any number."""
        return None

    def places(self, call: Call) -> tuple[object, ...]:
        """Offsets that decide where views of pairs' tensors end; a number on the device is none."""
        if not call.tensors or not call.shifted:
            return ()
        return tuple(x for x in (call.q_offset, call.kv_offset) if isinstance(x, int))

    def plan_key(self, call: Call) -> tuple[object, ...]:
        """See :class:`~..kernels.kernel.Family`."""
        readable = tuple(descriptor_strides(x) is not None for x in (call.q, call.k, call.v))
        dtypes = (call.q.dtype, *(tensor.dtype for tensor in call.tensors.values()))
        return call.deterministic, dtypes, call.v.shape, readable

    def plan_gradients(self, lowered: Lowered, call: Call, wanted: Wants) -> GradientPlan:
        """The portable kernels' plan, but for what features of the backward take."""
        plan = plan_gradients(KINDS, lowered, call, wanted)
        for feature in FEATURES:
            if feature.takes is not None:
                plan = feature.takes(plan, lowered, call)
        return plan

    def readable(self, grad_out: torch.Tensor, wanted: Wants) -> torch.Tensor:
        """``grad_out``, or a copy at an address that suits.

        Other kernels have other shares of the gradients of captures.
        """
        if descriptor_strides(grad_out) is None and (
            wanted.tensors or wanted.params or wanted.features or not grad_out.is_contiguous()
        ):
            return grad_out.clone(memory_format=torch.contiguous_format)
        return grad_out

    def jobs(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> tuple[Job, ...]:  # fmt: skip
        """See :class:`~..kernels.kernel.Family`."""
        facts = facts_of(lowered.program, call, *(() if grad_out is None else (grad_out,)))
        if wanted is not None:
            facts = with_gradients(facts, wanted)
            narrow = wanted.wide and _is_narrow(call)
            facts = replace(facts, narrow_dq=narrow, takes_turns=call.deterministic)
            if has_heads_apart(call, facts, lowered.program):
                facts = replace(facts, heads_apart=True)
        masked = lowered.program.mask is not None
        if has_small_tiles(task, facts, call.q.shape[2], call.k.shape[2], masked):
            facts = replace(facts, small_tiles=True)
        if has_few_tiles(call, lowered.sparsity):
            facts = replace(facts, few_tiles=True)
        if has_few_rows(task, facts, call):
            facts = replace(facts, few_rows=True)
        (kernel,) = kernels_of(self, task)
        return (Job(kernel, lowered, with_pair_tiles(facts, lowered, call, task)),)

    def layout(
        self,
        layout: LaunchSpec,
        jobs: tuple[Job, ...],
        call: Call,
        more: Mapping[str, torch.Tensor],
    ) -> LaunchSpec:
        """See :class:`~..kernels.kernel.Family`."""
        (job,) = jobs
        return layout_of(layout, job, call, more)

    def forward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~..kernels.kernel.Family`."""
        assert isinstance(layout, HopperLayout)
        q, order = call.q, layout.orders.out
        room = given_room(call, order, q.dtype)
        out = order.empty(q) if room is None else room
        lse = torch.empty_like(layout.rows)
        stream = stream_of(q.device)
        with on_device(q.device):
            of_pairs = _read_by_tiles(layout, call)
            lists = lists_of(layout, lowered, call, "forward", stream) if layout.lists else ()
            layout.launches["forward"].run(
                layout.programs,
                stream,
                [
                    *self._maps.together(layout.operands, q, call.k, call.v, out), lse.data_ptr(),
                    *self._pair_maps(layout, of_pairs),
                    *self._counter(layout, q.device, stream), *call_numbers(layout.sizes, call),
                    layout.heads_per_wave["forward"],
                    *capture_arguments(layout.facts, call), *lists,
                ],
            )  # fmt: skip
        return out, lse

    def backward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call, backward: Backward
    ) -> tuple[CallGradients, Callable[[], torch.Tensor]]:
        """See :class:`~..kernels.kernel.Family`."""
        assert isinstance(layout, HopperLayout)
        _, lse, _, grad_lse, wanted = backward
        buffers = _buffers(layout, call, backward)
        with on_device(call.q.device):
            stream = stream_of(call.q.device)
            of_pairs = _read_by_tiles(layout, call)
            _prepare(layout, backward, buffers, stream)
            self._launch_backward(layout, lowered, call, backward, buffers, of_pairs, stream)
            dq = _dq(layout, call, buffers, stream) if wanted.q else None
            dk, dv = _summed(layout, call, buffers, stream)
        made = buffers.of_features
        gradients = CallGradients(
            dq,
            dk if wanted.k else None,
            dv if wanted.v else None,
            checks=buffers.checks_of_results(),
        )
        if wanted.tensors or wanted.params:
            statistics = Statistics(
                lse, buffers.row_delta(), grad_lse, made.get("FACTOR_SUMS"), made.get("COLUMN_SUMS")
            )
            parts = gradients_of_parts(lowered, call, layout.learned, wanted, statistics)
            gradients = gradients.plus(*parts)
        for flag, names in wanted.features:
            collect = BY_FLAG[flag].collect
            assert collect is not None
            gradients = collect(lowered, call, names, made, gradients)
        return gradients, buffers.row_delta

    def _launch_backward(
        self, layout: HopperLayout, lowered: Lowered, call: Call, backward: Backward,
        buffers: _Buffers, of_pairs: list[torch.Tensor], stream: int,
    ) -> None:  # fmt: skip
        name = "backward_kv"
        made, stores = buffers.of_features, list[object]()
        for x in layout.stores:
            own = made[x.name]
            seen = [own.data_ptr()] if x.block is None else self._maps.of(layout.views[x.name], own)
            stores += seen
        layout.launches[name].run(
            layout.programs, stream,
            [
                *self._maps.together(
                    layout.operands, call.q, call.k, call.v, backward.grad_out, buffers.memory
                ),
                buffers.shift, buffers.dq_sums, buffers.dk.data_ptr(), buffers.dv.data_ptr(),
                *self._pair_maps(layout, of_pairs),
                *stores, *self._counter(layout, call.q.device, stream),
                *call_numbers(layout.sizes, call),
                buffers.statistics.padded, *(x for own in stored_orders(layout) for x in own.rows),
                layout.heads_per_wave[name], *(made[x.name] for x in layout.sums),
                *capture_arguments(layout.facts, call),
                *(lists_of(layout, lowered, call, name, stream) if layout.lists else ()),
            ],
        )  # fmt: skip

    def bound_forward(self, layout: LaunchSpec, lowered: Lowered, call: Call) -> BoundForward:
        """See :class:`~..kernels.kernel.Family`."""
        found = forward_of(self._bound(layout, call), call)
        return found or bound_forward(self, layout, lowered, call)

    def bound_backward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call, backward: Backward
    ) -> BoundBackward:
        """See :class:`~..kernels.kernel.Family`."""
        found = backward_of(self._bound(layout, call), call, backward)
        return found or bound_backward(self, layout, lowered, call)

    def _bound(self, layout: LaunchSpec, call: Call) -> Launches:
        assert isinstance(layout, HopperLayout)
        return Launches(layout, self._maps, self._graphs, self._counts.of, call.q.device)

    def movable(self, moving: Moving) -> Moving:
        """See :class:`~..kernels.kernel.Family`."""
        return readable(moving)

    def tangents(
        self, layout: LaunchSpec, moving: Moving, results: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`~..kernels.kernel.Family`."""
        assert isinstance(layout, HopperLayout)
        assert results is None
        return launch_with_tangents(moving, layout, self._maps, self._counts)

    def _pair_maps(self, layout: HopperLayout, tensors: list[torch.Tensor]) -> list[object]:
        found: list[object] = []
        for number, tensor in enumerate(tensors):
            found += self._maps.of(layout.views[f"pair{number}_desc"], tensor)
        return found

    def _counter(self, layout: HopperLayout, device: torch.device, stream: int) -> list[int]:
        return [self._counts.of(device, stream).data_ptr()] if layout.drawn else []


class _Buffers(NamedTuple):
    """Buffers that the kernels of a backward write."""

    memory: torch.Tensor
    """Flat, fp32: :class:`~.launch.RowStatistics`, then sums of dQ (batch, heads, padded rows,
    columns), see :mod:`.around_backward`. One allocation is quicker than three: see M35."""
    shift: int
    """Address of the log-sum-exps' shifts. The three below are addresses too."""
    rest: int
    delta: int
    dq_sums: int
    statistics: RowStatistics
    dk: torch.Tensor
    dv: torch.Tensor
    of_features: Mapping[str, torch.Tensor]
    """See :class:`.features.feature.Buffer`; by argument."""

    def checks_of_results(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Checks of the gradients of q and of k and v, if made: see :mod:`.around_backward`."""
        checks = self.of_features.get("CHECKS")
        if checks is None:
            return None
        rests = self.statistics.parts(self.memory)[1]
        return rests[: self.statistics.dq_programs], checks

    def row_delta(self) -> torch.Tensor:
        """Delta (batch, heads, padded rows)."""
        return self.statistics.parts(self.memory)[2].view(self.statistics)


def _buffers(layout: HopperLayout, call: Call, backward: Backward) -> _Buffers:
    k, dk, dv = call.k, *stored_orders(layout)
    kind = wide_dtype(backward.wanted.wide or layout.facts.heads_apart)
    config = layout.launches["backward_kv"].executable.config
    batch, heads, padded = statistics = layout.statistics
    rows = batch * heads * padded
    memory = empty_fp32(k, rows * (3 + layout.columns))
    first = memory.data_ptr()
    return _Buffers(
        memory=memory,
        shift=first,
        rest=first + rows * FLOAT_BYTES,
        delta=first + 2 * rows * FLOAT_BYTES,
        dq_sums=first + 3 * rows * FLOAT_BYTES,
        statistics=statistics,
        dk=dk.empty(k, kind),
        dv=dv.empty(call.v, kind),
        of_features={
            buffer.name: buffer.empty(call, config) for buffer in (*layout.stores, *layout.sums)
        },
    )


def _prepare(layout: HopperLayout, backward: Backward, buffers: _Buffers, stream: int) -> None:
    """Launch the kernel of row statistics and of zeros in dQ's sums."""
    out, lse, grad_out, grad_lse, _ = backward
    _, batch, heads, q_len = lse.shape
    dlse = lse if grad_lse is None else grad_lse.contiguous()
    layout.launches["prepare_backward"].run(
        buffers.statistics.padded // STATISTICS_ROWS * batch * heads, stream,
        [
            out.data_ptr(), grad_out.data_ptr(), lse.data_ptr(), dlse.data_ptr(), buffers.shift,
            buffers.rest, buffers.delta, buffers.dq_sums, *out.stride()[:3],
            *layout.grad_strides, heads, q_len,
        ],
    )  # fmt: skip


def _dq(layout: HopperLayout, call: Call, buffers: _Buffers, stream: int) -> torch.Tensor:
    """DQ of its sums."""
    heads, q_len = call.q.shape[1:3]
    order, facts = layout.orders.q, layout.facts
    kind = call.q.dtype if facts.narrow_dq or facts.heads_apart else buffers.dk.dtype
    room = given_room(call, order, kind)
    dq = order.empty(call.q, kind) if room is None else room
    rows = [step // order.shape[3] for step in dq.stride()[:3]]
    layout.launches["dq_from_sums"].run(
        buffers.statistics.dq_programs, stream,
        [buffers.dq_sums, dq.data_ptr(), buffers.rest, call.scale, *rows, heads, q_len],
    )  # fmt: skip
    return dq


def _summed(
    layout: HopperLayout, call: Call, buffers: _Buffers, stream: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """DK and DV, of sums of each query head where these are apart."""
    if not layout.facts.heads_apart:
        return buffers.dk, buffers.dv
    dk, dv = layout.orders.k.empty(call.k), layout.orders.v.empty(call.v)
    programs, arguments = sum_arguments(layout)
    pointers = [x.data_ptr() for x in (buffers.dk, buffers.dv, dk, dv)]
    layout.launches["sum_of_heads"].run(programs, stream, [*pointers, *arguments])
    return dk, dv


def _is_narrow(call: Call) -> bool:
    """Return True if the call has room for dQ in q's dtype."""
    order = memory_order(call.q, call.q.shape[3])
    return given_room(call, order, call.q.dtype) is not None


def _read_by_tiles(layout: HopperLayout, call: Call) -> list[torch.Tensor]:
    """The tensors of ``KernelFacts.pair_tiles``, or copies; kept until kernels are launched."""
    found = []
    for number, tile in enumerate(layout.facts.pair_tiles):
        if number in layout.copied:
            own = window(tile, call)
            found.append(room_for(own).copy_(own))
        else:
            found.append(call.tensors[tile.name])
    return found
