"""The last arguments of the short kernels' launches, and calls of graphs that are bound to them.

See :mod:`..kernels.bound_calls`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..base import CallGradients
from ..kernels.arguments import call_numbers
from ..kernels.bound_calls import allocator, rows_of
from ..kernels.call_signature import PADDING
from ..kernels.device import is_current, stream_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..base import Backward, Call
    from ..kernels.bound_calls import LastArguments
    from ..kernels.compile import Executable
    from ..kernels.launch_spec import LaunchSpec


def forward_numbers(layout: LaunchSpec, call: Call, steps: Sequence[int]) -> list[object]:
    """Behind the tensors, before what the program adds. ``steps`` are the output's strides."""
    return [*layout.strides, *steps[:3], *call_numbers(layout.sizes, call), layout.part_rows]


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
    """Programs of a forward: batch entries, heads, parts of a head's rows."""
    batch, heads, _, q_len, _ = layout.sizes
    return batch, heads, -(-q_len // layout.part_rows)


@dataclass(frozen=True, slots=True)
class ShortForwardLaunch:
    """See :meth:`attndsl.backends.base.Backend.bound_forward`."""

    layout: LaunchSpec
    kernel: Executable
    dtype: torch.dtype
    """Dtype of the output."""
    last: LastArguments

    def __call__(self, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the forward."""
        q, k, v, *captures = operands
        layout, device = self.layout, q.device
        if not is_current(device):
            with torch.cuda.device(device):
                return self(operands)
        order, new = layout.orders.out, allocator(device.type)
        out = new(order.shape, order.strides, self.dtype)
        lse = new(*rows_of(layout), torch.float32)
        arguments = [q, k, v, out, lse, *self.last.now(captures)]
        self.kernel.launch_grid(forward_grid(layout), stream_of(device), arguments)
        return out, lse


@dataclass(frozen=True, slots=True)
class ShortBackwardLaunch:
    """See :meth:`attndsl.backends.base.Backend.bound_backward`."""

    layout: LaunchSpec
    kernel: Executable
    dtype: torch.dtype
    """Dtype of the gradients."""
    last: LastArguments

    def __call__(self, operands: Sequence[torch.Tensor], backward: Backward) -> CallGradients:
        """Launch the backward."""
        q, k, v, *captures = operands
        layout, kind, device = self.layout, self.dtype, q.device
        if not is_current(device):
            with torch.cuda.device(device):
                return self(operands, backward)
        out, lse, grad_out, grad_lse, wanted = backward
        batch, heads, kv_heads, q_len, _ = layout.sizes
        orders, new = layout.orders, allocator(device.type)
        dq = new(orders.q.shape, orders.q.strides, kind)
        dk = new(orders.k.shape, orders.k.strides, kind)
        dv = new(orders.v.shape, orders.v.strides, kind)
        padded = -(-q_len // PADDING) * PADDING
        delta = new((batch, heads, padded), (heads * padded, padded, 1), torch.float32)
        dlse = delta if grad_lse is None else grad_lse
        self.kernel.launch_grid(
            (batch, kv_heads, 1),
            stream_of(device),
            [q, k, v, out, grad_out, dq, dk, dv, lse, dlse, delta, *self.last.now(captures)],
        )
        return CallGradients(
            dq if wanted.q else None, dk if wanted.k else None, dv if wanted.v else None
        )
