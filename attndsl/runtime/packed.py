"""Packed requests as calls of batch entries: which entries go together, and where rows lie.

Requests beside each other that have the same number of queries are one call, if the host knows the
numbers. Otherwise all requests are one call with room for as many queries as a request may have.

Non-goals: kernels that take packed rows as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from attndsl.backends.requests import Packed, requests_of
from attndsl.call.options import Location

from .paged import gathered

if TYPE_CHECKING:
    from .paged import Keys, PagedCache


class Step(NamedTuple):
    """The packed queries of a step."""

    q: torch.Tensor
    """(tokens, Hq, D)."""
    starts: torch.Tensor
    """(batch + 1,)."""
    positions: torch.Tensor | None
    """(tokens,): logical positions, where they are not the last ones of each request."""
    most_queries: int | None
    """Of a request, where numbers of queries are not to be read."""
    runs: tuple[Run, ...] | None = None
    """What :func:`runs_by_values` found, if somebody has read the numbers of queries."""


class Run(NamedTuple):
    """Consecutive requests that are one call."""

    requests: slice
    rows: int
    """Queries of each."""
    length: int
    """The most keys of one."""
    is_exact: bool
    """Whether each has so many queries, not fewer."""


def runs_of(step: Step, cache: PagedCache) -> list[Run]:
    """The calls of a step. Reads values where ``most_queries`` is None."""
    if step.most_queries is not None:
        rows = min(step.most_queries, step.q.shape[0])
        return [Run(slice(0, cache.batch), rows, cache.room, False)]
    return runs_by_values(step.starts, cache) if step.runs is None else list(step.runs)


def runs_by_values(starts: torch.Tensor, cache: PagedCache) -> list[Run]:
    """The calls of a step, by the numbers of queries, which are read."""
    counts = starts.diff().tolist()
    lengths = cache.lengths.tolist()
    found: list[Run] = []
    begin = 0
    for b in range(1, len(counts) + 1):
        if b == len(counts) or counts[b] != counts[begin]:
            if counts[begin]:
                longest = max(lengths[begin:b])
                found.append(Run(slice(begin, b), counts[begin], longest, True))
            begin = b
    return found


def rows_of(step: Step, run: Run) -> torch.Tensor:
    """(requests, rows): the token of each row. Rows beyond a request's have some other token."""
    starts = step.starts[run.requests]
    tokens = starts[:, None] + torch.arange(run.rows, device=starts.device)
    return tokens if run.is_exact else tokens.clamp(0, max(0, step.q.shape[0] - 1))


def queries_of(step: Step, run: Run) -> torch.Tensor:
    """(requests, Hq, rows, D)."""
    return step.q[rows_of(step, run)].transpose(1, 2)


def keys_of_run(cache: PagedCache, run: Run, dtype: torch.dtype) -> Keys:
    """Keys of the requests of a run."""
    return gathered(cache, run.requests, run.length, dtype)


def location_of(step: Step, cache: PagedCache, run: Run, heads: Location) -> Location:
    """Location of a run's call in the whole of its requests.

    Args:
        step: The packed queries.
        cache: Their keys.
        run: Some of the requests.
        heads: Which of the heads a call has; nothing else.
    """
    first, last = run.requests.start, run.requests.stop
    tokens = step.q.shape[0]
    own = requests_of(
        step.starts[first : last + 1], cache.lengths[run.requests], tokens, cache.room
    )
    packed = Packed(own.first_token, tokens, cache.room, step.positions)
    return Location(
        q_offset=own.first_query,
        heads=heads.heads,
        kv_heads=heads.kv_heads,
        h_offset=heads.h_offset,
        batch=cache.batch,
        b_offset=first,
        kv_lengths=own.length.clamp(max=run.length),
        packed=packed,
    )


def store(step: Step, run: Run, found: torch.Tensor, packed: torch.Tensor) -> None:
    """Write a run's results (requests, Hq, rows, ...) to their tokens in (tokens, Hq, ...)."""
    rows = found.transpose(1, 2)
    if run.is_exact:
        packed[rows_of(step, run)] = rows.to(packed.dtype)
        return
    # Each token takes its row: no number of rows is read.
    tokens = torch.arange(packed.shape[0], device=packed.device)
    b = torch.searchsorted(step.starts[1:].long().contiguous(), tokens, right=True)
    own = b.clamp(max=max(0, rows.shape[0] - 1))
    row = tokens - step.starts[own]
    exist = (b < rows.shape[0]) & (row >= 0) & (row < run.rows)
    if rows.numel() == 0:
        return
    values = rows[own, row.clamp(0, run.rows - 1)].to(packed.dtype)
    exist = exist.view(-1, *[1] * (packed.dim() - 1))
    torch.where(exist, values, packed, out=packed)
