"""A balanced layout: chunks of the slowest rank swapped with those of others, while both gain.

What a swap changes is found from the ranges of keys that chunks see and from sums along the chunks:
there is no table of chunks by chunks, nor of ranks by chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .workload import needs_of, own_needs, union

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from .workload import Demand, Ints

    Floats = NDArray[np.float64]

_ROUNDS = 2
"""Swaps for each rank, at most."""
_OTHERS = 2
"""Ranks that the slowest one may swap with."""
_TRIED = 3
"""Pairs of chunks whose costs are found exactly in a round, for each of these ranks."""
_BLOCKS = 16
"""Blocks of chunks of each rank that are swapped, about."""
_GAIN = 1e-3
"""Least part of the slowest rank's cost that a swap must save."""


def settled(owner: Ints, ranks: int, demands: Sequence[Demand]) -> Ints:
    """The owners of chunks after the swaps.

    Where chunks are small, because the length leaves no others that are even, blocks of several are
    swapped: there are no more swaps for more chunks.

    Args:
        owner: (chunks,) before them.
        ranks: How many there are.
        demands: Of all programs.
    """
    edges = _blocks(owner, max(1, round(len(owner) / (_BLOCKS * ranks))))
    state = _Swaps(owner, ranks, edges, [_in_blocks(x, edges) for x in demands])
    for _ in range(_ROUNDS * ranks):
        slow = int(state.cost.argmax())
        others = [int(r) for r in state.cost.argsort(kind="stable")[:_OTHERS] if r != slow]
        if not any(state.swap(slow, other) for other in others):
            break
    return state.owner.repeat(np.diff(edges))


def _blocks(owner: Ints, size: int) -> Ints:
    """Offsets of blocks of up to ``size`` chunks of one owner, and the end of the last one."""
    number = np.arange(len(owner))
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    lengths = np.diff(np.append(first, len(owner)))
    within = number - first.repeat(lengths)
    return np.append(number[within % size == 0], len(owner))


