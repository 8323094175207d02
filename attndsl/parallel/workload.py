"""Live tiles and fetched keys of a program's rows, in chunks of rows that stay together.

Keys that rows see are ranges of tiles, never a map. A million rows are some thousand chunks with a
few ranges each, and everything about a plan is counted from these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from attndsl.inspection.key_ranges import Reach

    Ints = NDArray[np.int64]


class Spans(NamedTuple):
    """Ranges of several readers: ascending by reader, and those of a reader apart."""

    reader: Ints
    start: Ints
    stop: Ints

    def of(self, first: int, stop: int) -> Spans:
        """Spans of readers ``first`` to ``stop``."""
        a, b = np.searchsorted(self.reader, (first, stop)).tolist()
        return Spans(*(x[a:b] for x in self))

    def hull(self) -> tuple[int, int]:
        """The least range that holds all; (0, 0) of none."""
        if not len(self.start):
            return (0, 0)
        return int(self.start.min()), int(self.stop.max())


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """Live tiles and needed keys of one program, and their seconds; made by :func:`demand_from`."""

    length: int
    """Rows of the sequence, and its keys."""
    chunk: int
    """Rows of a chunk."""
    grain: int
    """Rows and keys of a tile, which divides :attr:`chunk`."""
    work: Ints
    """(chunks,) live tiles of its rows."""
    needs: Spans
    """Tiles of keys that each chunk of rows sees."""
    tile: float
    """Seconds of a live tile."""
    key: float
    """Seconds of the journey of the keys of one tile."""
    weight: float = 1.0
    """Number of layers that have the program."""
    call: float = 0.0
    """Seconds of a call of a run of rows beside its tiles."""

    @property
    def each(self) -> int:
        """Tiles of a chunk."""
        return self.chunk // self.grain

    def positions(self, start: Ints, stop: Ints) -> Ints:
        """Number of positions in each range of tiles: the last tile may be ragged."""
        return np.minimum(stop * self.grain, self.length) - start * self.grain


def demand_from(reach: Reach, chunk: int, tile: float, key: float, weight: float = 1.0) -> Demand:
    """The demand of a program whose rows see ``reach``.

    Args:
        reach: Of the sequence's rows, in square tiles that divide ``chunk``.
        chunk: Rows of a chunk.
        tile: Seconds of a live tile.
        key: Seconds of the journey of the keys of one tile.
        weight: How many layers have the program.
    """
    number, grain = -(-reach.q_len // chunk), reach.block_m
    reader = np.arange(len(reach.work)) // (chunk // grain)
    work = np.bincount(reader, reach.work, number).astype(np.int64)
    rows = np.broadcast_to(reader[:, None], reach.starts.shape)
    needs = union(rows.ravel(), reach.starts.ravel(), reach.stops.ravel())
    return Demand(reach.kv_len, chunk, grain, work, needs, tile, key, weight)


def union(reader: Ints, start: Ints, stop: Ints) -> Spans:
    """Ranges of ``reader`` that may overlap and be empty, as ranges that are apart."""
    there = start < stop
    reader, start, stop = reader[there], start[there], stop[there]
    if not len(start):
        return Spans(reader, start, stop)
    # One number for each range, since sorting numbers is much faster than sorting triples.
    bits = int(stop.max()).bit_length()
    both = np.sort((reader << 2 * bits) | (start << bits) | stop)
    low = (1 << bits) - 1
    reader, start = both >> 2 * bits, (both >> bits) & low
    # The furthest stop so far: those of earlier readers lie below all of a reader's.
    far = np.maximum.accumulate((reader << bits) | (both & low)) & low
    first = np.ones(len(both), np.bool_)
    first[1:] = (reader[1:] != reader[:-1]) | (start[1:] > far[:-1])
    return Spans(reader[first], start[first], far[np.roll(first, -1)])


def meetings(one: tuple[Ints, Ints], other: tuple[Ints, Ints]) -> tuple[Ints, Ints, Ints, Ints]:
    """Intersections of ranges: for each the number of either range, start, and stop.

    Args:
        one: Starts and stops, in any order.
        other: Starts and stops, ascending and apart.

    Returns:
        In the order of ``one``, and then of ``other``.
    """
    low = np.searchsorted(other[1], one[0], "right")
    counts = np.maximum(np.searchsorted(other[0], one[1], "left") - low, 0)
    first = np.arange(len(counts)).repeat(counts)
    second = np.arange(len(first)) + (low - np.cumsum(counts) + counts)[first]
    start = np.maximum(one[0][first], other[0][second])
    stop = np.minimum(one[1][first], other[1][second])
    return first, second, start, stop


def needs_of(demand: Demand, owner: Ints) -> Spans:
    """Tiles of keys that each owner's rows see.

    Args:
        demand: Of one program.
        owner: (chunks,) whose each is.
    """
    return union(owner[demand.needs.reader], demand.needs.start, demand.needs.stop)


def own_needs(demand: Demand, owner: Ints, reader: Ints, needs: Spans) -> Ints:
    """(number of owners,) positions of keys that an owner holds and that its reader needs.

    Args:
        demand: Of one program.
        owner: (chunks,) whose each is.
        reader: (owners,) the reader of each.
        needs: Of all readers.
    """
    tiles = -(-demand.length // demand.grain)
    wide = tiles + 1
    start = np.arange(len(owner)) * demand.each
    stop = np.minimum(start + demand.each, tiles)
    base = reader[owner] * wide
    chunk, _, start, stop = meetings(
        (base + start, base + stop),
        (needs.reader * wide + needs.start, needs.reader * wide + needs.stop),
    )
    size = demand.positions(start - base[chunk], stop - base[chunk])
    return np.bincount(owner[chunk], size, len(reader)).astype(np.int64)
