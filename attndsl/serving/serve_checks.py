"""Checks of the inputs of a step, by shapes and by values."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from attndsl.call.argument_checks import FLOATS
from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from attndsl.passes.int_ranges import POSITION_LIMIT

from .paged import INTS, PagedCache, check_starts
from .prefill import MOST_FEW

if TYPE_CHECKING:
    from .ragged_batch import ServeStep


def check_queries(step: ServeStep) -> None:
    """Refuse what does not go together, by types and shapes.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: Says which, and what to pass.
    """
    q, cache = step.q, step.cache
    _check_cache(cache)
    heads, dim = cache.k_pages.shape[2:]
    hint = f"pass (tokens, heads, {dim}), where heads is a multiple of {heads}"
    if not isinstance(q, torch.Tensor) or q.dim() != 3:
        what = f"has shape {tuple(q.shape)}" if isinstance(q, torch.Tensor) else "is no tensor"
        raise ShapeError(f"q {what}", hint=hint)
    if q.shape[2] != dim or q.shape[1] == 0 or q.shape[1] % heads:
        raise ShapeError(
            f"q has shape {tuple(q.shape)}, and the pages have {heads} heads of dim {dim}",
            hint=hint,
        )
    if q.dtype not in FLOATS or not (cache.is_fp8 or q.dtype is cache.k_pages.dtype):
        raise DTypeError(
            f"q is {q.dtype} and the pages are {cache.k_pages.dtype}",
            hint="convert q to the pages' dtype, or store pages in q's or in fp8",
        )
    if q.device != cache.k_pages.device:
        raise DeviceError(f"q is on {q.device}", hint="q.to(k_pages.device)")
    check_batch(step, q.shape[0])


def check_batch(step: ServeStep, tokens: int) -> None:
    """Refuse starts, positions and capacities that do not fit the cache.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: Says which, and what to pass.
    """
    _check_cache(step.cache)
    check_starts(step.cache, step.starts)
    _check_number("tokens", tokens)
    for name in ("most_queries", "most_chunks"):
        if (most := getattr(step, name)) is not None:
            _check_number(name, most)
    index = step.q_index
    if index is None:
        return
    if not isinstance(index, torch.Tensor) or index.dtype not in INTS:
        raise DTypeError("q_index is no int32 or int64 tensor", hint=f"pass ({tokens},) ints")
    if tuple(index.shape) != (tokens,):
        raise ShapeError(
            f"q_index has shape {tuple(index.shape)}",
            hint=f"it has one position a token: ({tokens},)",
        )
    if index.device != step.starts.device:
        raise DeviceError(f"q_index is on {index.device}", hint="q_index.to(q.device)")


def check_step_values(step: ServeStep, tokens: int) -> None:
    """Look at the values of a step, which may wait for the device.

    Raises:
        ArgumentError: Says which request is wrong, and why.
    """
    step.cache.validate(step.starts, tokens)
    if step.most_queries is not None or step.most_chunks is not None:
        _check_capacities(step)
    index = step.q_index
    if index is None or not index.numel():
        return
    least, greatest = (int(x) for x in torch.aminmax(index))
    if least <= -POSITION_LIMIT or greatest >= POSITION_LIMIT:
        raise ArgumentError(
            f"q_index has values from {least} to {greatest}",
            hint=f"positions are below {POSITION_LIMIT} in size",
        )


def _check_cache(cache: object) -> None:
    if not isinstance(cache, PagedCache):
        raise ArgumentError(
            f"cache is a {type(cache).__name__}",
            hint="pass attndsl.PagedCache(k_pages, v_pages, table, lengths)",
        )


def _check_number(name: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ArgumentError(f"{name} is {number!r}", hint="pass an int, 0 or more")


def _check_capacities(step: ServeStep) -> None:
    most, most_chunks = step.most_queries, step.most_chunks
    counts = [end - begin for begin, end in pairwise(step.starts.tolist())]
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
