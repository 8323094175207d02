"""Ranges of keys that each tile of queries can see, and numbers of live tiles, without a map.

Where the mask has a closed form, so has this: memory is that of the rows of tiles. Otherwise some
rows of tiles are looked at together. What is found is sound: no key that a row sees is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from attndsl.backends.tiled.live_tiles import live_tiles
from attndsl.backends.tiled.tile_kinds import fits_plan, grid_of, kinds_by_bounds, segment_ranges
from attndsl.errors import ArgumentError
from attndsl.passes.tiles.tile_plan import EMPTY, FORWARD

from .tile_search import loop_of, rows_of, sides_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attndsl.backends.base import Call
    from attndsl.pipeline import Lowered

    Ints = NDArray[np.int64]

_TILES_AT_ONCE = 1 << 22
"""Tiles whose kinds are found together."""
_MOST_TILES = 1 << 28
"""Tiles that are looked at one by one."""
_MOST_PAIRS = 1 << 28
"""Pairs of undecided tiles that are looked at one by one; beyond, such tiles count as live."""


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """Keys that rows see; made by :meth:`attndsl.Attention.reach`."""

    starts: Ints
    """(query tiles, ranges), the first tile of keys of each range, for all batch entries and heads
    together. Ranges may overlap or be empty."""
    stops: Ints
    """(query tiles, ranges), the tile after the last one of each range."""
    work: Ints
    """(query tiles,) live tiles, added up over those batch entries and heads that differ."""
    maps: int
    """Number of different maps over batch entries and heads: :attr:`work` is that of so many."""
    q_len: int
    kv_len: int
    block_m: int
    """Query rows of a tile."""
    block_n: int
    """Key rows of a tile."""

    def ranges(self, row: int) -> tuple[tuple[int, int], ...]:
        """Ranges of key rows that the rows of query tile ``row`` see: ascending and apart."""
        found: list[tuple[int, int]] = []
        pairs = zip(self.starts[row].tolist(), self.stops[row].tolist(), strict=True)
        for start, stop in sorted(pair for pair in pairs if pair[0] < pair[1]):
            if found and start <= found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], stop)
            else:
                found.append((start, stop))
        return tuple(
            (start * self.block_n, min(stop * self.block_n, self.kv_len)) for start, stop in found
        )

    def __str__(self) -> str:
        total = len(self.work) * -(-self.kv_len // self.block_n) * self.maps
        return (
            f"{int(self.work.sum())} of {total} tiles of {self.block_m} queries x {self.block_n} "
            f"keys are live"
        )

    __repr__ = __str__


def find_reach(lowered: Lowered, call: Call, block_m: int, block_n: int) -> Reach:
    """The keys that each row of tiles of ``call`` sees.

    Raises:
        ArgumentError: A tile size below 1, or too many tiles where each must be looked at.
    """
    sparsity = lowered.sparsity
    rows, columns = sides_of(call, block_m, block_n)
    outer = sparsity.maps(call.q.shape[0], call.q.shape[1])
    loop = loop_of(lowered, call, FORWARD, block_m, block_n)
    with torch.no_grad():
        # Of positions a closed form needs the first, and each takes 8 bytes.
        first_row = call._replace(q=call.q[:, :, :1], k=call.k[:, :, :1])
        first = grid_of(first_row, block_m, block_n)
        if 0 in (rows, columns, *outer):
            nothing = np.zeros((rows, 0), np.int64)
            starts, stops, work = nothing, nothing, np.zeros(rows, np.int64)
        elif sparsity.mask is None:
            starts, stops = np.zeros((rows, 1), np.int64), np.full((rows, 1), columns, np.int64)
            work = np.full(rows, columns, np.int64)
        elif loop.listed is None and fits_plan(loop, first):
            found = [
                (step, start.expand(*outer, rows, 1), stop.expand(*outer, rows, 1), guard)
                for _, step, start, stop, guard in segment_ranges(loop, FORWARD, first)
            ]
            starts, stops, work = _of_segments(found, rows, columns)
        else:
            starts, stops, work = _of_tiles(lowered, call, block_m, block_n)
    count = outer[0] * outer[1]
    return Reach(starts, stops, work, count, call.q.shape[2], call.k.shape[2], block_m, block_n)


def _of_segments(
    segments: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor | None]],
    rows: int,
    columns: int,
) -> tuple[Ints, Ints, Ints]:
    """Starts, stops and work from closed forms; a range is the hull of a segment with steps."""
    starts, stops = [], []
    work = torch.zeros(rows, dtype=torch.int64, device="cpu")
    for step, start, stop, guard in segments:
        start, stop = start.cpu().clamp(min=0), stop.cpu().clamp(max=columns)
        if guard is not None:
            stop = torch.where(guard.cpu().expand(stop.shape), stop, start)
        work += ((stop - start + step - 1) // step).clamp(min=0).sum((0, 1, 3))
        starts.append(start.permute(2, 0, 1, 3).reshape(rows, -1))
        stops.append(stop.permute(2, 0, 1, 3).reshape(rows, -1))
    if not starts:
        nothing = np.zeros((rows, 0), np.int64)
        return nothing, nothing, work.numpy()
    return torch.cat(starts, 1).numpy(), torch.cat(stops, 1).numpy(), work.numpy()


def _of_tiles(lowered: Lowered, call: Call, block_m: int, block_n: int) -> tuple[Ints, Ints, Ints]:
    """The same where each tile is looked at, some rows of them at a time."""
    sparsity, grid = lowered.sparsity, grid_of(call, block_m, block_n)
    (rows, columns), outer = grid.shape, sparsity.maps(call.q.shape[0], call.q.shape[1])
    total = rows * columns * outer[0] * outer[1]
    if total > _MOST_TILES:
        raise ArgumentError(
            f"the mask has no closed form, and there are {total} tiles to look at",
            hint="use larger block_m and block_n",
        )
    if total * block_m * block_n > _MOST_PAIRS and sparsity.bounds is not None:
        sparsity = replace(sparsity, evaluate=False)
    runs, work = [], np.zeros(rows, np.int64)
    # A place more in each row, so that no run goes on in the next one.
    wide = columns + 1
    bounds = sparsity.by_cells or sparsity.bounds
    parts = None
    if not sparsity.evaluate and bounds is not None and not bounds.cells:
        parts = live_tiles(bounds, grid, outer, _TILES_AT_ONCE)
    if parts is not None:
        for part in parts:
            row, column, count = (x.cpu().numpy() for x in part)
            work += np.bincount(row, count, rows).astype(np.int64)
            places = np.sort(row * wide + column)
            first = np.diff(places, prepend=-2) != 1
            runs.append((places[first], places[np.roll(first, -1)] + 1))
        return *_ranges(runs, rows, wide), work
    together = max(1, _TILES_AT_ONCE * rows // max(1, total))
    for start in range(0, rows, together):
        alive = kinds_by_bounds(sparsity, rows_of(grid, start, together)) != EMPTY
        work[start : start + together] = alive.sum((0, 1, 3)).cpu().numpy()
        live = alive.flatten(0, 1).any(0).cpu().numpy()
        flat = np.pad(live, ((0, 0), (0, 1))).ravel()
        edges = start * wide + np.flatnonzero(np.diff(flat, prepend=False))
        runs.append((edges[::2], edges[1::2]))
    return *_ranges(runs, rows, wide), work


def _ranges(runs: list[tuple[Ints, Ints]], rows: int, wide: int) -> tuple[Ints, Ints]:
    """Starts and stops of ``runs`` by row, filled up with empty ranges.

    Args:
        runs: First places, and those after the last, of a map row by row.
        rows: Of the map.
        wide: Places of a row, the last of which is in no run.
    """
    start, stop = (np.sort(np.concatenate(x)) for x in zip(*runs, strict=True))
    # A run that two parts have pieces of.
    whole = np.ones(len(start) + 1, np.bool_)
    whole[1:-1] = start[1:] != stop[:-1]
    start, stop = start[whole[:-1]], stop[whole[1:]]
    row = start // wide
    counts = np.bincount(row, minlength=rows)
    number = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.zeros((2, rows, int(counts.max(initial=0))), np.int64)
    found[:, row, number] = start - row * wide, stop - row * wide
    return found[0], found[1]
