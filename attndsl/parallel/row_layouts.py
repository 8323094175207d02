"""Layouts of a sequence's rows over ranks: chosen so that the slowest rank is fastest.

Work is counted in live tiles, which is what kernels pay for, and keys that must travel are counted
too. Both come from :meth:`attndsl.Attention.reach` alone. So all ranks find the same layout, and
ask nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from attndsl.errors import ArgumentError

from .load_balance import settled
from .plan_costs import TILE
from .workload import needs_of, own_needs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .workload import Demand, Ints

    Floats = NDArray[np.float64]

LAYOUTS = ("auto", "contiguous", "head_tail", "balanced")
_CHUNKS = 8
"""Chunks of each half of a rank's rows, which a balanced layout may give to others."""
_MOST_CHUNKS = 4096
"""Chunks in all, where two for each rank are fewer."""
_EVEN = 1.05
"""Work of the slowest rank, as a multiple of the mean, up to which no swaps are looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Assignment of a sequence's rows, in chunks, to ranks."""

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
        """Number of rows that ``rank`` holds."""
        return sum(stop - start for start, stop in self.runs(rank))


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
    owner = settled(best.owner, ranks, demands)
    balanced = Layout("balanced", length, chunk, owner, ranks)
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
    first = np.flatnonzero(np.diff(layout.owner, prepend=-1))
    runs = np.bincount(layout.owner[first], minlength=layout.ranks)
    for demand in demands:
        # The last tile costs as a whole one, of keys as of rows.
        whole = replace(demand, length=-(-demand.length // demand.grain) * demand.grain)
        work, keys = load_of(layout, demand), fetched_by(layout, whole) // demand.grain
        times = demand.tile * work + demand.key * keys + demand.call * runs
        total += demand.weight * float(times.max(initial=0))
    return total


def load_of(layout: Layout, demand: Demand) -> Floats:
    """Live tiles of each rank."""
    return np.bincount(layout.owner, demand.work, layout.ranks).astype(np.float64)


def fetched_by(layout: Layout, demand: Demand) -> Ints:
    """Positions whose keys each rank fetches from others."""
    needs = needs_of(demand, layout.owner)
    size = demand.positions(needs.start, needs.stop)
    total = np.bincount(needs.reader, size, layout.ranks).astype(np.int64)
    return total - own_needs(demand, layout.owner, np.arange(layout.ranks), needs)
