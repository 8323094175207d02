"""Which rank sends which rows to which, from a layout and what a program's rows see.

Ranks are taken in groups of some that follow each other. A group holds the rows of all its ranks,
and each of its ranks computes some heads of them: one rank a group is a gather of keys, one group
of all ranks an exchange of heads (DeepSpeed Ulysses, arXiv 2309.14509). So one table says both.

A rank's table holds numbers alone. Graphs of ``torch.compile`` hold them as constants, with guards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .layouts import fetched_by, load_of, needs_of, tile_owners

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .costs import Costs
    from .layouts import Bools, Demand, Ints, Layout

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


def needs_of_groups(layout: Layout, demand: Demand, group: int) -> tuple[Bools, Ints]:
    """(groups, tiles) which tiles of keys the rows of each group see; and who holds each tile."""
    owner = tile_owners(layout, demand.grain)
    return needs_of(demand.reach, owner // group, layout.ranks // group, len(owner)), owner


def table_of(layout: Layout, demand: Demand, rank: int, group: int) -> Table:
    """What ``rank`` does."""
    need, owner = needs_of_groups(layout, demand, group)
    first = rank - rank % group
    grain, length = demand.grain, layout.length
    runs = layout.runs(first, group)
    parts, row = [], 0
    for start, stop in runs:
        parts.append(Part(row, stop - start, start, _hull(demand, start, stop)))
        row += stop - start
    seen = [part.keys for part in parts if part.keys[0] < part.keys[1]]
    hull = (min(k[0] for k in seen), max(k[1] for k in seen)) if seen else (0, 0)
    mine = owner == rank
    reads = need[rank // group][None] & (owner[None] == np.arange(layout.ranks)[:, None])
    sends = need.repeat(group, 0) & mine
    own = layout.runs(rank)
    places = tuple(_within(layout.runs(first + n), runs) for n in range(group))
    keys = _runs_of(reads, grain, length)
    return Table(
        rank, layout.ranks, group, length, layout.rows(rank), hull, tuple(parts),
        places, _in_order(places), tuple(_within(x, own) for x in _runs_of(sends, grain, length)),
        keys, _in_order(keys),
    )  # fmt: skip


def _in_order(runs: Sequence[Sequence[Run]]) -> tuple[Piece, ...]:
    """Rows that several ranks send, in the order of where they go."""
    found = []
    for source, some in enumerate(runs):
        at = 0
        for start, stop in some:
            found.append(Piece(start, stop, source, at))
            at += stop - start
    return tuple(sorted(found))


def _hull(demand: Demand, start: int, stop: int) -> Run:
    """Keys that rows ``start`` to ``stop`` may see, widened to where a whole call has its tiles."""
    reach, grain, length = demand.reach, demand.grain, demand.reach.kv_len
    rows = slice(start // grain, -(-stop // grain))
    starts, stops = reach.starts[rows], reach.stops[rows]
    there = starts < stops
    if not there.any():
        return (0, 0)
    low, high = int(starts[there].min()) * grain, int(stops[there].max()) * grain
    return low - low % _ALIGNED, min(length, high + -high % _ALIGNED)


def _runs_of(chosen: Bools, grain: int, length: int) -> tuple[tuple[Run, ...], ...]:
    """By row of ``chosen`` tiles: the ranges of positions in them."""
    edges = np.diff(chosen.astype(np.int8), axis=1, prepend=0, append=0)
    rows, ends = np.nonzero(edges)
    ends = np.minimum(ends * grain, length)
    found: list[tuple[Run, ...]] = []
    splits = np.searchsorted(rows, np.arange(len(chosen) + 1))
    for a, b in zip(splits[:-1].tolist(), splits[1:].tolist(), strict=True):
        some = ends[a:b].tolist()
        found.append(tuple(zip(some[::2], some[1::2], strict=True)))
    return tuple(found)


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
    ranks, length, grain = layout.ranks, layout.length, demand.grain
    need, owner = needs_of_groups(layout, demand, group)
    size = np.minimum(grain, length - np.arange(len(owner)) * grain)
    away = need.repeat(group, 0)
    total = (away * size).sum(1)
    away[owner, np.arange(len(owner))] = False
    fetched = (away * size).sum(1)
    rows = np.bincount(owner, size, ranks).astype(np.int64)
    together = rows.reshape(-1, group).sum(1).repeat(group)
    received = fetched * costs.journey // group
    if group > 1:
        received = received + _head_bytes(rows, together, group, costs)
    work = load_of(layout, demand).reshape(-1, group).sum(1).repeat(group) / group
    times = work * demand.tile + received * (demand.key / grain / costs.journey)
    hull = max(table_hull(layout, demand, r * group, group) for r in range(ranks // group))
    return Figures(
        layout.name, group, rows, work.astype(np.int64), fetched, received,
        2 * (ranks - 1) * (length // ranks) * costs.key_bytes
        + (ranks - 1) * (length // ranks) * costs.grad_bytes,
        hull * (costs.key_bytes + costs.grad_bytes) // group,
        float(times.max(initial=0)) + (2 if int(total.sum()) else 0) * latency,
    )  # fmt: skip


def table_hull(layout: Layout, demand: Demand, first: int, group: int) -> int:
    """How many keys the buffer of the group from rank ``first`` on has room for."""
    hulls = [_hull(demand, *run) for run in layout.runs(first, group)]
    seen = [keys for keys in hulls if keys[0] < keys[1]]
    return max((k[1] for k in seen), default=0) - min((k[0] for k in seen), default=0)


def _head_bytes(rows: Ints, together: Ints, group: int, costs: Costs) -> Ints:
    """Bytes of rows of q and out, and of their gradients, that an exchange of heads brings."""
    found: Ints = (together - rows) * 2 * costs.row_bytes // group
    found += rows * 2 * costs.row_bytes * (group - 1) // group
    return found


__all__ = [
    "Figures", "Part", "Run", "Table", "fetched_by", "figures_of", "groups_for", "table_of",
]  # fmt: skip
