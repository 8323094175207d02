"""Who holds which rows of a sequence: chosen so that the slowest rank is fastest.

Work is counted in live tiles, which is what kernels pay for, and keys that must travel are counted
too. Both come from :meth:`attndsl.Attention.reach` alone. So all ranks find the same layout, and
ask nobody.

Non-goals: which rank sends what to which (:mod:`.routes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attndsl.errors import ArgumentError

from .costs import TILE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from attndsl.runtime.reach import Reach

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]
    Floats = NDArray[np.float64]

LAYOUTS = ("auto", "contiguous", "head_tail", "balanced")
_CHUNKS = 8
"""Chunks of each half of a rank's rows, which a balanced layout may give to others."""
_MOST_CHUNKS = 4096
"""Chunks in all, where two for each rank are fewer."""
_EVEN = 1.05
"""How much more than the mean the slowest rank may do where no swaps are looked for."""
_ROUNDS = 2
"""Swaps for each rank, at most."""
_OTHERS = 2
"""Ranks that the slowest one may swap with."""
_TRIED = 3
"""Pairs of chunks whose costs are found exactly in a round, for each of these ranks."""
_MOST_NUMBERS = 1 << 23
"""Numbers of ranges that are added up together."""
_GAIN = 1e-3
"""Least part of the slowest rank's cost that a swap must save."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Who holds which rows."""

    name: str
    """One of :data:`LAYOUTS`, but ``auto``."""
    length: int
    chunk: int
    """Rows that stay together."""
    owner: Ints
    """(chunks,) the rank that holds each."""
    ranks: int

    def runs(self, first: int, count: int = 1) -> tuple[tuple[int, int], ...]:
        """Rows of ``count`` ranks from ``first`` on, as ranges of positions, ascending."""
        mine = (self.owner >= first) & (self.owner < first + count)
        edges = np.flatnonzero(np.diff(mine.astype(np.int8), prepend=0, append=0)) * self.chunk
        ends = np.minimum(edges, self.length).tolist()
        return tuple(zip(ends[::2], ends[1::2], strict=True))

    def rows(self, rank: int) -> int:
        """How many rows ``rank`` holds."""
        return sum(stop - start for start, stop in self.runs(rank))


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """What one program makes ranks compute and fetch."""

    reach: Reach
    """In tiles of :attr:`grain` rows and keys."""
    grain: int
    tile: float
    """Seconds of one of its live tiles."""
    key: float
    """Seconds of the journey of the keys of one tile."""
    weight: float = 1.0
    """How many layers have the program."""


