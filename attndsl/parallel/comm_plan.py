"""Routes of rows between ranks, from a layout and the keys that a program's rows see.

Ranks are taken in groups of some that follow each other. A group holds the rows of all its ranks,
and each of its ranks computes some heads of them: one rank a group is a gather of keys, one group
of all ranks an exchange of heads (DeepSpeed Ulysses, arXiv 2309.14509). So one table says both.

A rank's table holds numbers alone. Graphs of ``torch.compile`` hold them as constants, with guards.
A rank makes its own table only: who reads its rows follows from ranges, and from no map.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .row_layouts import load_of
from .workload import meetings, needs_of, own_needs, union

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .plan_costs import Costs
    from .row_layouts import Layout
    from .workload import Demand, Ints

Run = tuple[int, int]
"""Rows ``run[0] <= row < run[1]``."""
_ALIGNED = 1024
"""Keys that a call begins and ends at multiples of, or where a rank's do, see :func:`_whole`. So it
has the tiles of a whole call."""
_TILES = 256
"""Keys that are whole tiles of any size."""
_MORE = 4
"""A call has up to a quarter more keys than its rows see, if these are all that a rank has."""


class RowPiece(NamedTuple):
    """Rows of one rank at their place among the rows of others."""

    start: int
    """The first row's place among the rows of all."""
    stop: int
    source: int
    """Number, in the table of ranks, of the rank that holds the rows."""
    at: int
    """The first row's place in what that rank has sent."""


class Island(NamedTuple):
    """Positions that follow each other, whose keys are put together from those of several ranks."""

    keys: Run
    pieces: tuple[RowPiece, ...]
    """Pieces of these keys, in order. ``at`` of a piece that this rank holds counts its own
    rows."""


class RowRun(NamedTuple):
    """Consecutive rows of a call, which are one call of the program."""

    row: int
    """The first, among the rows of the group."""
    rows: int
    position: int
    """Logical position of the first."""
    keys: Run
    """Positions of the keys that the rows may see."""
    own: int
    """Index of the first of these keys among this rank's rows of keys; -1 where others hold
    some."""
    island: int
    """Index of the island that holds the keys; -1 where this rank holds all."""


class Fetched(NamedTuple):
    """Flags on the keys that ranks fetch, the same on all ranks."""

    travels: bool
    """True if any rank needs keys of another one."""
    keeps: bool
    """True if these are few, and kept for the backward."""


ALWAYS = Fetched(True, False)


class Table(NamedTuple):
    """Rows that one rank sends, receives and computes in a call of one program."""

    rank: int
    ranks: int
    group: int
    """Ranks of a group: each has as many parts of the heads."""
    length: int
    """Rows of the whole sequence."""
    rows: int
    """Rows of this rank."""
    held: tuple[Run, ...]
    """Positions of this rank's rows."""
    keys: Run
    """Positions of all keys that the group's rows may see."""
    parts: tuple[RowRun, ...]
    """The group's rows."""
    places: tuple[tuple[Run, ...], ...]
    """Places of each group rank's rows among the group's rows."""
    rows_in_order: tuple[RowPiece, ...]
    """The same in the order of rows."""
    sends: tuple[tuple[Run, ...], ...]
    """Rows of this rank whose keys each rank reads."""
    reads: tuple[tuple[Run, ...], ...]
    """Positions of each rank's keys that this rank reads."""
    keys_in_order: tuple[RowPiece, ...]
    """The same in the order of positions."""
    sent: tuple[int, ...]
    """Number of rows of keys that go to each rank; none to this rank itself."""
    received: tuple[int, ...]
    """Number of rows of keys that come from each rank."""
    islands: tuple[Island, ...]
    """The keys of parts that see others' keys, ascending and apart."""
    travels: bool
    """True if any rank needs keys of another one: the same on all ranks."""
    keeps: bool
    """True if fetched keys are few, and kept for the backward: the same on all ranks."""

    @property
    def first(self) -> int:
        """The first rank of the group."""
        return self.rank - self.rank % self.group

    @property
    def share(self) -> int:
        """Number of the part of the heads that this rank computes."""
        return self.rank % self.group


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """Work and traffic that a plan gives each rank, in one forward and one backward."""

    layout: str
    group: int
    rows: Ints
    """(ranks,) rows that each holds."""
    work: Ints
    """(ranks,) live tiles of one head each computes, of the heads that it computes."""
    fetched: Ints
    """(ranks,) positions whose keys each receives from others."""
    received: Ints
    """(ranks,) bytes that each receives."""
    gathered: int
    """Bytes that an all-gather of all keys and a reduce-scatter of their gradients would bring."""
    buffer: int
    """Bytes of the largest buffer of keys and values, and of their gradients in fp32."""
    seconds: float
    """Seconds of the slowest rank by the model of :mod:`.plan_costs`."""


