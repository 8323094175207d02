"""Exchanges of rows and heads between ranks, each by one all-to-all of torch.distributed.

What travels is cut out of the operands range by range, with no index tensors, and what arrives is
put together in the order of positions. All of it is differentiable, any number of times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from .eager_exchange import is_eager

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from .comm_plan import Run, Table

ALL = -1
"""All heads, in place of a part of them."""
Parcel = tuple[int, "tuple[Run, ...]"]
"""A part of the heads, and rows."""


class _AllToAll(torch.autograd.Function):
    """``dist.all_to_all_single`` of a flat tensor, whose gradient travels back."""

    @staticmethod
    def forward(
        ctx: Any, flat: torch.Tensor, arriving: list[int], leaving: list[int], group: ProcessGroup
    ) -> torch.Tensor:
        ctx.way = leaving, arriving, group
        if is_eager(flat):  # Less than half of the functional way's host time.
            found = flat.new_empty(sum(arriving))
            dist.all_to_all_single(found, flat, arriving, leaving, group=group)
            return found
        return waited(functional.all_to_all_single(flat, arriving, leaving, group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_to_all(grads[0].contiguous(), *ctx.way), None, None, None


def waited(found: torch.Tensor) -> torch.Tensor:
    """The result of a functional collective as a plain tensor."""
    return found.wait() if isinstance(found, functional.AsyncCollectiveTensor) else found


def all_to_all(
    flat: torch.Tensor, arriving: list[int], leaving: list[int], group: ProcessGroup
) -> torch.Tensor:
    """Elements that the ranks send to this one, in their order.

    Args:
        flat: What goes to each rank, in their order.
        arriving: Elements from each rank.
        leaving: Elements to each rank.
        group: The ranks.
    """
    found: torch.Tensor = _AllToAll.apply(flat, arriving, leaving, group)  # type: ignore[no-untyped-call]
    return found


def swap(
    tensors: Sequence[torch.Tensor],
    parcels: Sequence[Parcel],
    arriving: Sequence[int],
    heads: Sequence[int],
    table: Table,
    group: ProcessGroup,
) -> list[list[torch.Tensor]]:
    """Rows that each rank sends to this one of each tensor; this rank's own part goes nowhere.

    Args:
        tensors: (B, heads, rows, width), all of one dtype.
        parcels: By rank: what it gets of each.
        arriving: By rank: how many rows it sends.
        heads: By tensor: how many heads of it each rank sends.
        table: Which rank this is.
        group: The ranks.

    Returns:
        By rank and tensor: (B, heads, rows, width).
    """
    cut = [[_cut(x, *parcel, table.group) for x in tensors] for parcel in parcels]
    sent = [[x.reshape(-1) for x in pieces] for pieces in cut]
    sent[table.rank] = []
    there = [0 if rank == table.rank else rows for rank, rows in enumerate(arriving)]
    sizes = [
        [x.shape[0] * count * rows * x.shape[3] for x, count in zip(tensors, heads, strict=True)]
        for rows in there
    ]
    flat = torch.cat([*(x for pieces in sent for x in pieces), tensors[0].new_empty(0)])
    totals = [sum(some) for some in sizes]
    found = all_to_all(flat, totals, [sum(x.numel() for x in some) for some in sent], group)
    result, start = [], 0
    for rank, rows in enumerate(there):
        if rank == table.rank:
            result.append(cut[rank])
            continue
        pieces = []
        for x, count, size in zip(tensors, heads, sizes[rank], strict=True):
            shape = (x.shape[0], count, rows, x.shape[3])
            pieces.append(found.narrow(0, start, size).view(shape))
            start += size
        result.append(pieces)
    return result


def _cut(x: torch.Tensor, share: int, rows: Sequence[Run], shares: int) -> torch.Tensor:
    """Some rows of a part of the heads of ``x``."""
    if share != ALL:
        count = x.shape[1] // shares
        x = x.narrow(1, share * count, count)
    if not rows:
        return x.narrow(2, 0, 0)
    return torch.cat([x.narrow(2, start, stop - start) for start, stop in rows], 2)


def fetched(
    k: torch.Tensor, v: torch.Tensor, table: Table, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values that this rank's group sees, at their places from ``table.keys`` on.

    Where no row sees a key, and nobody sent it, there are zeros.
    """
    parcels = [(rank % table.group, rows) for rank, rows in enumerate(table.sends)]
    heads = [x.shape[1] // table.group for x in (k, v)]
    pieces = swap((k, v), parcels, [_count(x) for x in table.reads], heads, table, group)
    low, high = table.keys
    # Rows of all ranks, even none: the gradient goes back to all of them, which wait for it.
    whole = [[pieces[rank][n].narrow(2, 0, 0) for rank in range(table.ranks)] for n in (0, 1)]
    for start, stop, source, at in (*table.keys_in_order, (high, high, 0, 0)):
        for some, x, sent, count in zip(whole, (k, v), pieces[source], heads, strict=True):
            if start > low:
                some.append(x.new_zeros((x.shape[0], count, start - low, x.shape[3])))
            if start < stop:
                some.append(sent.narrow(2, at, stop - start))
        low = stop
    return torch.cat(whole[0], 2), torch.cat(whole[1], 2)


def returned(
    grads: Sequence[torch.Tensor], heads: Sequence[int], table: Table, group: ProcessGroup
) -> list[torch.Tensor]:
    """Gradients of this rank's keys and values, from those of all that saw them.

    This rank's come first and then those of the others in their order, so that sums are the same
    whichever comes first.

    Args:
        grads: Of what :func:`fetched` gave, in the dtype of the sums.
        heads: By tensor: key heads of this rank's rows.
        table: Of this rank.
        group: The ranks.
    """
    low = table.keys[0]
    parcels = [
        (ALL, tuple((start - low, stop - low) for start, stop in runs)) for runs in table.reads
    ]
    counts = [x.shape[1] for x in grads]
    arriving = [_count(rows) for rows in table.sends]
    pieces = swap(grads, parcels, arriving, counts, table, group)
    found = [
        x.new_zeros((x.shape[0], count, table.rows, x.shape[3]))
        for x, count in zip(grads, heads, strict=True)
    ]
    others = [rank for rank in range(table.ranks) if rank != table.rank]
    for rank in (table.rank, *others):
        rows = table.sends[rank]
        for total, part in zip(found, pieces[rank], strict=True):
            own = total.narrow(1, rank % table.group * part.shape[1], part.shape[1])
            for (start, stop), at in _places(rows):
                own.narrow(2, start, stop - start).add_(part.narrow(2, at, stop - start))
    return found


def to_heads(
    tensors: Sequence[torch.Tensor], table: Table, group: ProcessGroup
) -> list[torch.Tensor]:
    """This rank's part of the heads of the group's rows, from all heads of this rank's rows."""
    if table.group == 1:
        return list(tensors)
    everything: tuple[Run, ...] = ((0, table.rows),)
    parcels = [
        (rank % table.group, everything if _together(rank, table) else ())
        for rank in range(table.ranks)
    ]
    arriving = [
        _count(table.places[rank - table.first]) if _together(rank, table) else 0
        for rank in range(table.ranks)
    ]
    heads = [x.shape[1] // table.group for x in tensors]
    pieces = swap(tensors, parcels, arriving, heads, table, group)
    own = pieces[table.first : table.first + table.group]
    return [
        torch.cat([
            *(some[number].narrow(2, 0, 0) for some in own),
            *(own[source][number].narrow(2, at, stop - start)
              for start, stop, source, at in table.rows_in_order),
        ], 2)
        for number in range(len(tensors))
    ]  # fmt: skip


def from_heads(
    tensors: Sequence[torch.Tensor], table: Table, group: ProcessGroup
) -> list[torch.Tensor]:
    """All heads of this rank's rows, from its part of the heads of the group's rows."""
    if table.group == 1:
        return list(tensors)
    parcels = [
        (ALL, table.places[rank - table.first] if _together(rank, table) else ())
        for rank in range(table.ranks)
    ]
    arriving = [table.rows if _together(rank, table) else 0 for rank in range(table.ranks)]
    pieces = swap(tensors, parcels, arriving, [x.shape[1] for x in tensors], table, group)
    own = pieces[table.first : table.first + table.group]
    return [torch.cat([x[number] for x in own], 1) for number in range(len(tensors))]


def _together(rank: int, table: Table) -> bool:
    return table.first <= rank < table.first + table.group


def _count(runs: Sequence[Run]) -> int:
    return sum(stop - start for start, stop in runs)


def _places(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    """Each run, and how many rows lie in those before it."""
    found, at = [], 0
    for run in runs:
        found.append((run, at))
        at += run[1] - run[0]
    return found
