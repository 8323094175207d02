"""Which rank sends which rows to which, from a layout and what a program's rows see.

Ranks are taken in groups of some that follow each other. A group holds the rows of all its ranks,
and each of its ranks computes some heads of them: one rank a group is a gather of keys, one group
of all ranks an exchange of heads (DeepSpeed Ulysses, arXiv 2309.14509). So one table says both.

A rank's table holds numbers alone. Graphs of ``torch.compile`` hold them as constants, with guards.
A rank makes its own table only: who reads its rows follows from ranges, and from no map.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .demands import meetings, needs_of, own_needs
from .layouts import load_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .costs import Costs
    from .demands import Demand, Ints
    from .layouts import Layout

Run = tuple[int, int]
"""Rows ``run[0] <= row < run[1]``."""
_ALIGNED = 1024
"""Keys that a call begins and ends at multiples of, so that it has the tiles of a whole call."""


class Piece(NamedTuple):
    """Rows of one rank, put among those of others."""

    start: int
    """Where they begin there."""
    stop: int
    source: int
    """Whose they are: a number in the table of ranks."""
    at: int
    """Where they begin in what that rank has sent."""


class Part(NamedTuple):
    """Consecutive rows of a call, which are one call of the program."""

    row: int
    """The first, among the rows of the group."""
    rows: int
    position: int
    """Logical position of the first."""
    keys: Run
    """Positions of the keys that the rows may see."""


class Table(NamedTuple):
    """What one rank sends, receives and computes in a call of one program."""

    rank: int
    ranks: int
    group: int
    """Ranks of a group: each has as many parts of the heads."""
    length: int
    """Of the whole sequence."""
    rows: int
    """Of this rank."""
    keys: Run
    """Positions of all keys that the group's rows may see."""
    parts: tuple[Part, ...]
    """The group's rows."""
    places: tuple[tuple[Run, ...], ...]
    """By rank of the group: where its rows lie among the group's."""
    rows_in_order: tuple[Piece, ...]
    """The same in the order of rows."""
    sends: tuple[tuple[Run, ...], ...]
    """By rank: which of this rank's rows it reads keys of."""
    reads: tuple[tuple[Run, ...], ...]
    """By rank: positions of its keys that this rank reads."""
    keys_in_order: tuple[Piece, ...]
    """The same in the order of positions."""

    @property
    def first(self) -> int:
        """The first rank of the group."""
        return self.rank - self.rank % self.group

    @property
    def share(self) -> int:
        """Which part of the heads this rank computes."""
        return self.rank % self.group


@dataclass(frozen=True, slots=True, eq=False)
class Figures:
    """What a plan makes each rank do, in one forward and one backward."""

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
    """By the model of :mod:`.costs`, of the slowest rank."""


def groups_for(ranks: int, heads: int, kv_heads: int) -> tuple[int, ...]:
    """The sizes of groups whose ranks can have whole heads of their own."""
    return tuple(
        n for n in range(1, ranks + 1)
        if ranks % n == 0 and heads % n == 0 and kv_heads % n == 0
    )  # fmt: skip


def table_of(layout: Layout, demand: Demand, rank: int, group: int) -> Table:
    """What ``rank`` does."""
    first = rank - rank % group
    length = layout.length
    runs = layout.runs(first, group)
    parts, row = [], 0
    for start, stop in runs:
        parts.append(Part(row, stop - start, start, _keys_of(demand, start, stop)))
        row += stop - start
    seen = [part.keys for part in parts if part.keys[0] < part.keys[1]]
    hull = (min(k[0] for k in seen), max(k[1] for k in seen)) if seen else (0, 0)
    own = layout.runs(rank)
    places = tuple(_within(layout.runs(first + n), runs) for n in range(group))
    reads, sends = _reads(layout, demand, rank, group), _sends(layout, demand, own, group)
    return Table(
        rank, layout.ranks, group, length, layout.rows(rank), hull, tuple(parts),
        places, _in_order(places), sends, reads, _in_order(reads),
    )  # fmt: skip


def _reads(
    layout: Layout, demand: Demand, rank: int, group: int
) -> tuple[tuple[Run, ...], ...]:  # fmt: skip
    """By rank: positions of its keys that ``rank`` reads."""
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
    """By rank: which rows it reads keys of, among the rows of the runs ``own``."""
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


def _in_order(runs: Sequence[Sequence[Run]]) -> tuple[Piece, ...]:
    """Rows that several ranks send, in the order of where they go."""
    found = []
    for source, some in enumerate(runs):
        at = 0
        for start, stop in some:
            found.append(Piece(start, stop, source, at))
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


def figures_of(
    layout: Layout, demand: Demand, group: int, costs: Costs, latency: float
) -> Figures:  # fmt: skip
    """What all ranks do."""
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