def _in_blocks(demand: Demand, edges: Ints) -> Demand:
    """``demand`` with blocks of chunks for chunks and tiles, and costs of all its layers.

    A block's keys cost as much as those of a whole one.
    """
    each, sizes = demand.each, np.diff(edges)
    needs = union(
        np.searchsorted(edges, demand.needs.reader, "right") - 1,
        np.searchsorted(edges, demand.needs.start // each, "right") - 1,
        np.searchsorted(edges, -(-demand.needs.stop // each)),
    )
    return replace(
        demand, length=len(sizes), chunk=1, grain=1, needs=needs,
        work=np.add.reduceat(demand.work, edges[:-1]), tile=demand.tile * demand.weight,
        key=demand.key * each * int(sizes.max()) * demand.weight, weight=1.0,
    )  # fmt: skip


class _ChunkLoads:
    """Chunks of keys that the rows of one program see, and counts of these by rank."""

    def __init__(self, demand: Demand) -> None:
        self.key = demand.key
        self._needs, self._number = demand.needs, len(demand.work)
        self._ends = np.searchsorted(demand.needs.reader, np.arange(self._number + 1))
        self._covers: dict[int, Ints] = {}

    def cover(self, rank: int, owner: Ints) -> Ints:
        """(chunks,) how many chunks of ``rank`` see each chunk; kept, and up to date."""
        if rank not in self._covers:
            mine = (owner == rank)[self._needs.reader]
            edges = np.bincount(self._needs.start[mine], minlength=self._number + 1)
            edges -= np.bincount(self._needs.stop[mine], minlength=self._number + 1)
            self._covers[rank] = np.cumsum(edges)[:-1]
        return self._covers[rank]

    def seen(self, which: Ints, by: Ints) -> Ints:
        """(chunks of ``by``,) how many of ``which``, (chunks,) bools, each of these sees."""
        sums = np.zeros(self._number + 1, np.int64)
        np.cumsum(which, out=sums[1:])
        first, number = self._ends[by], self._ends[by + 1] - self._ends[by]
        spans = np.arange(number.sum()) + (first - np.cumsum(number) + number).repeat(number)
        counts = sums[self._needs.stop[spans]] - sums[self._needs.start[spans]]
        reader = np.arange(len(by)).repeat(number)
        return np.bincount(reader, counts, len(by)).astype(np.int64)

    def move(self, chunk: int, source: int, target: int, owner: Ints) -> None:
        """``chunk`` of rank ``source`` goes to ``target``; ``owner`` is before that."""
        both = self.cover(source, owner), self.cover(target, owner)
        mine = slice(self._ends[chunk], self._ends[chunk + 1])
        ranges = self._needs.start[mine].tolist(), self._needs.stop[mine].tolist()
        for some in map(slice, *ranges):
            both[0][some] -= 1
            both[1][some] += 1


class _Swaps:
    """Owners of chunks, and what each rank costs, kept up to date while chunks are swapped."""

    def __init__(self, owner: Ints, ranks: int, edges: Ints, demands: Sequence[Demand]) -> None:
        owner = owner[edges[:-1]]
        self.owner, self._sizes = owner.copy(), np.diff(edges)
        self._work: Floats = np.sum([x.work * x.tile for x in demands], 0)
        self._programs = [_ChunkLoads(x) for x in demands]
        order = owner.argsort(kind="stable")
        self._chunks = np.split(order, np.searchsorted(owner[order], np.arange(1, ranks)))
        keys = np.zeros(ranks)
        for demand in demands:
            needs = needs_of(demand, owner)
            total = np.bincount(needs.reader, needs.stop - needs.start, ranks)
            keys += demand.key * (total - own_needs(demand, owner, np.arange(ranks), needs))
        self.cost = np.array([self._work[x].sum() for x in self._chunks]) + keys

    def _exact(self, rank: int) -> float:
        mine = self._chunks[rank]
        keys = 0.0
        for program in self._programs:
            seen = program.cover(rank, self.owner) > 0
            keys += program.key * (np.count_nonzero(seen) - np.count_nonzero(seen[mine]))
        return float(self._work[mine].sum() + keys)

    def swap(self, slow: int, other: int) -> bool:
        """Swap the pair of chunks that helps most, if one does."""
        out, into = self._chunks[slow], self._chunks[other]
        if not len(out) or not len(into):
            return False
        (less, more), (less_there, more_there) = (
            self._changes(rank, gone, come)
            for rank, gone, come in ((slow, out, into), (other, into, out))
        )
        after = np.maximum(
            self.cost[slow] - less[:, None] + more[None, :],
            self.cost[other] - less_there[None, :] + more_there[:, None],
        )
        # Ranks keep as many rows as they have.
        after[self._sizes[out][:, None] != self._sizes[into][None, :]] = np.inf
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
        """Seconds that ``rank`` saves without a chunk of ``gone``, and pays for one of ``come``."""
        less, more = self._work[gone].copy(), self._work[come].copy()
        away = np.ones(len(self.owner), np.bool_)
        away[gone] = False
        for program in self._programs:
            cover = program.cover(rank, self.owner)
            less += program.key * program.seen((cover == 1) & away, gone)
            more += program.key * program.seen((cover == 0) & away, come)
            # A rank's own chunks need no journey, and those that it gives away do.
            less -= program.key * (cover[gone] > 0)
            more -= program.key * (cover[come] > 0)
        return less, more

    def _exchange(self, slow: int, other: int, i: int, j: int) -> None:
        """Chunk ``i`` of ``slow`` goes to ``other``, and ``j`` comes."""
        for program in self._programs:
            program.move(i, slow, other, self.owner)
            program.move(j, other, slow, self.owner)
        self.owner[i], self.owner[j] = other, slow
        for rank in (slow, other):
            self._chunks[rank] = np.flatnonzero(self.owner == rank)
