"""The last arguments of the short kernels' launches, and calls of graphs that are bound to them.

See :mod:`..kernels.bound_calls`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..base import CallGradients
from ..kernels.arguments import call_numbers
from ..kernels.bound_calls import KernelLaunch, OneKernelForward, rows_of
from ..kernels.call_signature import PADDING
from ..kernels.device import stream_if_current

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..base import Backward, Call
    from ..kernels.bound_calls import LastArguments, NewTensor
    from ..kernels.compile import Executable
    from ..kernels.launch_spec import LaunchSpec


def forward_numbers(layout: LaunchSpec, call: Call, steps: Sequence[int]) -> list[object]:
    """Behind the tensors, before what the program adds. ``steps`` are the output's strides."""
    return [*layout.strides, *steps[:3], *call_numbers(layout.sizes, call), layout.part_tiles]


def backward_numbers(
    layout: LaunchSpec, call: Call, steps: Sequence[int], has_dlse: bool
) -> list[object]:
    """Arguments of a backward behind the tensors; see :func:`forward_numbers`."""
    orders = layout.orders
    return [
        *layout.strides, *steps[:3], *layout.grad_strides, *call_numbers(layout.sizes, call),
        *orders.q.rows, *orders.k.rows, *orders.v.rows, int(has_dlse),
    ]  # fmt: skip


def forward_grid(layout: LaunchSpec) -> tuple[int, int, int]:
    """Programs of a forward: batch entries, kv heads, parts of the query tiles of each."""
    batch, heads, kv_heads, q_len, _ = layout.sizes
    (kernel,) = layout.executables.values()
    tiles = heads // kv_heads * -(-q_len // kernel.config.block_m)
    return batch, kv_heads, -(-tiles // layout.part_tiles)


def forward_of(
    layout: LaunchSpec, kernel: Executable, call: Call, last: LastArguments, dtype: torch.dtype
) -> OneKernelForward:
    """Bind forwards like ``call``; ``dtype`` is the output's."""
    order = layout.orders.out
    return OneKernelForward(
        KernelLaunch(kernel, forward_grid(layout), last, call.q.device),
        (order.shape, order.strides, dtype), (*rows_of(layout), torch.float32),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShortBackwardLaunch:
    """See :meth:`attndsl.backends.base.Backend.bound_backward`."""

    launch: KernelLaunch
    made: tuple[NewTensor, NewTensor, NewTensor, NewTensor]
    """dQ, dK, dV and delta."""

    def __call__(self, operands: Sequence[torch.Tensor], backward: Backward) -> CallGradients:
        """Launch the backward."""
        q, k, v, *captures = operands
        launch = self.launch
        if (stream := stream_if_current(launch.index)) is None:
            with torch.cuda.device(q.device):
                return self(operands, backward)
        out, lse, grad_out, grad_lse, wanted = backward
        dq, dk, dv, delta = [launch.new(*each) for each in self.made]
        dlse = delta if grad_lse is None else grad_lse
        launch.run(stream, (q, k, v, out, grad_out, dq, dk, dv, lse, dlse, delta), captures)
        return CallGradients(
            dq if wanted.q else None, dk if wanted.k else None, dv if wanted.v else None
        )


def backward_of(
    layout: LaunchSpec, kernel: Executable, call: Call, last: LastArguments, dtype: torch.dtype
) -> ShortBackwardLaunch:
    """Bind backwards of calls like ``call``; ``dtype`` is the gradients'."""
    batch, heads, kv_heads, q_len, _ = layout.sizes
    padded = -(-q_len // PADDING) * PADDING
    orders = (layout.orders.q, layout.orders.k, layout.orders.v)
    dq, dk, dv = ((order.shape, order.strides, dtype) for order in orders)
    delta = (batch, heads, padded), (heads * padded, padded, 1), torch.float32
    launch = KernelLaunch(kernel, (batch, kv_heads, 1), last, call.q.device)
    return ShortBackwardLaunch(launch, (dq, dk, dv, delta))
