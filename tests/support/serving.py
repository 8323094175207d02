"""Requests whose keys lie in pages, and what a dense call of each request gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import attndsl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Step(NamedTuple):
    """Packed queries of requests, and their keys twice: in pages, and one request at a time."""

    q: torch.Tensor
    """(tokens, heads, dim), with room for some tokens of no request."""
    starts: torch.Tensor
    cache: attndsl.PagedCache
    k: tuple[torch.Tensor, ...]
    """Of each request: (length, kv_heads, dim)."""
    v: tuple[torch.Tensor, ...]

    @property
    def counts(self) -> list[int]:
        """Queries of each request."""
        return self.starts.diff().tolist()


class Shape(NamedTuple):
    """Sizes of all requests."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    value_dim: int = 6
    page: int = 4
    dtype: torch.dtype = torch.float64
    spare: int = 2
    """Tokens of no request."""


DEFAULT = Shape()


def in_pages(rows: Sequence[torch.Tensor], page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool and a table of rows (length, kv_heads, dim): pages in a drawn order.

    What belongs to no request is NaN, and table entries that nobody needs are out of range.
    """
    counts = [-(-len(each) // page) for each in rows]
    pages = sum(counts) + 2
    order = torch.randperm(pages).tolist()
    pool = rows[0].new_full((pages, page, *rows[0].shape[1:]), torch.nan)
    table = torch.full((len(rows), max(counts) + 1), 1 << 29, dtype=torch.int32, device=pool.device)
    for b, each in enumerate(rows):
        for i in range(counts[b]):
            part = each[i * page : (i + 1) * page]
            number = order.pop()
            pool[number, : len(part)] = part
            table[b, i] = number
    return pool, table


def make_step(
    lengths: Sequence[int], counts: Sequence[int], shape: Shape = DEFAULT, seed: int = 0
) -> Step:
    """Random keys of ``lengths`` and queries of ``counts``."""
    torch.manual_seed(seed)
    width = shape.dim + shape.value_dim
    rows = [torch.randn(n, shape.kv_heads, width, dtype=shape.dtype) for n in lengths]
    pool, table = in_pages(rows, shape.page)
    cache = attndsl.PagedCache(
        pool[..., : shape.dim], pool[..., shape.dim :], table, torch.tensor(lengths)
    )
    q = torch.randn(sum(counts) + shape.spare, shape.heads, shape.dim, dtype=shape.dtype)
    starts = torch.tensor([0, *counts]).cumsum(0)
    return Step(
        q, starts, cache,
        tuple(x[..., : shape.dim] for x in rows), tuple(x[..., shape.dim :] for x in rows),
    )  # fmt: skip


def one_by_one(
    attention: attndsl.Attention, step: Step, captures: Callable[[int, int, int], Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a dense call of each request in the whole gives: its last rows, packed.

    ``captures`` gives those of a request's dense call, by its number, length and number of queries.
    """
    tokens, heads, dim = step.q.shape
    out = torch.zeros(tokens, heads, step.v[0].shape[2], dtype=step.q.dtype)
    lse = torch.full((tokens, heads), -torch.inf, dtype=step.q.dtype)
    for b, count in enumerate(step.counts):
        if not count:
            continue
        first, length = int(step.starts[b]), len(step.k[b])
        q = torch.zeros(1, heads, length, dim, dtype=step.q.dtype)
        q[0, :, length - count :] = step.q[first : first + count].transpose(0, 1)
        k, v = (x[b].transpose(0, 1)[None] for x in (step.k, step.v))
        own = {} if captures is None else captures(b, length, count)
        found = attention(
            q, k, v, batch=len(step.counts), b_offset=b, return_lse=True, captures=own
        )
        rows = [x[0, :, length - count :].transpose(0, 1) for x in found]
        out[first : first + count], lse[first : first + count] = rows
    return out, lse
