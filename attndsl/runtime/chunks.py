"""Requests with many queries, such as chunks of prompts, as dense calls.

Kernels that read pages are made for few rows. Rows of a chunk fill the tiles of dense kernels,
which read keys in the order of their positions. So kernels copy a chunk's keys, and a dense call
runs its rows. Such a call has slots, as many as the step has room for. The device finds out which
request takes which slot. A slot that no request takes has no keys and no rows, and its tiles are
dead.

Bits of a request follow from its own rows and keys: slots have tiles of rows of their own, which
begin at the request's first query.

Non-goals: requests with few queries, and tokens of nobody, which kernels for pages write.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.backends.log_sum import public_lse
from attndsl.backends.memory_order import rows_contiguous
from attndsl.backends.requests import Packed
from attndsl.call.options import Location
from attndsl.ir import DType
from attndsl.passes.tiles.plan import FORWARD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Backend, Call, Scalar
    from attndsl.backends.requests import Pages
    from attndsl.pipeline import Lowered

    from .packed import Step
    from .paged import PagedCache
    from .parts import Terms

    Captures = Mapping[str, torch.Tensor | Scalar]

MOST_FEW = 64
"""Queries of a request that kernels for pages run: a tile of them has no more rows."""
_FIELDS = 5
_MOST_BYTES = 1 << 28
"""Of the keys that one call copies, unless one request has more."""
_TILE = 128
"""Rows and keys of a tile, where a program is asked whether formulas tell its tiles."""


class Slots(NamedTuple):
    """Most requests of a step with many queries, and the slots in which calls hold them."""

    capacity: int
    """The most such requests."""
    together: int
    """Slots of one call."""
    rows: int
    """Of each slot."""
    whole: bool
    """Whether rows are all tokens, as they lie: of one request alone."""
    most: int
    """Queries of a request."""


class Chunked(NamedTuple):
    """Slots, backend, terms and call that the chunks of steps of one signature share."""

    slots: Slots
    backend: Backend
    """Of dense calls."""
    terms: Terms
    call: Call
    """One of them, checked, without its captures."""
    beyond: tuple[bool, bool]
    """Of :func:`visits_beyond`."""


def capacity_of(
    tokens: int, batch: int, most_queries: int | None, most_chunks: int | None
) -> int | None:
    """The most requests of a step with many queries; None where no request may have many."""
    if most_queries is None or most_queries <= MOST_FEW:
        return None
    capacity = min(batch, tokens // (MOST_FEW + 1))
    return capacity if most_chunks is None else min(capacity, most_chunks)


def slots_of(step: Step, cache: PagedCache, most_chunks: int | None) -> Slots | None:
    """The slots of a step by its sizes; None where no request has many queries.

    Args:
        step: With its capacity, ``most_queries``.
        cache: Keys.
        most_chunks: The most requests with many queries, where the caller knows.
    """
    tokens, most = step.q.shape[0], step.most_queries
    capacity = capacity_of(tokens, cache.batch, most, most_chunks)
    if most is None or capacity is None:
        return None
    k, v = cache.k_pages, cache.v_pages
    of_slot = cache.room * k.shape[2] * (k.shape[3] + v.shape[3]) * k.element_size()
    together = max(1, min(capacity, _MOST_BYTES // max(1, of_slot)))
    whole = cache.batch == 1
    rows = tokens if whole else min(most, tokens)
    return Slots(capacity, together, rows, whole, most)


def has_formulas(lowered: Lowered) -> bool:
    """Return True if formulas tell the tiles of a dense call, so that no step makes lists."""
    return lowered.sparsity.loop(FORWARD, _TILE, _TILE, False, False).listed is None


def visits_beyond(lowered: Lowered, tensors: Mapping[str, torch.Tensor]) -> tuple[bool, bool]:
    """Tell whether a dense call may visit tiles behind the keys of a request.

    It visits all tiles if an int is too large for formulas.

    Args:
        lowered: The program of such calls, which has formulas.
        tensors: The program's.

    Returns:
        For steps whose int params have 32 bits, and for others.
    """
    wide = {name for name, x in tensors.items() if x.dtype is torch.int64}
    params = {decl.name for decl in lowered.program.params if decl.dtype is DType.INT}
    few, many = (
        lowered.sparsity.loop(FORWARD, _TILE, _TILE, False, False, frozenset(names)).within
        for names in (wide, wide | params)
    )
    return few is not None, many is not None


def _has_wide_params(call: Call) -> bool:
    return any(
        x.dtype is torch.int64 if isinstance(x, torch.Tensor)
        else isinstance(x, int) and x.bit_length() > 31
        for x in call.params.values()
    )  # fmt: skip


def empty_slots(slots: Slots, device: torch.device) -> torch.Tensor:
    """(5, slots) int32 zeros: slots that no request takes."""
    return torch.zeros((_FIELDS, max(1, slots.together)), dtype=torch.int32, device=device)


def found_chunks(
    starts: torch.Tensor, lengths: torch.Tensor, capacity: int, numbers: tuple[int, int, int]
) -> torch.Tensor:
    """The requests of all slots, (5, slots) int32, found by one kernel.

    The rows are the request's number, the token of row 0, the position of row 0, the number of keys
    and that of queries. There are twice as many slots as the capacity, so that the last call of
    several slots has its own.

    Args:
        starts: (batch + 1,) ints.
        lengths: (batch,) ints.
        capacity: The most such requests, 1 or more.
        numbers: Tokens of the step, room of a request, and the most queries of one.
    """
    from attndsl.backends.triton.chunks import launch_find  # Imports Triton.

    tokens, room, most = numbers
    found = torch.empty((_FIELDS, 2 * capacity), dtype=torch.int32, device=starts.device)
    whole = lengths.shape[0] == 1
    launch_find(starts, lengths, found, whole, (tokens, room, MOST_FEW + 1, most))
    return found


def example_operands(
    slots: Slots, pages: Pages, room: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v with the shapes of those of a call of slots; nothing is read of them."""
    q, k, v = pages.q, pages.k, pages.v
    rows, keys, values = (q.new_empty((1, 1, 1, x.shape[-1])) for x in (q, k, v))
    return (
        rows.expand(slots.together, q.shape[1], slots.rows, -1),
        keys.expand(slots.together, k.shape[2], room, -1),
        values.expand(slots.together, k.shape[2], room, -1),
    )


