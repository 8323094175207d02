"""Launches of the kernel that makes output, log-sum-exp and the tangents of both."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..triton.arguments import capture_arguments, origin
from ..triton.streams import on_device, stream_of
from ..triton.tile_lists import lists_of
from .arguments import HopperLayout, blocks_of, descriptor_strides, moved_argument
from .launch import launch_of, view

if TYPE_CHECKING:
    from ..triton.arguments import Layout
    from ..triton.tangents import Moving
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


def layout_of(layout: Layout, moving: Moving, together: int) -> HopperLayout:
    """``layout`` with what launches need besides.

    Args:
        layout: With the kernel.
        moving: A call of the signature, readable.
        together: Query heads whose tiles run side by side.
    """
    config = layout.executables[_DIRECTION].config
    launch = launch_of(layout.executables[_DIRECTION])
    blocks = blocks_of(_DIRECTION, layout.special, config)
    batch, heads, q_len, _ = moving.call.q.shape
    out = moving.call.q.new_empty((batch, heads, q_len, moving.call.v.shape[-1]))
    tensors = {**_described(moving), "o_desc": out, "o_moved_desc": out}
    views = {}
    for name, tensor in tensors.items():
        steps = descriptor_strides(tensor)
        assert steps is not None
        views[name] = view(tensor, steps, blocks[name], launch.encoders.get(name))
    return HopperLayout(
        layout.special, layout.executables, layout.strides, layout.out_strides, layout.sizes,
        layout.lists, layout.lines, {_DIRECTION: launch}, views, together=together,
        programs=-(-q_len // config.block_m) * batch * heads,
    )  # fmt: skip


def launch_with_tangents(
    moving: Moving, layout: HopperLayout, maps: TensorMaps
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, log-sum-exp, and their tangents.

    Args:
        moving: Readable.
        layout: Its kernel.
        maps: Those of earlier calls.
    """
    call, views = moving.call, layout.views
    batch, heads, q_len, _ = call.q.shape
    out = call.q.new_empty((batch, heads, q_len, call.v.shape[-1]))
    lse = call.q.new_empty((batch, heads, q_len), dtype=torch.float32)
    out_moved, lse_moved = torch.empty_like(out), torch.empty_like(lse)
    stream = stream_of(call.q.device)
    with on_device(call.q.device):
        lists = lists_of(layout, moving.lowered, call, _DIRECTION, stream)
        described = {**_described(moving), "o_desc": out, "o_moved_desc": out_moved}
        layout.launches[_DIRECTION].run(
            layout.programs,
            stream,
            [
                *(part for name, x in described.items() for part in maps.of(views[name], x)),
                lse.data_ptr(), lse_moved.data_ptr(), call.scale, *layout.sizes,
                origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index),
                layout.together, *capture_arguments(layout.special, call), *lists,
            ],
        )  # fmt: skip
    return out, lse, out_moved, lse_moved


def _described(moving: Moving) -> dict[str, torch.Tensor]:
    """By kernel argument, in order: q, k, v and their tangents; of what does not move, itself."""
    call = moving.call
    own = {"q_desc": call.q, "k_desc": call.k, "v_desc": call.v}
    moved = {moved_argument(name): moving.operands.get(name[0], x) for name, x in own.items()}
    return own | moved
