"""Steps of an engine, and their packed requests as calls of batch entries.

Requests beside each other that have the same number of queries are one call, if the host knows the
numbers. Otherwise all requests are one call with room for as many queries as a request may have.

Non-goals: kernels that take packed rows as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from attndsl.backends.paged_requests import Packed, requests_of
from attndsl.call.options import Location

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .paged import PagedCache


class ServeStep(NamedTuple):
    """Inputs of one step of an engine; see :meth:`attndsl.Attention.serve` for each."""

    q: torch.Tensor
    """(tokens, Hq, D); None in the step of a plan."""
    cache: PagedCache
    starts: torch.Tensor
    q_index: torch.Tensor | None = None
    most_queries: int | None = None
    most_chunks: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    h_offset: int = 0
    scale: float | None = None
    out_dtype: torch.dtype | None = None
    return_lse: bool = False

    @property
    def wide(self) -> torch.dtype | None:
        """The output's dtype where it is not q's."""
        return None if self.out_dtype is self.q.dtype else self.out_dtype

    def stand_ins(self, entries: int, rows: int) -> tuple[torch.Tensor, ...]:
        """q, k and v with the sizes of a call of some entries; nothing is read of them."""
        k, v = self.cache.k_pages, self.cache.v_pages
        sizes = (
            (self.q, self.q.shape[1], rows),
            *((x, x.shape[2], self.cache.room) for x in (k, v)),
        )
        return tuple(
            self.q.new_empty((1, 1, 1, x.shape[-1])).expand(entries, heads, length, -1)
            for x, heads, length in sizes
        )

    def location(
        self, q_offset: torch.Tensor, lengths: torch.Tensor, packed: Packed, b_offset: int = 0
    ) -> Location:
        """Location of a call of some requests in the whole of the step's."""
        return Location(
            q_offset=q_offset, heads=self.heads, kv_heads=self.kv_heads, h_offset=self.h_offset,
            batch=self.cache.batch, b_offset=b_offset, kv_lengths=lengths, packed=packed,
        )  # fmt: skip


class Run(NamedTuple):
    """Consecutive requests that are one call."""

    requests: slice
    rows: int
    """Queries of each."""
    length: int
    """The most keys of a request."""
    is_exact: bool
    """True if each has exactly so many queries, not fewer."""


def runs_of(step: ServeStep, known: Sequence[Run] | None) -> Sequence[Run]:
    """The calls of a step. Reads values where ``most_queries`` is None, unless they are known."""
    cache = step.cache
    if step.most_queries is not None:
        rows = min(step.most_queries, step.q.shape[0])
        return [Run(slice(0, cache.batch), rows, cache.room, False)]
    return runs_by_values(step.starts, cache.lengths) if known is None else known


def runs_by_values(starts: torch.Tensor, lengths: torch.Tensor) -> list[Run]:
    """The calls of a step, by the numbers of queries, which are read."""
    counts, longest = starts.diff().tolist(), lengths.tolist()
    found: list[Run] = []
    begin = 0
    for b in range(1, len(counts) + 1):
        if b == len(counts) or counts[b] != counts[begin]:
            if counts[begin]:
                found.append(Run(slice(begin, b), counts[begin], max(longest[begin:b]), True))
            begin = b
    return found


def rows_of(step: ServeStep, run: Run) -> torch.Tensor:
    """(requests, rows): the token of each row. Rows beyond a request's have some other token."""
    starts = step.starts[run.requests]
    tokens = starts[:, None] + torch.arange(run.rows, device=starts.device)
    return tokens if run.is_exact else tokens.clamp(0, max(0, step.q.shape[0] - 1))


def location_of(step: ServeStep, run: Run) -> Location:
    """Location of a run's call in the whole of its requests."""
    first, last = run.requests.start, run.requests.stop
    cache, tokens = step.cache, step.q.shape[0]
    own = requests_of(
        step.starts[first : last + 1], cache.lengths[run.requests], tokens, cache.room
    )
    packed = Packed(own.first_token, tokens, cache.room, step.q_index)
    return step.location(own.first_query, own.length.clamp(max=run.length), packed, first)


def store(step: ServeStep, run: Run, found: torch.Tensor, packed: torch.Tensor) -> None:
    """Write a run's results (requests, Hq, rows, ...) to their tokens in (tokens, Hq, ...)."""
    rows = found.transpose(1, 2)
    if run.is_exact:
        packed[rows_of(step, run)] = rows.to(packed.dtype)
        return
    if rows.numel() == 0:
        return
    # Each token takes its row: no number of rows is read.
    tokens = torch.arange(packed.shape[0], device=packed.device)
    b = torch.searchsorted(step.starts[1:].long().contiguous(), tokens, right=True)
    own = b.clamp(max=rows.shape[0] - 1)
    row = tokens - step.starts[own]
    exist = (b < rows.shape[0]) & (row >= 0) & (row < run.rows)
    values = rows[own, row.clamp(0, run.rows - 1)].to(packed.dtype)
    exist = exist.view(-1, *[1] * (packed.dim() - 1))
    torch.where(exist, values, packed, out=packed)