def location_of_slots(
    slots: Slots, found: torch.Tensor, step: Step, cache: PagedCache, heads: Location
) -> Location:
    """Location of a call of slots in the whole; ``heads`` says which heads it has."""
    request, token, position, length = found[:4, : slots.together]
    packed = Packed(token, step.q.shape[0], cache.room, step.positions, request)
    return Location(
        q_offset=position, heads=heads.heads, kv_heads=heads.kv_heads, h_offset=heads.h_offset,
        batch=cache.batch, kv_lengths=length, packed=packed,
    )  # fmt: skip


def attend_chunks(
    chunked: Chunked, found: torch.Tensor, call: Call, pages: Pages
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (tokens, heads, dim) and log-sum-exp (tokens, heads), where chunks alone are written.

    Args:
        chunked: What steps of the signature share.
        found: What :func:`found_chunks` found.
        call: With the captures and the scale of the step.
        pages: What is read.
    """
    from attndsl.backends.triton.chunks import launch_gather, launch_results, launch_rows

    slots, q = chunked.slots, pages.q
    tokens, heads, dim = q.shape
    kv_heads, width = pages.k.shape[2], pages.v.shape[3]
    room = pages.table.shape[1] * pages.k.shape[1]
    kind: Any = torch.float32 if call.wide else q.dtype
    out = q.new_empty((0 if slots.whole else tokens, heads, width), dtype=kind)
    lse = q.new_empty(out.shape[:2], dtype=torch.float32)
    beyond = chunked.beyond[_has_wide_params(call)]
    for first in range(0, slots.capacity, slots.together):
        k = pages.k.new_empty((slots.together, kv_heads, room, dim))
        v = pages.v.new_empty((slots.together, kv_heads, room, width))
        launch_gather(pages, found, first, (k, v), beyond)
        rows = q.unsqueeze(0)
        if not slots.whole:
            rows = q.new_empty((slots.together, slots.rows, heads, dim))
            launch_rows(q, found, first, rows)
        own = chunked.terms.applied(_of_slots(chunked, found, first, call, (rows, k, v)))
        results, sums = chunked.backend.forward(chunked.terms.lowered, own)
        results = results.transpose(1, 2).contiguous()
        if slots.whole:
            return results[0], public_lse(sums)[0].t().contiguous()
        launch_results((results, public_lse(sums)), found, first, (out, lse))
    return out, lse


def _of_slots(
    chunked: Chunked, found: torch.Tensor, first: int, call: Call, operands: tuple[Any, ...]
) -> Call:
    """The call of some slots, before it is put into their terms."""
    request, token, position, length = found[:4, first : first + chunked.slots.together]
    part, given = chunked.call.part, call.part
    assert part is not None
    assert part.packed is not None
    positions = None if given is None or given.packed is None else given.packed.positions
    packed = part.packed._replace(starts=token, positions=positions, requests=request)
    q, k, v = operands
    return chunked.call._replace(
        q=rows_contiguous(q.transpose(1, 2)), k=k, v=v, scale=call.scale, tensors=call.tensors,
        params=call.params, q_offset=position,
        part=replace(part, kv_lengths=length, packed=packed),
    )  # fmt: skip
