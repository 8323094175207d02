"""The portable family of kernels: every GPU that Triton has, and its interpreter on CPU tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..base import CallGradients
from ..emit.facts import facts_of, with_gradients
from ..gradients.gradient_plan import plan_gradients
from ..gradients.row_col_sums import line_gradients
from ..kernels.arguments import capture_arguments, origin
from ..kernels.bound_calls import bound_backward, bound_forward
from ..kernels.call_signature import PADDING
from ..kernels.device import on_device, stream_of, why_no_gpu
from ..kernels.kernel import Task, jobs_of
from ..kernels.tile_lists import STATISTICS_ROWS, lists_of
from ..memory_order import empty_fp32, given_room, rows_contiguous
from .captures import BY_TASK, KINDS
from .kernels import FIXED, KERNELS
from .tangent_launch import launch_tangent
from .values_by_distance import VALUES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attndsl.pipeline import Lowered

    from ..base import Backward, BoundBackward, BoundForward, Call, Wants
    from ..emit.facts import KernelFacts
    from ..gradients.gradient_plan import GradientPlan
    from ..kernels.jvp_call import Moving
    from ..kernels.kernel import FixedKernel, Job, Kernel
    from ..kernels.launch_spec import LaunchSpec

MAX_HEAD_DIM = 512
_WITH_FP32_RESULTS = frozenset({Task.FORWARD, Task.BACKWARD, Task.REPAIR, Task.REPAIR_GRADIENTS})


def facts_of_task(
    lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None, wanted: Wants | None
) -> KernelFacts:
    """Facts that the kernels of a task depend on."""
    facts = facts_of(lowered.program, call, *(() if grad_out is None else (grad_out,)))
    if wanted is not None:
        facts = with_gradients(facts, wanted)
    if task in BY_TASK:
        facts = BY_TASK[task].facts(facts, lowered, call)
    if task is VALUES:
        # There the position of a query is a distance, of either sign.
        facts = replace(facts, shifted=True, reach=None)
    if task not in _WITH_FP32_RESULTS:
        facts = replace(facts, wide_out=False, wide_gradients=False)
    return facts


class Portable:
    """Plain Triton. Has kernels for all tasks but results together with tangents."""

    name = "triton"
    kernels: tuple[Kernel, ...] = KERNELS
    fixed: tuple[FixedKernel, ...] = FIXED
    tells_places = False
    checks_results = False
    isolates = False
    marks_entries = False

    def why_no_device(self, device: torch.device) -> str | None:
        """See :class:`~..kernels.kernel.Family`."""
        return why_no_gpu(device)

    def why_not(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> str | None:  # fmt: skip
        """None: these kernels run all calls."""
        return None

    def most_head_dim(self, task: Task) -> int:
        """See :class:`~..kernels.kernel.Family`."""
        return MAX_HEAD_DIM

    def most_keys(self, task: Task, head_dim: int) -> int | None:
        """None: kernels go along any number."""
        return None

    def most_queries(self, task: Task) -> int | None:
        """None: kernels go along any number."""
        return None

    def places(self, call: Call) -> tuple[object, ...]:
        """Nothing: positions are arguments."""
        return ()

    def plan_key(self, call: Call) -> tuple[object, ...]:
        """Nothing."""
        return ()

    def plan_gradients(self, lowered: Lowered, call: Call, wanted: Wants) -> GradientPlan:
        """See :class:`~..kernels.kernel.Family`."""
        return plan_gradients(KINDS, lowered, call, wanted)

    def readable(self, grad_out: torch.Tensor, wanted: Wants) -> torch.Tensor:
        """``grad_out`` with last stride 1."""
        return rows_contiguous(grad_out)

    def jobs(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> tuple[Job, ...]:  # fmt: skip
        """See :class:`~..kernels.kernel.Family`."""
        facts = facts_of_task(lowered, call, task, grad_out, wanted)
        return jobs_of(self, task, lowered, facts)

    def layout(
        self,
        layout: LaunchSpec,
        jobs: tuple[Job, ...],
        call: Call,
        more: Mapping[str, torch.Tensor],
    ) -> LaunchSpec:
        """``layout``: launches need nothing besides."""
        return layout

    def forward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~..kernels.kernel.Family`."""
        out, lse = empty_results(layout, call)
        launch_forward("forward", layout, lowered, call, (out, lse))
        return out, lse

    def backward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call, backward: Backward
    ) -> tuple[CallGradients, Callable[[], torch.Tensor]]:
        """See :class:`~..kernels.kernel.Family`."""
        grad_out, wanted = backward.grad_out, backward.wanted
        q, k, v = call.q, call.k, call.v
        batch, heads, q_len, _ = q.shape
        kv_len, orders, lines = k.shape[2], layout.orders, layout.lines
        kind = torch.float32 if wanted.wide else None
        dq, dk, dv = orders.q.empty(q, kind), orders.k.empty(k, kind), orders.v.empty(v, kind)
        row_sums = column_sums = None
        if lines.rows:
            row_sums = empty_fp32(q, len(lines.rows), batch, heads, q_len)
        if lines.columns:
            column_sums = empty_fp32(q, len(lines.columns), batch, heads, kv_len)
        with on_device(q.device):
            stream = stream_of(q.device)
            shift, rest, delta = _row_statistics(layout, backward, stream)
            run = BackwardLaunches(layout, lowered, call, (grad_out, shift, rest, delta), stream)
            if (wanted.k or wanted.v or column_sums is not None) and kv_len:
                run.launch("backward_kv", [dk, dv], [*orders.k.rows, *orders.v.rows], column_sums)
            if wanted.q or (row_sums is not None and kv_len):
                run.launch("backward_q", [dq], orders.q.rows, row_sums)
        found = CallGradients(
            dq if wanted.q else None, dk if wanted.k else None, dv if wanted.v else None
        )
        if wanted.tensors or wanted.params:
            some = (row_sums, column_sums) if kv_len else (None, None)
            found = found.plus(*line_gradients(call, wanted, lines, *some))
        return found, lambda: delta

    def bound_forward(self, layout: LaunchSpec, lowered: Lowered, call: Call) -> BoundForward:
        """See :class:`~..kernels.kernel.Family`."""
        return bound_forward(self, layout, lowered, call)

    def bound_backward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call, backward: Backward
    ) -> BoundBackward:
        """See :class:`~..kernels.kernel.Family`."""
        return bound_backward(self, layout, lowered, call)

    def movable(self, moving: Moving) -> Moving:
        """``moving``: the kernel reads any strides."""
        return moving

    def tangents(
        self, layout: LaunchSpec, moving: Moving, results: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See :class:`~..kernels.kernel.Family`."""
        assert results is not None
        return (*results, *launch_tangent(moving, layout, *results))


def launch_forward(
    name: str, layout: LaunchSpec, lowered: Lowered, call: Call,
    results: tuple[torch.Tensor, torch.Tensor], more: Sequence[torch.Tensor] = (),
) -> None:  # fmt: skip
    """Launch the forward called ``name`` of a layout, which writes output and log-sum-exp.

    ``more`` is what it reads besides.
    """
    out, lse = results
    q = call.q
    stream = stream_of(q.device)
    with on_device(q.device):
        lists = lists_of(layout, lowered, call, name, stream)
        layout.executables[name].launch(
            layout.work_tiles[name],
            stream,
            [
                q, call.k, call.v, out, lse, *layout.strides, *out.stride()[:3],
                call.scale, *layout.sizes, origin(call.q_offset, call.q_index),
                origin(call.kv_offset, call.kv_index), layout.heads_per_wave[name],
                *capture_arguments(layout.facts, call), *lists, *more,
            ],
        )  # fmt: skip


class BackwardLaunches:
    """Launches of the kernels of a backward, on the current device."""

    def __init__(
        self, layout: LaunchSpec, lowered: Lowered, call: Call,
        rows: tuple[torch.Tensor, ...], stream: int,
    ) -> None:  # fmt: skip
        """``rows`` are the output's gradient, the parts of log-sum-exps, and delta."""
        self._layout, self._lowered, self._call, self._stream = layout, lowered, call, stream
        grad_out, *statistics = rows
        self._operands = [call.q, call.k, call.v, grad_out]
        self._shared = [
            *statistics, *layout.strides, *layout.grad_strides, call.scale, *layout.sizes,
            origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index),
        ]  # fmt: skip
        self._captures = capture_arguments(layout.facts, call)

    def launch(
        self, name: str, made: Sequence[torch.Tensor], steps: Sequence[int],
        last: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Launch the kernel called ``name``.

        Args:
            name: Of the layout.
            made: The gradients that it writes.
            steps: How many rows theirs are apart, by batch entry, head and row.
            last: Where it writes what it adds up along lines, or what it reads besides.
        """
        layout = self._layout
        lists = lists_of(layout, self._lowered, self._call, name, self._stream)
        layout.executables[name].launch(
            layout.work_tiles[name], self._stream,
            [*self._operands, *made, *self._shared, *steps, layout.heads_per_wave[name],
             *self._captures, *lists, *(() if last is None else (last,))],
        )  # fmt: skip


def empty_results(layout: LaunchSpec, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for the output, in q's memory order, and for the log-sum-exp (batch, heads, q_len)."""
    q, order = call.q, layout.orders.out
    kind = torch.float32 if call.wide else q.dtype
    out = given_room(call, order, kind)
    return order.empty(q, kind) if out is None else out, torch.empty_like(layout.rows)


def _row_statistics(layout: LaunchSpec, backward: Backward, stream: int) -> torch.Tensor:
    """Shifts and rests of log-sum-exps, and delta: (3, batch, heads, padded rows) fp32."""
    out, lse, grad_out, grad_lse, _ = backward
    batch, heads, _, q_len, _ = layout.sizes
    padded = -(-q_len // PADDING) * PADDING
    found = empty_fp32(out, 3, batch, heads, padded)
    shift, rest, delta = found
    layout.executables["row_statistics"].launch(
        padded // STATISTICS_ROWS * batch * heads, stream,
        [out, grad_out, lse, delta if grad_lse is None else grad_lse.contiguous(), shift, rest,
         delta, *out.stride()[:3], *layout.grad_strides, heads, q_len],
    )  # fmt: skip
    return found
