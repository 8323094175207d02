"""Captured tensors that the tensor memory accelerator reads for pairs, a tile at a time.

Of ``bias[h, q, kv]`` each pair looks up an element of its own. Read one by one in the order in
which threads hold a tile's scores, they arrive in short pieces, and whoever computes waits for
each.

Where the hardware cannot read a tensor as it lies, a call may copy it first
(:mod:`.tma_copies`).

Non-goals: lookups by anything but a row and a column (``t[kv, q]``, ``t[q - kv]``), integers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attndsl.ir import DType
from attndsl.passes.index_bounds import reads_inside

from ..emit.facts import TRITON_TYPES, PairTile
from ..kernels.config import shared_memory_of
from ..memory_order import strides
from .features.bias import indices_of, lookups_of_pairs
from .shared_memory import shared_bytes
from .tile_shapes import ADDRESS_BYTES, config_width
from .tile_sizes import CANDIDATES
from .tma_copies import is_worth_a_copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.pipeline import Lowered

    from ..base import Call
    from ..emit.facts import KernelFacts
    from ..kernels.config import Config
    from ..kernels.kernel import Task

_MOST = 2
"""Tensors of one kernel."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def with_pair_tiles(facts: KernelFacts, lowered: Lowered, call: Call, task: Task) -> KernelFacts:
    """``facts`` for the Hopper kernel of a task, of calls like ``call``."""
    chosen: tuple[PairTile, ...] = ()
    for tile in pair_tiles(lowered, call, task):
        more = replace(facts, pair_tiles=(*chosen, tile))
        if len(chosen) < _MOST and fitting(task, more, CANDIDATES[task][config_width(task, more)]):
            chosen = more.pair_tiles
    return replace(facts, pair_tiles=chosen)


def fitting(task: Task, facts: KernelFacts, configs: Sequence[Config]) -> tuple[Config, ...]:
    """The ``configs`` whose tiles find room in shared memory."""
    room = shared_memory_of("cuda:90")
    return tuple(c for c in configs if shared_bytes(task, facts, c) <= room)


def pair_tiles(lowered: Lowered, call: Call, task: Task) -> tuple[PairTile, ...]:
    """The lookups of a program that may be read by tiles, in the order of their first use.

    The values must be those that the lookups have, for every pair that takes part: positions are
    rows from a number on that the host knows, and all of them lie within the tensor, so that no
    index is clamped. Batch entries and heads do too, or are all clamped to the only one. Beyond the
    rows of the call, tiles are zeros, as the lookups of pairs that do not exist are.

    The hardware asks for neighbours along ``kv`` side by side, and for addresses and other strides
    of multiples of 16 bytes. Tensors that lie otherwise are among them where a copy pays. The
    hardware stops with an illegal instruction where a tile begins between two multiples of 16 bytes
    (see M25 in docs/dev/measured.md). So the position of the first key decides as well.
    """
    if call.indexed or not (isinstance(call.q_offset, int) and isinstance(call.kv_offset, int)):
        return ()
    found = []
    for item in lookups_of_pairs(lowered):
        name, indices = str(item.value), indices_of(item)
        tensor = call.tensors[name]
        if (
            _reads_inside(tensor, indices, call)
            and _has_elements(tensor, item.dtype)
            and call.kv_offset * tensor.element_size() % ADDRESS_BYTES == 0
        ):
            steps = strides(tensor)
            leading = tuple(v for v, step in zip(indices[:-2], steps[:-2], strict=True) if step)
            kind = "i8" if item.dtype is DType.BOOL else TRITON_TYPES[tensor.dtype]
            tile = PairTile(name, indices, leading, kind)
            own = window(tile, call)
            if is_readable(own) or is_worth_a_copy(own, name, lowered, call, task):
                found.append(tile)
    return tuple(found)


def _reads_inside(tensor: torch.Tensor, indices: tuple[str, ...], call: Call) -> bool:
    """Return True if no index is clamped, except to 0 along a dim of one element."""
    assert isinstance(call.q_offset, int)
    assert isinstance(call.kv_offset, int)
    if tensor.numel() == 0:
        return False
    numbers = {"b": call.q.shape[0], "h": call.q.shape[1], "hkv": call.k.shape[1]}
    *leading, rows, columns = tensor.shape
    # Along a dim of one element every index is clamped to that.
    heads = [
        (0, 1 if size == 1 else numbers[index])
        for index, size in zip(indices[:-2], leading, strict=True)
    ]
    q_end, kv_end = ends_of(call)
    return reads_inside(
        [*heads, (call.q_offset, q_end), (call.kv_offset, kv_end)], (*leading, rows, columns)
    )


def ends_of(call: Call) -> tuple[int, int]:
    """The logical positions behind the last query and behind the last key."""
    assert isinstance(call.q_offset, int)
    assert isinstance(call.kv_offset, int)
    return call.q_offset + call.q.shape[2], call.kv_offset + call.k.shape[2]


def _has_elements(tensor: torch.Tensor, dtype: DType) -> bool:
    """Return True if the dtype is read by tiles, and rows and columns are not broadcast."""
    if dtype is DType.BOOL:
        if tensor.element_size() != 1:
            return False
    elif dtype is not DType.FLOAT or tensor.dtype not in _FLOATS:
        return False
    # Where they are, lookups are few, and in the caches.
    return all(tensor.shape[dim] == 1 or tensor.stride(dim) != 0 for dim in (-2, -1))


def window(tile: PairTile, call: Call) -> torch.Tensor:
    """View that ``call`` reads of ``tile``'s tensor: (leading dims, queries, keys), as it lies."""
    tensor = call.tensors[tile.name]
    *leading, row, column = strides(tensor)
    kept = [dim for dim, index in enumerate(tile.indices[:-2]) if index in tile.leading]
    shape = (*(tensor.shape[dim] for dim in kept), *ends_of(call))
    if tile.dtype == "i8":
        tensor = tensor.view(torch.int8)
    # The stride of a dim of size 1 is never used, but has to be a possible one.
    return tensor.as_strided(
        shape, (*(leading[dim] for dim in kept), row or ADDRESS_BYTES, column or 1)
    )


def is_readable(own: torch.Tensor) -> bool:
    """Return True if the tensor memory accelerator can read a :func:`window`."""
    *others, column = own.stride()
    size = own.element_size()
    return (
        own.data_ptr() % ADDRESS_BYTES == 0
        and column == 1
        and all(
            step > 0 and step * size % ADDRESS_BYTES == 0 and step * size < 1 << 40
            for step in others
        )
    )