def chunk_size(length: int, ranks: int) -> int:
    """Rows of a chunk: tiles where the length has two for each rank, otherwise fewer rows."""
    if length % (2 * ranks * TILE) == 0:
        half = length // (2 * ranks * TILE)
        most = max(1, min(_CHUNKS, _MOST_CHUNKS // (2 * ranks)))
        parts = max(n for n in range(1, most + 1) if half % n == 0)
        return TILE * (half // parts)
    if length >= 2 * ranks * TILE:
        return TILE * max(1, length // (TILE * max(2 * ranks, _MOST_CHUNKS)))
    size = TILE
    while size > 1 and length < 2 * ranks * size:
        size //= 2
    return size


def fixed_layout(name: str, length: int, ranks: int, chunk: int) -> Layout:
    """``contiguous``, or ``head_tail``, which gives each rank a piece of both ends.

    Where there are no two chunks for each rank, ``head_tail`` is as ``contiguous``.
    """
    number = -(-length // chunk)
    place = np.arange(number)
    if name == "contiguous" or number < 2 * ranks:
        owner = place * ranks // max(1, number)
    else:
        piece = place * 2 * ranks // max(1, number)
        owner = np.minimum(piece, 2 * ranks - 1 - piece)
    return Layout(name, length, chunk, owner, ranks)


def choose_layout(name: str, length: int, ranks: int, demands: Sequence[Demand]) -> Layout:
    """The layout of ``name``; of ``auto`` and ``balanced`` the one that ``demands`` make fastest.

    Without demands ``auto`` is ``contiguous``.

    Raises:
        ArgumentError: There is no such layout.
    """
    if name not in LAYOUTS:
        raise ArgumentError(
            f"there is no layout {name!r}", hint=f"layout is one of {', '.join(LAYOUTS)}"
        )
    chunk = chunk_size(length, ranks)
    if name in ("contiguous", "head_tail"):
        return fixed_layout(name, length, ranks, chunk)
    starts = [fixed_layout(x, length, ranks, chunk) for x in ("contiguous", "head_tail")]
    if not demands or ranks == 1:
        return starts[0]
    best = min(starts, key=lambda layout: step_cost(layout, demands))
    if name == "auto" and all(_imbalance(best, x) <= _EVEN for x in demands):
        return best
    balanced = _settled(best, [_parts(x, chunk, length) for x in demands])
    if name == "auto" and step_cost(best, demands) <= step_cost(balanced, demands):
        return best
    return balanced


def _imbalance(layout: Layout, demand: Demand) -> float:
    """The slowest rank's work for that of the mean."""
    work = load_of(layout, demand)
    return float(work.max() / max(1e-9, work.mean()))


def step_cost(layout: Layout, demands: Sequence[Demand]) -> float:
    """Seconds of all layers, each of which waits for its slowest rank."""
    total = 0.0
    for demand in demands:
        work, keys = load_of(layout, demand), fetched_by(layout, demand)
        total += demand.weight * float((demand.tile * work + demand.key * keys).max(initial=0))
    return total


def load_of(layout: Layout, demand: Demand) -> Floats:
    """Live tiles of each rank."""
    owner = tile_owners(layout, demand.grain)
    found: Floats = np.bincount(owner, demand.reach.work, layout.ranks).astype(np.float64)
    return found


def fetched_by(layout: Layout, demand: Demand) -> Ints:
    """Tiles of keys that each rank fetches from others."""
    owner = tile_owners(layout, demand.grain)
    need = needs_of(demand.reach, owner, layout.ranks, len(owner))
    need[owner, np.arange(len(owner))] = False
    found: Ints = need.sum(1)
    return found


def tile_owners(layout: Layout, grain: int) -> Ints:
    """The rank that holds each tile of ``grain`` rows, which divides the chunks."""
    tiles = -(-layout.length // grain)
    found: Ints = layout.owner.repeat(layout.chunk // grain)[:tiles]
    return found


def needs_of(reach: Reach, readers: Ints, number: int, tiles: int) -> Bools:
    """(number, tiles) which tiles of keys each reader's rows see.

    ``readers`` is that of each tile of rows, and ``tiles`` how many tiles of keys there are.
    """
    return _covered(reach.starts, reach.stops, readers, (number, tiles))


def _covered(starts: Ints, stops: Ints, readers: Ints, shape: tuple[int, int]) -> Bools:
    """Which columns lie in a range of any row of each reader."""
    number, columns = shape
    rows = np.broadcast_to(readers[:, None], starts.shape)
    there = starts < stops
    reader, start, stop = rows[there].astype(np.int64), starts[there], stops[there]
    together = max(1, _MOST_NUMBERS // (columns + 1))
    parts = []
    for first in range(0, number, together):
        count = min(together, number - first)
        chosen = (reader >= first) & (reader < first + count)
        base, size = (reader[chosen] - first) * (columns + 1), count * (columns + 1)
        begun = np.bincount(base + start[chosen], minlength=size)
        begun -= np.bincount(base + stop[chosen], minlength=size)
        parts.append(np.cumsum(begun.reshape(count, columns + 1), 1)[:, :columns] > 0)
    found: Bools = np.concatenate(parts)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """A program's demand in chunks, weighted."""

    work: Floats
    """(chunks,) seconds of a chunk's rows."""
    seen: Bools
    """(chunks, chunks) which chunks of keys each chunk of rows sees."""
    key: float
    """Seconds of the journey of a chunk of keys."""


def _parts(demand: Demand, chunk: int, length: int) -> _Parts:
    number, each = -(-length // chunk), chunk // demand.grain
    reader = np.arange(len(demand.reach.work)) // each
    weighed = np.bincount(reader, demand.reach.work, number) * (demand.tile * demand.weight)
    work: Floats = weighed.astype(np.float64)
    starts, stops = demand.reach.starts // each, -(-demand.reach.stops // each)
    stops = np.where(demand.reach.starts < demand.reach.stops, stops, starts)
    seen = _covered(starts, stops, reader, (number, number))
    return _Parts(work, seen, demand.key * each * demand.weight)


def _settled(start: Layout, parts: Sequence[_Parts]) -> Layout:
    """``start`` after swaps of chunks of the slowest rank with others', as long as both gain."""
    ranks, owner = start.ranks, start.owner.copy()
    work: Floats = np.sum([part.work for part in parts], 0).astype(np.float64)
    state = _Swaps(owner, work, parts, ranks)
    for _ in range(_ROUNDS * ranks):
        slow = int(state.cost.argmax())
        others = [int(r) for r in state.cost.argsort(kind="stable")[:_OTHERS] if r != slow]
        if not any(state.swap(slow, other) for other in others):
            break
    return Layout("balanced", start.length, start.chunk, owner, ranks)


class _Swaps:
    """Owners of chunks, and what each rank costs, kept up to date while chunks are swapped."""

    def __init__(
        self, owner: Ints, work: Floats, parts: Sequence[_Parts], ranks: int
    ) -> None:  # fmt: skip
        self._owner, self._work, self._parts = owner, work, parts
        # How many chunks of each rank see a chunk.
        self._covers = []
        for part in parts:
            cover = np.zeros((ranks, len(owner)), np.int32)
            there, first = np.unique(np.sort(owner), return_index=True)
            order = owner.argsort(kind="stable")
            cover[there] = np.add.reduceat(part.seen[order].astype(np.int32), first, axis=0)
            self._covers.append(cover)
        self.cost = np.array([self._exact(rank) for rank in range(ranks)])

    def _exact(self, rank: int) -> float:
        mine = self._owner == rank
        keys = [
            part.key * np.count_nonzero((cover[rank] > 0) & ~mine)
            for part, cover in zip(self._parts, self._covers, strict=True)
        ]
        return float(self._work[mine].sum() + sum(keys))

    def swap(self, slow: int, other: int) -> bool:
        """Swap the pair of chunks that helps most, if one does."""
        out, into = (np.flatnonzero(self._owner == rank) for rank in (slow, other))
        if not len(out) or not len(into):
            return False
        (less, more), (less_there, more_there) = (
            self._changes(rank, gone, come) for rank, gone, come in
            ((slow, out, into), (other, into, out))
        )  # fmt: skip
        after = np.maximum(
            self.cost[slow] - less[:, None] + more[None, :],
            self.cost[other] - less_there[None, :] + more_there[:, None],
        )
        limit = (1 - _GAIN) * self.cost[slow]
        for place in after.ravel().argsort(kind="stable")[:_TRIED].tolist():
            if after.flat[place] > limit:
                return False
            i, j = int(out[place // len(into)]), int(into[place % len(into)])
            self._exchange(slow, other, i, j)
            costs = self._exact(slow), self._exact(other)
            if max(costs) <= limit:
                self.cost[slow], self.cost[other] = costs
                return True
            self._exchange(slow, other, j, i)
        return False

    def _changes(self, rank: int, gone: Ints, come: Ints) -> tuple[Floats, Floats]:
        """What ``rank`` saves without each chunk of ``gone``, and pays for each of ``come``."""
        less, more = self._work[gone].copy(), self._work[come].copy()
        away = self._owner != rank
        for part, cover in zip(self._parts, self._covers, strict=True):
            less += part.key * (part.seen[gone] & ((cover[rank] == 1) & away)).sum(1)
            more += part.key * (part.seen[come] & ((cover[rank] == 0) & away)).sum(1)
            # A rank's own chunks need no journey, and those that it gives away do.
            less -= part.key * (cover[rank][gone] > 0)
            more -= part.key * (cover[rank][come] > 0)
        return less, more

    def _exchange(self, slow: int, other: int, i: int, j: int) -> None:
        """Chunk ``i`` of ``slow`` goes to ``other``, and ``j`` comes."""
        self._owner[i], self._owner[j] = other, slow
        for part, cover in zip(self._parts, self._covers, strict=True):
            change = part.seen[j].astype(np.int32) - part.seen[i]
            cover[slow] += change
            cover[other] -= change
