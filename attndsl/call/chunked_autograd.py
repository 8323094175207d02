"""Tangents, second derivatives and ``torch.func`` transforms of calls, on every backend.

Calls that need these are made of torch operations on some rows of queries at a time, all made again
for each derivative (:mod:`.checkpointing`): memory is proportional to the lengths. Some backends
have a kernel for tangents (:mod:`.jvp`), whose own derivatives are made here.

Non-goals: skipping dead tiles; speed beside the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch.autograd import forward_ad

from attndsl.backends.base import Tangents
from attndsl.backends.dense.dense_jvp import tangent
from attndsl.backends.dense.row_blocks import attend_pairs, dense_pairs
from attndsl.backends.log_sum import public_lse
from attndsl.backends.memory_order import arranged, arranged_like, memory_order

from .checkpointing import Function, Pulled, Pushed, recomputed

if TYPE_CHECKING:
    from attndsl.backends.base import Call, Form
    from attndsl.backends.dense.vjp import Tensors
    from attndsl.pipeline import Lowered


CPU_PAIRS = 1 << 19
"""Most pairs of a chunk, of all heads and batch entries (as far as one row of queries allows); a
second derivative holds some 80 tensors of that size."""
_DEVICE_PAIRS = 1 << 22
"""The same on other devices, which take longer to start an operation than to do it."""
_is_within_transform = torch._C._are_functorch_transforms_active


def is_transformed() -> bool:
    """Return True if tangents or ``torch.func`` transforms may be on, which kernels cannot see."""
    return _is_within_transform() or forward_ad._current_level >= 0


def attend_in_chunks(lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)``, differentiable in every mode and any number of times."""
    form, tensors = flattened(call)
    parts = [
        recomputed(_Chunk(lowered, form, first), *_rows(form, tensors, first, last))
        for first, last in _chunks(call)
    ]
    out, lse = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return arranged(out, memory_order(call.q, out.shape[3])), lse


def tangent_in_chunks(
    lowered: Lowered, form: Form, inputs: Tensors, moved: tuple[int, ...], tangents: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tangents of ``out`` and ``lse``, differentiable like :func:`attend_in_chunks`.

    Args:
        lowered: The program.
        form: The call's.
        inputs: Its tensors, as :func:`flattened` gives both.
        moved: Places of those that move.
        tangents: One for each.
    """
    parts = []
    call = form.call(inputs)
    for first, last in _chunks(call):
        push = _Chunk(lowered, form, first).pushed(moved)
        own = tuple(
            x[:, :, first:last] if place == 0 else x
            for place, x in zip(moved, tangents, strict=True)
        )
        parts.append(recomputed(push, *_rows(form, inputs, first, last), *own))
    out, lse = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return arranged(out, memory_order(call.q, out.shape[3])), lse


def pull_in_chunks(
    lowered: Lowered,
    call: Call,
    wanted: tuple[int, ...],
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor,
) -> Tensors:
    """Gradients of the inputs at ``wanted``, differentiable like :func:`attend_in_chunks`.

    Inputs are counted in the order q, k, v, tensors, params that are tensors.
    """
    form, tensors = flattened(call)
    rows: list[torch.Tensor] = []
    sums: list[torch.Tensor] | None = None
    for first, last in _chunks(call):
        given = _rows(form, tensors, first, last)
        pull = Pulled(_Chunk(lowered, form, first), wanted, len(given))
        grads = grad_out[:, :, first:last], grad_lse[:, :, first:last]
        found = list(recomputed(pull, *given, *grads))
        if 0 in wanted:
            rows.append(found.pop(0))
        sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
    assert sums is not None, "a call has at least one chunk"
    found = [*([torch.cat(rows, 2)] if rows else []), *sums]
    operands = (call.q, call.k, call.v)
    return tuple(
        arranged_like(each, operands[place]) if place < 3 else each
        for place, each in zip(wanted, found, strict=True)
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """``out`` and ``lse`` of the rows from ``first``."""

    pushes_results: ClassVar[bool] = False
    lowered: Lowered
    form: Form
    first: int

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        program, call = self.lowered.program, _call_of_rows(self.form, inputs, self.first)
        out, lse = attend_pairs(program, call, dense_pairs(program, call, self.first))
        return _as_output(out, call, inputs[0].dtype), public_lse(lse)

    def pushed(self, moved: tuple[int, ...]) -> Function:
        return _ChunkTangent(self, moved)


@dataclass(frozen=True, slots=True)
class _ChunkTangent:
    """Tangents of a chunk's results, by the program's symbolic derivative."""

    pushes_results: ClassVar[bool] = False
    chunk: _Chunk
    moved: tuple[int, ...]

    def __call__(self, *args: torch.Tensor) -> Tensors:
        chunk = self.chunk
        count = len(args) - len(self.moved)
        call = _call_of_rows(chunk.form, args[:count], chunk.first)
        moved = tangents_at(chunk.form, self.moved, args[count:])
        q, k, v = (x if x is None else _wide(x) for x in (moved.q, moved.k, moved.v))
        out, lse = tangent(chunk.lowered, call, Tangents(q, k, v, moved.captures), chunk.first)
        return _as_output(out, call, args[0].dtype), public_lse(lse)

    def pushed(self, moved: tuple[int, ...]) -> Function:
        return Pushed(self, moved)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.to(torch.float32)


def flattened(call: Call) -> tuple[Form, Tensors]:
    """Flatten ``call`` without its tile map and signature, which hold for all rows alone."""
    return call._replace(tiles=None, signature=None).flatten()


def tangents_at(form: Form, places: tuple[int, ...], given: Tensors) -> Tangents:
    """The tangents ``given`` of the tensors at ``places`` of a call of ``form``."""
    # By place, since a capture may be called like an operand.
    found = dict(zip(places, given, strict=True))
    q, k, v = map(found.get, range(3))
    captures = {name: found[n] for n, name in enumerate(form.captures, 3) if n in found}
    return Tangents(q, k, v, captures)


def _call_of_rows(form: Form, tensors: Tensors, first: int) -> Call:
    """The call of the rows from ``first``, in fp32 for half types, as in kernels."""
    call = form.call((*map(_wide, tensors[:3]), *tensors[3:]))
    if call.q_index is not None:
        return call
    return call._replace(q_offset=call.q_offset + first)


def _as_output(out: torch.Tensor, call: Call, dtype: torch.dtype) -> torch.Tensor:
    """``out``, of fp32 or wider, as ``call`` has it, whose q is of ``dtype``."""
    return out if call.wide else out.to(dtype)


def _rows(form: Form, tensors: Tensors, first: int, last: int) -> Tensors:
    """``tensors`` for the queries from ``first`` to ``last``."""
    q, *rest = tensors
    if "q_index" in form.positions:
        place = len(rest) - len(form.positions) + form.positions.index("q_index")
        rest[place] = rest[place][first:last]
    return (q[:, :, first:last], *rest)


def _chunks(call: Call) -> list[tuple[int, int]]:
    """First and last row of each chunk; one of no rows where there are none."""
    batch, heads, q_len, _ = call.q.shape
    pairs = CPU_PAIRS if call.q.device.type == "cpu" else _DEVICE_PAIRS
    step = max(1, pairs // max(1, batch * heads * call.k.shape[2]))
    return [(first, min(first + step, q_len)) for first in range(0, max(1, q_len), step)]
