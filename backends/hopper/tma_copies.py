"""Copies of captured tensors whose rows the tensor memory accelerator cannot read where they lie.

A bias of 2047 keys has rows at odd addresses, and pairs would look it up element by element. Where
a call reads it often enough, a copy with padded rows is made first, and read by tiles.

Non-goals: copies that outlive a call. Nothing says for sure that a tensor is what it was: replays
of a graph write to it, and sharded training gathers parameters into it, without a new version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.ir import leaf_names
from attndsl.layout import pad_strides
from attndsl.passes.tiles.tile_plan import BACKWARD_KV, FORWARD

from ..kernels.kernel import Task
from .tile_shapes import ADDRESS_BYTES

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call

_PAIRS_A_BYTE_FORWARD, _PAIRS_A_BYTE_BACKWARD = 1.5, 0.15
"""Pairs that read each byte of a tensor where a copy takes as long as it saves."""


def is_worth_a_copy(own: torch.Tensor, name: str, lowered: Lowered, call: Call, task: Task) -> bool:
    """Return True if reading ``own`` by tiles saves more time than copying it takes.

    Args:
        own: What the call reads of the tensor ``name``, see ``tma_bias.window``.
        name: Of the tensor.
        lowered: The program.
        call: The call.
        task: ``FORWARD`` or ``BACKWARD``.
    """
    size = own.numel() * own.element_size()
    batch, heads, q_len, _ = call.q.shape
    pairs = batch * heads * q_len * call.k.shape[2] * _share(lowered, call, name, task)
    backward = task is Task.BACKWARD
    return pairs >= size * (_PAIRS_A_BYTE_BACKWARD if backward else _PAIRS_A_BYTE_FORWARD)


def _share(lowered: Lowered, call: Call, name: str, task: Task) -> float:
    """About how many of the pairs take part, as far as that is known before they are looked at."""
    loop = BACKWARD_KV if task is Task.BACKWARD else FORWARD
    work = lowered.sparsity.work(loop, call.shifted, call.indexed)
    if work == "dense":
        return 1.0
    mask = lowered.program.mask
    assert mask is not None
    # A mask that reads all of the tensor is no reason to spare a copy.
    return 0.5 if work == "masked" or name in leaf_names(mask) else 0.0


def room_for(own: torch.Tensor) -> torch.Tensor:
    """An empty tensor like ``own``, whose rows begin at multiples of 16 bytes."""
    unit = ADDRESS_BYTES // own.element_size()
    sizes = [*own.shape[:-1], -(-own.shape[-1] // unit) * unit]
    dense = torch.empty(sizes, dtype=own.dtype, device="meta").stride()
    return torch.empty_strided(
        own.shape, pad_strides(dense, sizes, own.dtype), dtype=own.dtype, device=own.device
    )
