"""The tiles of one call where they have no closed form: found on the device, without waiting.

Sizes of all buffers follow from the lengths alone, so that a CUDA graph can hold the calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from attndsl.foundation.scalars import number_key

from ..emit.loops import row_width
from ..emit.tile_list_text import has_undecided, value_counts
from ..tiled.tile_kinds import resample
from .arguments import capture_arguments, origin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.passes.tiles.sparsity import Sparsity
    from attndsl.passes.tiles.tile_plan import Direction
    from attndsl.pipeline import Lowered

    from ..base import Call
    from ..emit.facts import KernelFacts
    from .compile import Executable
    from .launch_spec import LaunchSpec
    from .tile_list_cache import KeptLists

STATISTICS_ROWS = 64
LIST_CHUNK = 256
"""Tiles that one program of theirs looks at together."""
_REFINERS = 1 << 14
"""Most programs that look for undecided tiles: more take longer to start than to look."""


@dataclass(frozen=True, slots=True)
class ListKernels:
    """The kernels that find the tiles of a mask, for one tile size."""

    executables: Mapping[str, Executable]
    parts: int
    """Number of parts of a query tile's rows whose tiles are listed apart."""
    loop: Direction
    """Loop of the kernel that reads the lists."""
    names: tuple[str, ...]
    """Names of the tensors and params that the mask reads."""
    kept: KeptLists
    """Cache of the lists that earlier calls made."""

    def place(self) -> tuple[object, ...]:
        """Key that tells these lists from those of other kernels."""
        # Of the four kernels this one has all sizes of tiles among its constants.
        classify = self.executables["classify"]
        return classify.kernel, classify.constants, self.parts, self.loop.along


def find_kinds(
    kernels: ListKernels, sparsity: Sparsity, facts: KernelFacts, call: Call, stream: int
) -> torch.Tensor:
    """Kinds of all tiles, int8 (batch or 1, heads or 1, q tiles, kv tiles), on the device."""
    config = kernels.executables["classify"].config
    q_len, kv_len = call.q.shape[2], call.k.shape[2]
    q_tiles, kv_tiles = -(-q_len // config.block_m), -(-kv_len // config.block_n)
    batch, heads = sparsity.maps(call.q.shape[0], call.q.shape[1])
    maps = batch * heads
    device = call.q.device
    kinds = torch.empty((batch, heads, q_tiles, kv_tiles), dtype=torch.int8, device=device)
    if kinds.numel() == 0:
        return kinds
    assert sparsity.by_cells is not None
    arrays = [
        torch.empty(
            (maps, max(1, count), 2, q_tiles if name.startswith("row") else kv_tiles),
            dtype=torch.int64 if name.endswith("ints") else torch.float32,
            device=device,
        )
        for name, count in value_counts(sparsity.by_cells).items()
    ]
    sizes = [call.q.shape[0], call.q.shape[1], call.k.shape[1], q_len, kv_len]
    origins = [origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index)]
    captures = capture_arguments(facts, call)
    kernels.executables["summarise"].launch(
        maps * (q_tiles + kv_tiles), stream, [*arrays, *sizes, *origins, batch, heads, *captures]
    )
    kernels.executables["classify"].launch(
        maps * q_tiles * -(-kv_tiles // LIST_CHUNK),
        stream,
        [kinds, *arrays, *sizes, *origins, batch, heads, *captures],
    )
    if has_undecided(sparsity):
        together = -(-kinds.numel() // _REFINERS)
        kernels.executables["refine"].launch(
            -(-kinds.numel() // together),
            stream,
            [kinds, *sizes, *origins, batch, heads, together, *captures],
        )
    return kinds


def lists_of(
    layout: LaunchSpec, lowered: Lowered, call: Call, kernel: str, stream: int
) -> list[Any]:
    """The arguments ``LIST_PARAMETERS`` of a kernel; none where its tiles are not listed."""
    kernels = layout.lists.get(kernel)
    if kernels is None:
        return []
    make = partial(list_arguments, kernels, lowered.sparsity, layout.facts, call, stream)
    if call.within_graph:
        return kernels.kept.anew(make)
    if call.tiles is None:
        values = [_value(call, name) for name in kernels.names]
        values += [origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index)]
    else:
        values = [call.tiles.kinds, call.tiles.block_m, call.tiles.block_n]
    tensors = [x for x in values if isinstance(x, torch.Tensor)]
    numbers = tuple(None if isinstance(x, torch.Tensor) else number_key(x) for x in values)
    place = (
        kernels.place(), stream, call.tiles is None, numbers,
        call.q.shape[:3], call.k.shape[1:3], tuple(call.sizes.values()),
    )  # fmt: skip
    return kernels.kept.of(place, tensors, call.q.device, make)


def _value(call: Call, name: str) -> Any:
    return call.tensors[name] if name in call.tensors else call.params[name]


def list_arguments(
    kernels: ListKernels, sparsity: Sparsity, facts: KernelFacts, call: Call, stream: int
) -> list[Any]:
    """The arguments ``LIST_PARAMETERS`` of an attention kernel (see ``loops.py``)."""
    config = kernels.executables["classify"].config
    if call.tiles is None:
        kinds = find_kinds(kernels, sparsity, facts, call, stream)
    else:
        kinds = resample(
            call.tiles.kinds, (call.tiles.block_m, call.tiles.block_n),
            (config.block_m, config.block_n), (call.q.shape[2], call.k.shape[2]),
        )  # fmt: skip
    batch, heads, q_tiles, kv_tiles = kinds.shape
    along_is_kv = kernels.loop.along == "kv"
    own, along = (q_tiles, kv_tiles) if along_is_kv else (kv_tiles, q_tiles)
    own_step, along_step = (kv_tiles, 1) if along_is_kv else (1, kv_tiles)
    length, block = (
        (call.k.shape[2], config.block_n) if along_is_kv else (call.q.shape[2], config.block_m)
    )
    own_parts, own = own, -(-own // kernels.parts)
    ragged_full = not along_is_kv and sparsity.plain
    rows = torch.empty(
        (batch, heads, own, row_width(kernels.parts)), dtype=torch.int32, device=kinds.device
    )
    tiles = torch.empty((batch, heads, own, along), dtype=torch.int32, device=kinds.device)
    if own:
        kernels.executables["list_tiles"].launch(
            batch * heads * own, stream,
            [kinds, rows, tiles, own, own_parts, along, own_step, along_step, q_tiles * kv_tiles,
             along if ragged_full else length // block],
        )  # fmt: skip
    return [rows, tiles, heads * own if batch > 1 else 0, own if heads > 1 else 0]
