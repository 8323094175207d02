"""Share of live tiles in a call's work, for ``FlopCounterMode``.

FlexAttention's formula takes off the share of tiles that its block mask leaves out, and has tiles
of 128 x 128 (``torch.utils.flop_counter``). So does this one, by the program's own tiles. It looks
at no tensor's values, so that nothing waits for a GPU and a count does not depend on data: what
captured tensors, scores and positions given as tensors decide counts as computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import _disable_current_modes

from attndsl.call.bind import call_of
from attndsl.call.op_encoding import EncodedCall
from attndsl.call.options import CallOptions
from attndsl.call.sub_calls import localised
from attndsl.call.torch_ops_impl import location_of, params_of
from attndsl.errors import UnsupportedError
from attndsl.foundation.caches import memoised
from attndsl.foundation.scalars import number_key
from attndsl.passes.tiles.mask_bounds import relaxed
from attndsl.passes.tiles.sparsity import analyse
from attndsl.runtime.program_store import lowered_program

from .tile_search import count_tiles

if TYPE_CHECKING:
    from attndsl.ir import Program
    from attndsl.passes.tiles.sparsity import Sparsity

_TILE = 128
"""Rows of a tile, and keys."""
_ALL = 1, 1


@dataclass(frozen=True, slots=True)
class _WorkKey:
    """Arguments of a call on which its share of live tiles depends."""

    spec: str
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of q, k, v and the captured tensors."""
    is_given: tuple[bool, ...]
    numbers: tuple[int | float, ...] = field(compare=False)
    """The params that are numbers: ints and bools, and behind them floats."""
    keys: tuple[object, ...]
    """The key of each of these."""
    ints: int
    """Number of ints and bools among these."""
    offsets: tuple[int, int]
    whole: tuple[int, ...]
    has_lengths: bool


def live_share(given: EncodedCall) -> tuple[int, int]:
    """Tiles that a call computes, and all tiles, each of all maps that differ.

    Both are 1 where everything may be computed, as far as is known without looking at tensors.
    """
    tensors = [given.q, given.k, given.v, *given.tensors]
    offsets, whole = (given.q_offset, given.kv_offset), tuple(given.whole)
    numbers = (*given.ints, *given.floats)
    # Positions in tensors, and numbers that are others in each run of a graph.
    if given.q_origin is not None or given.kv_origin is not None or given.varying is not None:
        return _ALL
    asked = _WorkKey(
        given.spec,
        tuple(tuple(x.shape) for x in tensors),
        tuple(given.is_given),
        numbers,
        tuple(map(number_key, numbers)),
        len(given.ints),
        offsets,
        whole,
        given.kv_lengths is not None,
    )
    sizes = [*offsets, *whole, *asked.numbers, *(size for shape in asked.shapes for size in shape)]
    if not all(type(size) in (int, float, bool) for size in sizes):
        return _ALL  # Sizes of a graph that is being made.
    with _disable_current_modes():
        return _share(asked)


@memoised("shares of live pairs", 1024)
def _share(asked: _WorkKey) -> tuple[int, int]:
    program = lowered_program(asked.spec).program
    if program.mask is None:
        return _ALL
    given = _stand_in(asked)
    captures = dict(zip((d.name for d in program.tensors), given.tensors, strict=True))
    params = params_of(program, given, iter(given.floats))
    call = call_of(
        program, (given.q, given.k, given.v), (captures, params), location_of(given), CallOptions()
    )
    lowered, call = localised(lowered_program(asked.spec), call)
    # Those of params that are tensors, and of what the program of a part looks up.
    unknown = frozenset(name for name, x in call.params.items() if isinstance(x, torch.Tensor))
    sparsity = _known_sparsity(lowered.program, unknown)
    if sparsity.mask is None:
        return _ALL
    call = call._replace(
        tensors={}, params={name: x for name, x in call.params.items() if name not in unknown}
    )
    try:
        tiles = count_tiles(replace(lowered, sparsity=sparsity), call, _TILE, _TILE)
    except UnsupportedError:  # Too many to look at each.
        return _ALL
    return tiles.full + tiles.partial, max(1, tiles.total)


@memoised("sparsities of relaxed masks", 256)
def _known_sparsity(program: Program, unknown: frozenset[str]) -> Sparsity:
    """The sparsity of a mask whose ``unknown`` captures may have any value."""
    mask = None if program.mask is None else relaxed(program.mask, unknown)
    known = analyse(replace(program, mask=mask))
    # Bounds alone: to evaluate tiles would take seconds.
    return replace(known, evaluate=False)


def _stand_in(asked: _WorkKey) -> EncodedCall:
    """Operands of these shapes that take no memory."""
    q, k, v, *tensors = (torch.zeros(()).expand(shape) for shape in asked.shapes)
    return EncodedCall(
        asked.spec, "auto", False, q, k, v, tensors,
        given=[torch.zeros(()) for is_tensor in asked.is_given if is_tensor],
        is_given=asked.is_given,
        ints=[int(x) for x in asked.numbers[: asked.ints]],
        floats=asked.numbers[asked.ints :],
        q_offset=asked.offsets[0],
        kv_offset=asked.offsets[1],
        whole=asked.whole,
        kv_lengths=torch.zeros(q.shape[0], dtype=torch.int32) if asked.has_lengths else None,
    )  # fmt: skip
