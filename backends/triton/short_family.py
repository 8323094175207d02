"""The family of kernels for keys that fit: a program holds all keys of a head.

A forward loads them once for many rows, and a backward is one kernel: nothing runs before or after
it, and its sums have a fixed order.

Non-goals: gradients of captures that are sums along rows or keys, which other families make.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..base import CallGradients
from ..emit.facts import tile_width
from ..kernels.arguments import capture_arguments
from ..kernels.bound_calls import last_arguments
from ..kernels.call_signature import PADDING
from ..kernels.config import HOPPER_PROCESSORS
from ..kernels.device import on_device, stream_of
from ..kernels.kernel import Job, Task
from ..kernels.tile_order import processors_of
from ..memory_order import empty_fp32, wide_dtype
from .family import Portable, empty_results, facts_of_task
from .short_kernels import BACKWARDS, FORWARDS, KERNELS, NAME
from .short_launch import backward_numbers, backward_of, forward_grid, forward_numbers, forward_of
from .short_tiles import keys_held, most_keys, shape_of
from .tiles import Widths

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.pipeline import Lowered

    from ..base import Backward, BoundBackward, BoundForward, Call, Wants
    from ..kernels.kernel import FixedKernel, Kernel
    from ..kernels.launch_spec import LaunchSpec

_PROGRAMS = 4
"""Forward programs for each processor. Heads are parted until there are so many; more parts would
read the same keys more often."""
_MOST_HEADS = 65535
"""CUDA's limit for the second number of a program."""
_MOST_ROWS = 1024
"""Most rows, of all query heads that share keys, that one backward program goes along. More would
take longer than Hopper's backward, whose programs share them (77 keys: 171 us for 4096 rows, 149
there)."""
_MOST_ROWS_OF_FEW = 256
"""The same where key heads are so few that most processors wait, and query heads would be more.
Hopper's backward then has work tiles of one query head each: see M76 in docs/dev/measured.md."""
_MOST_KEYS_OF_MANY = 96
"""The most keys of heads that all processors are busy with. Programs that hold more have so many
registers that Hopper's three kernels are faster: see M76."""


