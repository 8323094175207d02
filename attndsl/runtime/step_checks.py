"""Checks of the packed queries of a step, by shapes and by values.

Non-goals: what may be wrong with a cache (:mod:`.paged`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from attndsl.passes.widths import POSITION_LIMIT

from .arguments import FLOATS
from .chunks import MOST_FEW
from .paged import PagedCache, check_starts

if TYPE_CHECKING:
    from .steps import Request

_INTS = (torch.int32, torch.int64)
CAPACITIES = ("most_queries", "most_chunks")


class PackedQueries(NamedTuple):
    """Packed queries of a step, before anybody has looked at them."""

    cache: Any
    starts: Any
    tokens: Any
    index: Any
    capacities: tuple[Any, ...]
    """:data:`CAPACITIES`."""


def packed_queries(request: Request) -> PackedQueries:
    """The queries of a request whose q has three dims."""
    capacities = request.numbers[:2]
    return PackedQueries(
        request.cache, request.starts, request.q.shape[0], request.q_index, capacities
    )


def check_queries(request: Request) -> None:
    """Refuse what does not go together, by types and shapes.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: Says which, and what to pass.
    """
    q, cache = request.q, request.cache
    _check_cache(cache)
    heads, dim = cache.k_pages.shape[2:]
    if not isinstance(q, torch.Tensor) or q.dim() != 3:
        what = f"has shape {tuple(q.shape)}" if isinstance(q, torch.Tensor) else "is no tensor"
        raise ShapeError(f"q {what}", hint=_queries_hint(cache))
    if q.shape[2] != dim or q.shape[1] == 0 or q.shape[1] % heads:
        raise ShapeError(
            f"q has shape {tuple(q.shape)}, and the pages have {heads} heads of dim {dim}",
            hint=_queries_hint(cache),
        )
    if q.dtype not in FLOATS or not (cache.is_fp8 or q.dtype is cache.k_pages.dtype):
        raise DTypeError(
            f"q is {q.dtype} and the pages are {cache.k_pages.dtype}",
            hint="convert q to the pages' dtype, or store pages in q's or in fp8",
        )
    if q.device != cache.k_pages.device:
        raise DeviceError(f"q is on {q.device}", hint="q.to(k_pages.device)")
    check_step(packed_queries(request))


def _queries_hint(cache: PagedCache) -> str:
    heads, dim = cache.k_pages.shape[2:]
    return f"pass (tokens, heads, {dim}), where heads is a multiple of {heads}"


def check_step(step: PackedQueries) -> None:
    """Refuse starts, positions and capacities that do not fit the cache.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: Says which, and what to pass.
    """
    _check_cache(step.cache)
    check_starts(step.cache, step.starts)
    _check_number("tokens", step.tokens)
    for name, most in zip(CAPACITIES, step.capacities, strict=True):
        if most is not None:
            _check_number(name, most)
    tokens, index = step.tokens, step.index
    if index is None:
        return
    if not isinstance(index, torch.Tensor) or index.dtype not in _INTS:
        raise DTypeError("q_index is no int32 or int64 tensor", hint=f"pass ({tokens},) ints")
    if tuple(index.shape) != (tokens,):
        raise ShapeError(
            f"q_index has shape {tuple(index.shape)}",
            hint=f"it has one position a token: ({tokens},)",
        )
    if index.device != step.starts.device:
        raise DeviceError(f"q_index is on {index.device}", hint="q_index.to(q.device)")


def check_step_values(step: PackedQueries) -> None:
    """Look at the values of a step, which may wait for the device.

    Raises:
        ArgumentError: Says which request is wrong, and why.
    """
    step.cache.validate(step.starts, step.tokens)
    most_queries, most_chunks = step.capacities
    _check_capacities(step.starts, most_queries, most_chunks)
    _check_positions(step.index)


def _check_cache(cache: object) -> None:
    if not isinstance(cache, PagedCache):
        raise ArgumentError(
            f"cache is a {type(cache).__name__}",
            hint="pass attndsl.PagedCache(k_pages, v_pages, table, lengths)",
        )


def _check_number(name: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ArgumentError(f"{name} is {number!r}", hint="pass an int, 0 or more")


def _check_capacities(starts: torch.Tensor, most: int | None, most_chunks: int | None) -> None:
    if most is None and most_chunks is None:
        return
    counts = [end - begin for begin, end in pairwise(starts.tolist())]
    found = max(counts, default=0)
    if most is not None and found > most:
        raise ArgumentError(
            f"most_queries is {most}, and a request has {found} queries",
            hint=f"pass {found} or more: it is a capacity",
        )
    chunks = sum(count > MOST_FEW for count in counts)
    if most_chunks is not None and chunks > most_chunks:
        raise ArgumentError(
            f"most_chunks is {most_chunks}, and {chunks} requests have more than {MOST_FEW} "
            f"queries",
            hint=f"pass {chunks} or more: it is a capacity",
        )


def _check_positions(index: torch.Tensor | None) -> None:
    if index is None or not index.numel():
        return
    least, greatest = (int(x) for x in torch.aminmax(index))
    if least <= -POSITION_LIMIT or greatest >= POSITION_LIMIT:
        raise ArgumentError(
            f"q_index has values from {least} to {greatest}",
            hint=f"positions are below {POSITION_LIMIT} in size",
        )
