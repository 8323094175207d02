"""Launches of the kernel that makes output, log-sum-exp and the tangents of both."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from ..kernels.arguments import capture_arguments, origin
from ..kernels.device import on_device, stream_of
from ..kernels.tile_lists import lists_of
from ..log_sum import of_one_number
from .hopper_layout import described
from .launch import descriptor_strides

if TYPE_CHECKING:
    from ..kernels.jvp_call import Moving
    from ..kernels.work_counters import Counts
    from .hopper_layout import HopperLayout
    from .launch import TensorMaps

_DIRECTION = "forward_tangent"


def readable(moving: Moving) -> Moving:
    """``moving``, with copies of tangents that the tensor memory accelerator cannot read."""
    operands = {
        name: x
        if descriptor_strides(x) is not None
        else x.clone(memory_format=torch.contiguous_format)
        for name, x in moving.operands.items()
    }
    return replace(moving, operands=operands)


def launch_with_tangents(
    moving: Moving, layout: HopperLayout, maps: TensorMaps, counts: Counts
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, log-sum-exp, and their tangents.

    Args:
        moving: Readable.
        layout: Its kernel.
        maps: Those of earlier calls.
        counts: By which programs may share out their tiles.
    """
    call = moving.call
    out, out_moved = (layout.orders.out.empty(call.q) for _ in range(2))
    lse = call.q.new_empty((2, *call.q.shape[:3]), dtype=torch.float32)
    lse_moved = torch.empty_like(lse[0])
    stream = stream_of(call.q.device)
    with on_device(call.q.device):
        lists = lists_of(layout, moving.lowered, call, _DIRECTION, stream)
        tensors = described(call, out, moving.operands, out_moved)
        seen = [maps.of(layout.views[name], x) for name, x in tensors.items()]
        counter = [counts.of(call.q.device, stream).data_ptr()] if layout.drawn else []
        layout.launches[_DIRECTION].run(
            layout.programs,
            stream,
            [
                *chain(*seen[:4]), lse.data_ptr(), *chain(*seen[4:]),
                lse_moved.data_ptr(), *counter,
                call.scale, *layout.sizes,
                origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index),
                layout.heads_per_wave[_DIRECTION], *capture_arguments(layout.facts, call), *lists,
            ],
        )  # fmt: skip
    return out, lse, out_moved, of_one_number(lse_moved)