class Short(Portable):
    """Keys that fit. Has forwards and backwards; of a backward's plan it makes dQ, dK and dV."""

    name = NAME
    kernels: tuple[Kernel, ...] = KERNELS
    fixed: tuple[FixedKernel, ...] = ()

    def __init__(self, beside_others: bool = False) -> None:
        """Make it; ``beside_others`` leaves calls of few key heads to the families behind it."""
        self._beside_others = beside_others

    def why_not(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> str | None:  # fmt: skip
        """See :class:`~..kernels.kernel.Family`."""
        backward = task is Task.BACKWARD
        if call.q.shape[1] > _MOST_HEADS:
            return f"the short kernels support up to {_MOST_HEADS} heads"
        if keys_held(call.k.shape[2], _widths(call), backward) is None:
            return f"the short {task.direction} kernel cannot hold {call.k.shape[2]} keys"
        if not backward:
            return None
        if wanted is not None and (wanted.tensors or wanted.params):
            return "the short backward kernel does not compute gradients of captures"
        (batch, heads, q_len, _), kv_heads = call.q.shape, call.k.shape[1]
        rows = q_len * heads // kv_heads
        if rows > _MOST_ROWS:
            return f"the short backward kernel supports up to {_MOST_ROWS} query rows per key head"
        if not self._beside_others or not _is_hoppers(lowered, call, wanted):
            return None
        programs = batch * kv_heads
        if heads > kv_heads and rows > _MOST_ROWS_OF_FEW and 2 * programs <= HOPPER_PROCESSORS:
            return f"{programs} key heads are too few programs for {rows} query rows each"
        if call.k.shape[2] > _MOST_KEYS_OF_MANY and programs > HOPPER_PROCESSORS:
            return f"it is slower for more than {_MOST_KEYS_OF_MANY} keys of {programs} heads"
        return None

    def most_keys(self, task: Task, head_dim: int) -> int | None:
        """See :class:`~..kernels.kernel.Family`."""
        width = tile_width(head_dim)
        return most_keys(Widths(width, width, 2), task is Task.BACKWARD)

    def jobs(
        self, lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None,
        wanted: Wants | None,
    ) -> tuple[Job, ...]:  # fmt: skip
        """One: the kernel of the call's lengths."""
        table = BACKWARDS if task is Task.BACKWARD else FORWARDS
        keys = keys_held(call.k.shape[2], _widths(call), task is Task.BACKWARD)
        assert keys is not None
        kernel = table[shape_of(call.q.shape[2], keys, task is Task.BACKWARD)]
        return (Job(kernel, lowered, facts_of_task(lowered, call, task, grad_out, wanted)),)

    def layout(
        self,
        layout: LaunchSpec,
        jobs: tuple[Job, ...],
        call: Call,
        more: Mapping[str, torch.Tensor],
    ) -> LaunchSpec:
        """``layout`` with the query tiles that a forward program takes."""
        (kernel,) = layout.executables.values()
        (batch, heads, q_len, _), kv_heads = call.q.shape, call.k.shape[1]
        tiles = heads // kv_heads * -(-q_len // kernel.config.block_m)
        most = _PROGRAMS * processors_of(call.q.device) // (batch * kv_heads)
        return replace(layout, part_tiles=-(-tiles // max(1, min(tiles, most))))

    def forward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~..kernels.kernel.Family`."""
        q = call.q
        out, lse = empty_results(layout, call)
        (kernel,) = layout.executables.values()
        with on_device(q.device):
            kernel.launch_grid(
                forward_grid(layout),
                stream_of(q.device),
                [
                    q, call.k, call.v, out, lse, *forward_numbers(layout, call, out.stride()),
                    *capture_arguments(layout.facts, call),
                ],
            )  # fmt: skip
        return out, lse

    def bound_forward(self, layout: LaunchSpec, lowered: Lowered, call: Call) -> BoundForward:
        """See :class:`~..kernels.kernel.Family`."""
        numbers = forward_numbers(layout, call, layout.orders.out.strides)
        last = last_arguments(layout, call, numbers)
        if last is None or call.room is not None:
            return super().bound_forward(layout, lowered, call)
        (kernel,) = layout.executables.values()
        return forward_of(layout, kernel, call, last, wide_dtype(call.wide) or call.q.dtype)

    def bound_backward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call, backward: Backward
    ) -> BoundBackward:
        """See :class:`~..kernels.kernel.Family`."""
        grad_lse, wanted = backward.grad_lse, backward.wanted
        numbers = backward_numbers(layout, call, backward.out.stride(), grad_lse is not None)
        last = last_arguments(layout, call, numbers)
        if last is None or not (grad_lse is None or grad_lse.is_contiguous()):
            return super().bound_backward(layout, lowered, call, backward)
        (kernel,) = layout.executables.values()
        return backward_of(layout, kernel, call, last, wide_dtype(wanted.wide) or call.q.dtype)

    def backward(
        self, layout: LaunchSpec, lowered: Lowered, call: Call, backward: Backward
    ) -> tuple[CallGradients, Callable[[], torch.Tensor]]:
        """See :class:`~..kernels.kernel.Family`."""
        out, lse, grad_out, grad_lse, wanted = backward
        q, k, v, orders = call.q, call.k, call.v, layout.orders
        batch, heads, q_len, _ = q.shape
        kind = torch.float32 if wanted.wide else None
        dq, dk, dv = orders.q.empty(q, kind), orders.k.empty(k, kind), orders.v.empty(v, kind)
        delta = empty_fp32(q, batch, heads, -(-q_len // PADDING) * PADDING)
        dlse = delta if grad_lse is None else grad_lse.contiguous()
        (kernel,) = layout.executables.values()
        with on_device(q.device):
            kernel.launch_grid(
                (batch, k.shape[1], 1),
                stream_of(q.device),
                [
                    q, k, v, out, grad_out, dq, dk, dv, lse, dlse, delta,
                    *backward_numbers(layout, call, out.stride(), grad_lse is not None),
                    *capture_arguments(layout.facts, call),
                ],
            )  # fmt: skip
        gradients = CallGradients(
            q=dq if wanted.q else None,
            k=dk if wanted.k else None,
            v=dv if wanted.v else None,
            tensors={},
            params={},
        )
        return gradients, lambda: delta


def _is_hoppers(lowered: Lowered, call: Call, wanted: Wants | None) -> bool:
    """Return True if Hopper's backward runs a call, and may have a work tile for each query head.

    Only calls that were measured count: plain scores, halves that it can read, and no more.
    """
    program, halves = lowered.program, call.q.element_size() == 2
    plain = lowered.sparsity.plain and program.weights is None and program.dropout is None
    read = call.q.shape[3] % 8 == call.v.shape[3] % 8 == 0
    wide = call.wide or call.deterministic or (wanted is not None and wanted.wide)
    return halves and plain and read and not wide and not program.bounded


def _widths(call: Call) -> Widths:
    """At least those of the kernel's tiles."""
    width = max(tile_width(call.q.shape[3]), tile_width(call.v.shape[3]))
    return Widths(width, width, call.q.element_size())