def groups_for(ranks: int, heads: int, kv_heads: int) -> tuple[int, ...]:
    """The sizes of groups whose ranks can have whole heads of their own."""
    return tuple(
        n for n in range(1, ranks + 1) if ranks % n == 0 and heads % n == 0 and kv_heads % n == 0
    )


def table_of(
    layout: Layout, demand: Demand, rank: int, group: int, call: float = math.inf,
    fetched: Fetched = ALWAYS,
) -> Table:  # fmt: skip
    """Table of the rows that ``rank`` sends, receives and computes.

    Args:
        layout: Who holds which rows.
        demand: What they see.
        rank: Whose table it is.
        group: Ranks of a group.
        call: Seconds that one more call takes: a run of rows becomes several calls where more is
            saved, since some wait for no others' keys.
        fetched: What all ranks fetch.
    """
    first = rank - rank % group
    runs, own = layout.runs(first, group), layout.runs(rank)
    places = tuple(_within(layout.runs(first + n), runs) for n in range(group))
    if group == 1:
        runs = tuple(x for run in runs for x in _cut(demand, run, own, call))
    reads, sends = _reads(layout, demand, rank, group), _sends(layout, demand, own, group)
    in_order, keys = _in_order(reads), [_whole(own, _keys_of(demand, *run)) for run in runs]
    held = [_own_row(own, some) for some in keys]
    lands = _merged([some for some, row in zip(keys, held, strict=True) if row < 0])
    parts, at = [], 0
    for (start, stop), some, row in zip(runs, keys, held, strict=True):
        island = -1 if row >= 0 else max(n for n, x in enumerate(lands) if x[0] <= some[0])
        parts.append(RowRun(at, stop - start, start, some, row, island))
        at += stop - start
    hull = _merged(keys)
    return Table(
        rank, layout.ranks, group, layout.length, layout.rows(rank), own,
        (hull[0][0], hull[-1][1]) if hull else (0, 0), tuple(parts), places, _in_order(places),
        sends, reads, in_order, _of_others(sends, rank), _of_others(reads, rank),
        tuple(Island(x, _pieces_within(in_order, x, rank, own)) for x in lands), *fetched,
    )  # fmt: skip


