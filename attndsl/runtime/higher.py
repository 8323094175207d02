"""Tangents, second derivatives and ``torch.func`` transforms of calls, on every backend.

Calls that need these are made of torch operations on some rows of queries at a time, all made again
for each derivative (:mod:`.recompute`): memory is proportional to the lengths. Some backends have a
kernel for tangents (:mod:`.forward_mode`), whose own derivatives are made here.

Non-goals: skipping dead tiles; speed beside the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.autograd import forward_ad

from attndsl.backends.base import Call, Tangents
from attndsl.backends.dense.pairs import attend_pairs, dense_pairs
from attndsl.backends.dense.tangent import tangent
from attndsl.backends.memory_order import arranged, arranged_like, memory_order

from .recompute import Function, Pulled, Pushed, recomputed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Scalar
    from attndsl.backends.dense.pulled import Tensors
    from attndsl.pipeline import Lowered


CPU_PAIRS = 1 << 19
"""Most pairs of a chunk, of all heads and batch entries (as far as one row of queries allows); a
second derivative holds some 80 tensors of that size."""
_DEVICE_PAIRS = 1 << 22
"""The same on other devices, which take longer to start an operation than to do it."""
_POSITIONS = ("q_offset", "kv_offset", "q_index", "kv_index", "seed")
_is_within_transform = torch._C._are_functorch_transforms_active


def is_transformed() -> bool:
    """Whether tangents or a ``torch.func`` transform may be about, which kernels cannot see."""
    return _is_within_transform() or forward_ad._current_level >= 0


def attend_in_chunks(lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)``, differentiable in every mode and any number of times."""
    packed, tensors = pack(call)
    parts = [
        recomputed(_Chunk(lowered, packed, first), *_rows(packed, tensors, first, last))
        for first, last in _chunks(call)
    ]
    out, lse = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return arranged(out, memory_order(call.q, out.shape[3])), lse


def tangent_in_chunks(
    lowered: Lowered, packed: Packed, inputs: Tensors, moved: tuple[int, ...], tangents: Tensors
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tangents of ``out`` and ``lse``, differentiable like :func:`attend_in_chunks`.

    Args:
        lowered: The program.
        packed: The call.
        inputs: What :func:`pack` took out of it.
        moved: Places of those that move.
        tangents: One for each.
    """
    parts = []
    call = packed.call(*inputs)
    for first, last in _chunks(call):
        push = _Chunk(lowered, packed, first).pushed(moved)
        own = tuple(
            x[:, :, first:last] if place == 0 else x
            for place, x in zip(moved, tangents, strict=True)
        )
        parts.append(recomputed(push, *_rows(packed, inputs, first, last), *own))
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
    packed, tensors = pack(call)
    rows: list[torch.Tensor] = []
    sums: list[torch.Tensor] | None = None
    for first, last in _chunks(call):
        given = _rows(packed, tensors, first, last)
        pull = Pulled(_Chunk(lowered, packed, first), wanted, len(given))
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
class Packed:
    """A call without tensors, and where they go."""

    plain: Mapping[str, Any]
    """Fields of the call that hold no tensors."""
    numbers: Mapping[str, Scalar | None]
    """Params; None for those that are tensors."""
    tensors: tuple[str, ...]
    """Names of the captured tensors."""
    positions: tuple[str, ...]
    """Fields of the call that are tensors, beside q, k and v."""

    @property
    def captures(self) -> tuple[str, ...]:
        """Names of the tensors and of the params that are tensors, as they stand behind v."""
        return (*self.tensors, *(n for n, value in self.numbers.items() if value is None))

    def rows(self, inputs: Tensors, first: int) -> Call:
        """As :meth:`call`, of the rows from ``first``, in fp32 for half types, as in kernels."""
        call = self.call(*map(_wide, inputs[:3]), *inputs[3:])
        if "q_index" in self.positions:
            return call
        return replace(call, q_offset=call.q_offset + first)

    def call(self, *inputs: torch.Tensor) -> Call:
        """The call again; ``inputs`` are q, k, v, captures, positions."""
        q, k, v, *rest = inputs
        found = dict(zip(self.captures, rest, strict=False))
        fields = dict(self.plain)
        fields |= zip(self.positions, rest[len(found) :], strict=True)
        return Call(
            q,
            k,
            v,
            tensors={name: found[name] for name in self.tensors},
            params={n: found[n] if x is None else x for n, x in self.numbers.items()},
            **fields,
        )

    def as_output(self, out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """``out``, of fp32 or wider, in the dtype that the call's output has."""
        return out if self.plain["wide"] else out.to(q.dtype)

    def tangents(self, places: tuple[int, ...], given: Tensors) -> Tangents:
        """Those ``given`` of the inputs at ``places``."""
        # By place, since a capture may be called like an operand.
        found = dict(zip(places, given, strict=True))
        q, k, v = map(found.get, range(3))
        captures = {name: found[n] for n, name in enumerate(self.captures, 3) if n in found}
        return Tangents(q, k, v, captures)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """``out`` and ``lse`` of the rows from ``first``."""

    pushes_results: ClassVar[bool] = False
    lowered: Lowered
    packed: Packed
    first: int

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        program, call = self.lowered.program, self.packed.rows(inputs, self.first)
        out, lse = attend_pairs(program, call, dense_pairs(program, call, self.first))
        return self.packed.as_output(out, inputs[0]), lse

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
        call = chunk.packed.rows(args[:count], chunk.first)
        moved = chunk.packed.tangents(self.moved, args[count:])
        q, k, v = (x if x is None else _wide(x) for x in (moved.q, moved.k, moved.v))
        out, lse = tangent(chunk.lowered, call, Tangents(q, k, v, moved.captures), chunk.first)
        return chunk.packed.as_output(out, args[0]), lse

    def pushed(self, moved: tuple[int, ...]) -> Function:
        return Pushed(self, moved)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.to(torch.float32)


def pack(call: Call) -> tuple[Packed, Tensors]:
    """``call`` in two parts: what is no tensor, and the tensors."""
    numbers = {n: None if isinstance(x, torch.Tensor) else x for n, x in call.params.items()}
    given = [x for x in call.params.values() if isinstance(x, torch.Tensor)]
    plain = {"scale": call.scale, "sizes": call.sizes, "wide": call.wide, "draws": call.draws}
    placed = {name: getattr(call, name) for name in _POSITIONS}
    moved = {name: x for name, x in placed.items() if isinstance(x, torch.Tensor)}
    plain |= {name: x for name, x in placed.items() if name not in moved}
    packed = Packed(plain, numbers, tuple(call.tensors), tuple(moved))
    return packed, (call.q, call.k, call.v, *call.tensors.values(), *given, *moved.values())


def _rows(packed: Packed, tensors: Tensors, first: int, last: int) -> Tensors:
    """``tensors`` for the queries from ``first`` to ``last``."""
    q, *rest = tensors
    if "q_index" in packed.positions:
        place = len(rest) - len(packed.positions) + packed.positions.index("q_index")
        rest[place] = rest[place][first:last]
    return (q[:, :, first:last], *rest)


def _chunks(call: Call) -> list[tuple[int, int]]:
    """First and last row of each chunk; one of no rows where there are none."""
    batch, heads, q_len, _ = call.q.shape
    pairs = CPU_PAIRS if call.q.device.type == "cpu" else _DEVICE_PAIRS
    step = max(1, pairs // max(1, batch * heads * call.k.shape[2]))
    return [(first, min(first + step, q_len)) for first in range(0, max(1, q_len), step)]
