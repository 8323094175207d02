"""Signature of a call, which decides its kernels, sizes and strides: cheap, made by every call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..base import matmul_precision
from ..device.library import STATISTICS_PADDING
from ..emit.dropout_offsets import kinds_of_draws

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Scalar
    from .kernel import Task


PADDING = STATISTICS_PADDING.value


def signature_of(
    lowered: Lowered, call: Call, task: Task, grad_out: torch.Tensor | None
) -> tuple[object, ...]:
    """Signature that a ``LaunchSpec`` depends on; cheap, since every call makes one."""
    q, k, v, signature = call.q, call.k, call.v, call.signature
    bits = q.data_ptr() | k.data_ptr() | v.data_ptr()
    if grad_out is not None:
        bits |= grad_out.data_ptr()
    q_offset, kv_offset = call.q_offset, call.kv_offset
    precision = matmul_precision() if q.dtype is torch.float32 else None
    steps = None if grad_out is None else grad_out.stride()
    if (
        signature is not None and not (call.tensors or call.params or call.draws or bits % 16)
        and type(q_offset) is type(kv_offset) is int and call.room is None
    ):  # fmt: skip
        # The most frequent calls. One flat tuple is hashed in half the time of those below.
        return signature, task, call.scale <= 0, precision, steps, q_offset != 0, kv_offset != 0
    found: tuple[object, ...] = (
        task,
        call.scale <= 0,
        call.deterministic,
        precision,
        not isinstance(call.seed, int),
        bits % 16 == 0,
        steps,
        q_offset != 0 if isinstance(q_offset, int) else q_offset.dtype,
        kv_offset != 0 if isinstance(kv_offset, int) else kv_offset.dtype,
        None if call.room is None else _kind_of_room(call.room),
    )
    if call.tensors or call.params:
        aligned = tuple(t.data_ptr() % 16 == 0 for t in call.tensors.values())
        found = (*found, aligned, *map(_param_class, call.params.values()))
    if call.draws is not None:
        found = (*found, kinds_of_draws(call))
    if signature is not None:
        return (signature, found)
    return (
        lowered.digest,
        *found,
        call.wide,
        q.dtype,
        q.device,
        tuple((t.shape, t.stride()) for t in (q, k, v)),
        tuple((t.dtype, t.shape, t.stride()) for t in call.tensors.values()),
        tuple(call.sizes.values()),
        None if call.q_index is None else call.q_index.dtype,
        None if call.kv_index is None else call.kv_index.dtype,
    )


def _kind_of_room(room: torch.Tensor) -> tuple[object, ...]:
    return (
        room.dtype, room.shape, room.stride(), room.device, room.data_ptr() % 16 == 0, room.is_neg()
    )  # fmt: skip


def _param_class(value: Scalar | torch.Tensor) -> object:
    if isinstance(value, int):
        return value.bit_length() > 31
    return False if isinstance(value, float) else value.dtype