def _cut(demand: Demand, run: Run, own: Sequence[Run], call: float) -> list[Run]:
    """``run`` in up to three parts, if the longest one that sees keys of ``own`` alone is worth it.

    What others need travels while that one is computed, and its keys are read where they lie.
    """
    chunk, start, stop = demand.chunk, *run
    ends = [*range(start, stop, chunk), stop]
    alone = [_own_row(own, _keys_of(demand, *x)) >= 0 for x in pairwise(ends)]
    edges = np.flatnonzero(np.diff(np.array([0, *alone, 0]))).reshape(-1, 2)
    if all(alone) or not len(edges):
        return [run]
    low, high = edges[(edges[:, 1] - edges[:, 0]).argmax()].tolist()
    needs = demand.needs.of(start // chunk, -(-stop // chunk))
    tiles = union(needs.reader * 0, needs.start, needs.stop)
    held = np.array(own, np.int64).reshape(-1, 2) // demand.grain
    *_, first, last = meetings((tiles.start, tiles.stop), (held[:, 0], held[:, 1]))
    foreign = int((tiles.stop - tiles.start).sum() - (last - first).sum())
    work = int(demand.work[start // chunk + low : start // chunk + high].sum())
    # Half of a key's journey is that of gradients. Copies are some eight times as fast.
    hidden = min(work * demand.tile, foreign * demand.key / 2)
    copied = (ends[high] - ends[low]) / demand.grain * demand.key / 8
    cuts = sorted({start, ends[low], ends[high], stop})
    if hidden + copied < call * (len(cuts) - 2):
        return [run]
    return list(pairwise(cuts))


def _whole(own: Sequence[Run], wanted: Run) -> Run:
    """``wanted``, or the only run of ``own`` if that holds all of it and little more.

    Gradients of all keys of a rank become its result as they are. Those of most of them are copied.
    """
    if len(own) == 1 and _own_row(own, wanted) >= 0:
        (start, stop), number = own[0], wanted[1] - wanted[0]
        if start % _TILES == 0 and stop - start - number <= number // _MORE:
            return own[0]
    return wanted


def _own_row(own: Sequence[Run], wanted: Run) -> int:
    """Number, among the rows of ``own``, of the first of ``wanted``; -1 where no run holds all."""
    if wanted[0] >= wanted[1]:
        return 0
    row = 0
    for start, stop in own:
        if start <= wanted[0] and wanted[1] <= stop:
            return row + wanted[0] - start
        row += stop - start
    return -1


def _merged(runs: Sequence[Run]) -> list[Run]:
    """All that lies in ``runs``, as runs that ascend and are apart."""
    found: list[Run] = []
    for start, stop in sorted(run for run in runs if run[0] < run[1]):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _of_others(runs: Sequence[Sequence[Run]], rank: int) -> tuple[int, ...]:
    """Number of rows for each rank; none of ``rank`` itself."""
    return tuple(
        0 if number == rank else sum(stop - start for start, stop in some)
        for number, some in enumerate(runs)
    )


def _pieces_within(
    pieces: Sequence[RowPiece], land: Run, rank: int, own: Sequence[Run]
) -> tuple[RowPiece, ...]:
    """Parts of ``pieces`` that lie in ``land``; those of ``rank`` begin at its own rows."""
    found = []
    for start, stop, source, at in pieces:
        low, high = max(start, land[0]), min(stop, land[1])
        if low < high:
            row = _own_row(own, (low, high)) if source == rank else at + low - start
            found.append(RowPiece(low, high, source, row))
    return tuple(found)


def _reads(layout: Layout, demand: Demand, rank: int, group: int) -> tuple[tuple[Run, ...], ...]:
    """Positions of each rank's keys that ``rank`` reads."""
    mine = rank // group
    needs = needs_of(demand, layout.owner // group).of(mine, mine + 1)
    first = np.flatnonzero(np.diff(layout.owner, prepend=-1))
    ends = np.append(first, len(layout.owner)) * demand.each
    holders = layout.owner[first]
    number, _, start, stop = meetings((ends[:-1], ends[1:]), (needs.start, needs.stop))
    order = holders[number].argsort(kind="stable")
    grain, length = demand.grain, layout.length
    runs = zip(
        holders[number][order].tolist(), (start[order] * grain).tolist(),
        np.minimum(stop[order] * grain, length).tolist(), strict=True,
    )  # fmt: skip
    found: list[list[Run]] = [[] for _ in range(layout.ranks)]
    for holder, low, high in runs:
        found[holder].append((low, high))
    return tuple(map(tuple, found))


def _sends(
    layout: Layout, demand: Demand, own: Sequence[Run], group: int
) -> tuple[tuple[Run, ...], ...]:
    """Rows whose keys each rank reads, among the rows of the runs ``own``."""
    needs, grain = needs_of(demand, layout.owner // group), demand.grain
    rows = np.array(own, np.int64).reshape(-1, 2)
    place = np.cumsum(rows[:, 1] - rows[:, 0]) - rows[:, 1]
    tiles = rows[:, 0] // grain, -(-rows[:, 1] // grain)
    number, run, start, stop = meetings((needs.start, needs.stop), tiles)
    start, stop = start * grain + place[run], np.minimum(stop * grain, rows[run, 1]) + place[run]
    found: list[list[Run]] = [[] for _ in range(layout.ranks // group)]
    runs = zip(needs.reader[number].tolist(), start.tolist(), stop.tolist(), strict=True)
    for reader, low, high in runs:
        found[reader].append((low, high))
    return tuple(some for one in map(tuple, found) for some in (one,) * group)


def _in_order(runs: Sequence[Sequence[Run]]) -> tuple[RowPiece, ...]:
    """Rows that several ranks send, in the order of where they go."""
    found = []
    for source, some in enumerate(runs):
        at = 0
        for start, stop in some:
            found.append(RowPiece(start, stop, source, at))
            at += stop - start
    return tuple(sorted(found))


def _keys_of(demand: Demand, start: int, stop: int) -> Run:
    """Keys that rows ``start`` to ``stop`` may see, widened to where a whole call has its tiles."""
    chunk = demand.chunk
    low, high = demand.needs.of(start // chunk, -(-stop // chunk)).hull()
    low, high = low * demand.grain, high * demand.grain
    return low - low % _ALIGNED, min(demand.length, high + -high % _ALIGNED)


def _within(wanted: Sequence[Run], runs: Sequence[Run]) -> tuple[Run, ...]:
    """``wanted`` positions as places among the rows of ``runs``, in pieces that follow each other.

    Both ascend, and ``runs`` hold all that is wanted.
    """
    found: list[Run] = []
    base, number = 0, 0
    for start, stop in wanted:
        while start < stop:
            low, high = runs[number]
            if start >= high:
                base, number = base + high - low, number + 1
                continue
            end = min(stop, high)
            found.append((base + start - low, base + end - low))
            start = end
    return tuple(found)


def figures_of(layout: Layout, demand: Demand, group: int, costs: Costs, latency: float) -> Figures:
    """Work and traffic of all ranks for one program."""
    ranks, length, owner = layout.ranks, layout.length, layout.owner
    everyone, groups = np.arange(ranks), ranks // group
    needs = needs_of(demand, owner // group)
    size = demand.positions(needs.start, needs.stop)
    total = np.bincount(needs.reader, size, groups).astype(np.int64)
    fetched = total.repeat(group) - own_needs(demand, owner, everyone // group, needs)
    chunks = np.arange(len(owner)) * layout.chunk
    held = np.minimum(layout.chunk, length - chunks)
    rows = np.bincount(owner, held, ranks).astype(np.int64)
    together = rows.reshape(-1, group).sum(1).repeat(group)
    received = fetched * costs.journey // group
    if group > 1:
        received = received + _head_bytes(rows, together, group, costs)
    work = load_of(layout, demand).reshape(-1, group).sum(1).repeat(group) / group
    times = work * demand.tile + received * (demand.key / demand.grain / costs.journey)
    first = np.flatnonzero(np.diff(needs.reader, prepend=-1))
    low, high = needs.start[first] * demand.grain, needs.stop[np.roll(first, -1) - 1] * demand.grain
    widest = np.minimum(high + -high % _ALIGNED, length) - (low - low % _ALIGNED)
    buffer = int(widest.max(initial=0))
    return Figures(
        layout.name, group, rows, work.astype(np.int64), fetched, received,
        2 * (ranks - 1) * (length // ranks) * costs.key_bytes
        + (ranks - 1) * (length // ranks) * costs.grad_bytes,
        buffer * (costs.key_bytes + costs.grad_bytes) // group,
        float(times.max(initial=0)) + (2 if int(total.sum()) else 0) * latency,
    )  # fmt: skip


def _head_bytes(rows: Ints, together: Ints, group: int, costs: Costs) -> Ints:
    """Bytes of rows of q and out, and of their gradients, that an exchange of heads brings."""
    found: Ints = (together - rows) * 2 * costs.row_bytes // group
    found += rows * 2 * costs.row_bytes * (group - 1) // group
    return found
