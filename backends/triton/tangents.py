"""Launches of the kernel that makes tangents: of output and log-sum-exp, given both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..memory_order import arranged
from .arguments import capture_arguments, origin
from .generate_tangent import moved_name, with_tangents
from .specialise import Specialisation, specialise, strides
from .streams import on_device, stream_of
from .tile_lists import lists_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from attndsl.pipeline import Lowered

    from ..base import Call, Tangents
    from .arguments import Layout


@dataclass(frozen=True, slots=True)
class Moving:
    """A call, and the direction in which its arguments move."""

    lowered: Lowered
    call: Call
    """With the tangents of captures as further tensors (see ``with_tangents``)."""
    operands: Mapping[str, torch.Tensor]
    """Tangents of ``q``, ``k`` and ``v``, of those that move, with last stride 1."""
    captures: tuple[str, ...]
    """Names of the tensors and params that move."""

    def signature(self) -> tuple[Hashable, ...]:
        """What the kernel depends on beside the call."""
        operands = tuple(
            (name, x.stride(), x.data_ptr() % 16 == 0) for name, x in self.operands.items()
        )
        return *operands, self.captures

    def special(self) -> Specialisation:
        """What the kernel is generated for."""
        program = with_tangents(self.lowered.program, self.captures)
        return replace(
            specialise(program, self.call, *self.operands.values()),
            moving_operands="".join(self.operands),
            moving_captures=self.captures,
        )


def moving_of(lowered: Lowered, call: Call, moved: Tangents) -> Moving:
    """``call`` along ``moved``."""
    program = lowered.program
    given = {"q": (call.q, moved.q), "k": (call.k, moved.k), "v": (call.v, moved.v)}
    operands = {
        name: _rows(tangent.to(like.dtype))
        for name, (like, tangent) in given.items()
        if tangent is not None
    }
    # In the order of declarations; of an empty tensor nothing is looked up.
    names = (*(decl.name for decl in program.tensors), *(decl.name for decl in program.params))
    captures = {
        name: moved.captures[name]
        for name in names
        if name in moved.captures and moved.captures[name].numel()
    }
    tensors = {moved_name(program, name): tangent for name, tangent in captures.items()}
    call = replace(call, tensors={**call.tensors, **tensors})
    return Moving(lowered, call, operands, tuple(captures))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 or not tensor.numel() else tensor.contiguous()


def launch_tangent(
    moving: Moving, layout: Layout, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tangents of ``out`` (batch, heads, q_len, value_dim) and ``lse`` (batch, heads, q_len).

    Args:
        moving: With at least one row of queries.
        layout: Its kernel.
        out: Of the forward call.
        lse: The same, fp32, natural logarithm.
    """
    call, special = moving.call, layout.special
    order = layout.orders.out
    out, lse = arranged(out, order), lse.contiguous()
    out_moved, lse_moved = order.empty(out), torch.empty_like(lse)
    # Of what does not move nothing is read.
    tangents = [moving.operands.get(name, getattr(call, name)) for name in ("q", "k", "v")]
    kernel = layout.executables["tangent"]
    batch, heads, q_len, _ = call.q.shape
    stream = stream_of(call.q.device)
    with on_device(call.q.device):
        lists = lists_of(layout, moving.lowered, call, "tangent", stream)
        kernel.launch(
            -(-q_len // kernel.config.block_m) * batch * heads, stream,
            [
                call.q, call.k, call.v, out, lse, *tangents, out_moved, lse_moved,
                *layout.strides, *(step for x in tangents for step in strides(x)[:3]), call.scale,
                *layout.sizes, origin(call.q_offset, call.q_index),
                origin(call.kv_offset, call.kv_index), *order.rows, layout.together["tangent"],
                *capture_arguments(special, call), *lists,
            ],
        )  # fmt: skip
    return out_moved, lse_moved
