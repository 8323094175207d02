"""Launches of the kernel that makes tangents: of output and log-sum-exp, given both."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..kernels.arguments import capture_arguments, origin
from ..kernels.device import on_device, stream_of
from ..kernels.tile_lists import lists_of
from ..log_sum import of_one_number
from ..memory_order import arranged, strides

if TYPE_CHECKING:
    from ..kernels.jvp_call import Moving
    from ..kernels.launch_spec import LaunchSpec


def launch_tangent(
    moving: Moving, layout: LaunchSpec, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tangents of ``out`` (batch, heads, q_len, value_dim) and ``lse`` (batch, heads, q_len).

    Args:
        moving: With at least one row of queries.
        layout: Its kernel.
        out: Of the forward call.
        lse: Its log-sum-exp, see :mod:`..log_sum`.
    """
    call, facts = moving.call, layout.facts
    order = layout.orders.out
    out, lse = arranged(out, order), lse.contiguous()
    out_moved, lse_moved = order.empty(out), torch.empty_like(lse[0])
    # Of what does not move nothing is read.
    tangents = [moving.operands.get(name, getattr(call, name)) for name in ("q", "k", "v")]
    kernel = layout.executables["tangent"]
    stream = stream_of(call.q.device)
    with on_device(call.q.device):
        lists = lists_of(layout, moving.lowered, call, "tangent", stream)
        kernel.launch(
            layout.work_tiles["tangent"], stream,
            [
                call.q, call.k, call.v, out, lse, *tangents, out_moved, lse_moved,
                *layout.strides, *(step for x in tangents for step in strides(x)[:3]), call.scale,
                *layout.sizes, origin(call.q_offset, call.q_index),
                origin(call.kv_offset, call.kv_index), *order.rows,
                layout.heads_per_wave["tangent"], *capture_arguments(facts, call), *lists,
            ],
        )  # fmt: skip
    return out_moved, of_one_number(lse_moved)
