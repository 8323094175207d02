"""Launches of the kernel that makes output, log-sum-exp and the tangents of both."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch

from ..kernels.arguments import capture_arguments, origin
from ..kernels.streams import on_device, stream_of
from ..kernels.tile_lists import lists_of
from .arguments import HopperLayout, blocks_of, descriptor_strides, is_drawn, moved_argument
from .launch import launch_of, view

if TYPE_CHECKING:
    from ..kernels.arguments import Layout
    from ..kernels.moving import Moving
    from .counters import Counters
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


def layout_of(layout: Layout, moving: Moving, programs: int) -> HopperLayout:
    """``layout`` with what launches need besides.

    Args:
        layout: With the kernel.
        moving: A call of the signature, readable.
        programs: How many are launched.
    """
    config = layout.executables[_DIRECTION].config
    launch = launch_of(layout.executables[_DIRECTION])
    blocks = blocks_of(_DIRECTION, layout.facts, config)
    out = layout.orders.out.empty(moving.call.q)
    views = {}
    for name, tensor in _described(moving, out, out).items():
        steps = descriptor_strides(tensor)
        assert steps is not None
        views[name] = view(tensor, steps, blocks[name], launch.encoders.get(name))
    return HopperLayout(
        layout.facts, layout.executables, layout.strides, layout.orders, layout.sizes,
        layout.lists, layout.together, layout.lines, {_DIRECTION: launch}, views,
        programs=programs, drawn=is_drawn(moving.lowered, config),
    )  # fmt: skip


def launch_with_tangents(
    moving: Moving, layout: HopperLayout, maps: TensorMaps, counters: Counters
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, log-sum-exp, and their tangents.

    Args:
        moving: Readable.
        layout: Its kernel.
        maps: Those of earlier calls.
        counters: By which programs may share out their tiles.
    """
    call = moving.call
    out, out_moved = (layout.orders.out.empty(call.q) for _ in range(2))
    lse = call.q.new_empty(call.q.shape[:3], dtype=torch.float32)
    lse_moved = torch.empty_like(lse)
    stream = stream_of(call.q.device)
    with on_device(call.q.device):
        lists = lists_of(layout, moving.lowered, call, _DIRECTION, stream)
        described = [
            maps.of(layout.views[name], x) for name, x in _described(moving, out, out_moved).items()
        ]
        counter = [counters.of(call.q.device, stream).data_ptr()] if layout.drawn else []
        layout.launches[_DIRECTION].run(
            layout.programs,
            stream,
            [
                *chain(*described[:4]), lse.data_ptr(), *chain(*described[4:]),
                lse_moved.data_ptr(), *counter,
                call.scale, *layout.sizes,
                origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index),
                layout.together[_DIRECTION], *capture_arguments(layout.facts, call), *lists,
            ],
        )  # fmt: skip
    return out, lse, out_moved, lse_moved


def _described(
    moving: Moving, out: torch.Tensor, out_moved: torch.Tensor
) -> dict[str, torch.Tensor]:
    """By kernel argument, in order: q, k, v, ``out``, tangents; of what does not move, itself."""
    call = moving.call
    own = {"q_desc": call.q, "k_desc": call.k, "v_desc": call.v, "o_desc": out}
    found = {**moving.operands, "o": out_moved}
    return own | {moved_argument(name): found.get(name[0], x) for name, x in own.items()}
