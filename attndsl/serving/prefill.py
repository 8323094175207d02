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

from attndsl.backends.base import NONE, Signature
from attndsl.backends.log_sum import public_lse
from attndsl.backends.memory_order import rows_contiguous
from attndsl.backends.paged_requests import ChunkResults, Packed
from attndsl.call.bind import bind
from attndsl.call.dispatch import backend_of, tell_choice
from attndsl.call.options import CallOptions
from attndsl.call.sub_calls import terms_of
from attndsl.foundation.logs import tell_once
from attndsl.ir import DType
from attndsl.passes.tiles.tile_plan import FORWARD

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Backend, Call, Scalar
    from attndsl.backends.paged_requests import Pages
    from attndsl.call.sub_calls import Terms
    from attndsl.pipeline import Lowered

    from .ragged_batch import ServeStep

    Captures = Mapping[str, torch.Tensor | Scalar]

MOST_FEW = 64
"""Queries of a request that kernels for pages run: a tile of them has no more rows."""
_FIELDS = 5
_MOST_BYTES = 1 << 28
"""The most bytes of the keys that one call copies, unless one request has more."""
_TILE = 128
"""Rows and keys of the tile for which :func:`has_formulas` plans a loop."""


class Chunked(NamedTuple):
    """Slots, backend, terms and call that the chunks of steps of one signature share."""

    capacity: int
    """The most requests of a step with many queries."""
    together: int
    """Slots of one call."""
    rows: int
    """Rows of each slot."""
    whole: bool
    """True if the rows are all tokens, as they lie: those of a single request."""
    most: int
    """The most queries of a request."""
    backend: Backend
    """Backend of dense calls."""
    terms: Terms
    call: Call
    """One of them, checked, without its captures."""
    beyond: tuple[bool, bool]
    """Result of :func:`visits_beyond`."""


def capacity_of(
    tokens: int, batch: int, most_queries: int | None, most_chunks: int | None
) -> int | None:
    """The most requests of a step with many queries; None where no request may have many."""
    if most_queries is None or most_queries <= MOST_FEW:
        return None
    capacity = min(batch, tokens // (MOST_FEW + 1))
    return capacity if most_chunks is None else min(capacity, most_chunks)


def prepared_chunks(
    lowered: Lowered, name: str, step: ServeStep, captures: Captures
) -> Chunked | None:
    """Prepare the calls of requests with many queries; None where these run as all others.

    Args:
        lowered: The program.
        name: Its name.
        step: Its inputs, with all defaults filled in.
        captures: Its captures.
    """
    q, cache, most = step.q, step.cache, step.most_queries
    tokens, dim, width = q.shape[0], q.shape[2], cache.v_pages.shape[3]
    capacity = capacity_of(tokens, cache.batch, most, step.most_chunks)
    # Scales of fp8 belong to the program's score, which kernels that read pages give it.
    if most is None or capacity is None or cache.is_fp8 or not cache.room:
        return None
    of_slot = cache.room * cache.k_pages.shape[2] * (dim + width) * q.element_size()
    together = max(1, min(capacity, _MOST_BYTES // max(1, of_slot)))
    whole = cache.batch == 1
    rows = tokens if whole else min(most, tokens)
    # Values are those of no request: a step's own are checked.
    request, token, position, length = q.new_zeros((4, together), dtype=torch.int32)
    packed = Packed(token, tokens, cache.room, step.q_index, request)
    location = step.location(position, length, packed)
    options = CallOptions(step.scale, out_dtype=step.wide)
    q_of_slots, k, v = step.stand_ins(together, rows)
    call = bind(lowered.written, (q_of_slots, k, v), captures, location, options)
    terms = terms_of(lowered, call)
    if not has_formulas(terms.lowered):
        tell_once(f"{name}: chunks are run as few queries: their tiles are in lists")
        return None
    backend, reason = backend_of(terms.lowered, "auto", q.device, False, q.dtype)
    own = terms.applied(call)
    backend.check(terms.lowered, own)
    tell_choice(name, call, backend, reason)
    call = call._replace(signature=Signature(name), tensors=NONE, params=NONE)
    beyond = visits_beyond(terms.lowered, own.tensors)
    return Chunked(capacity, together, rows, whole, most, backend, terms, call, beyond)


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


def found_chunks(
    starts: torch.Tensor, lengths: torch.Tensor, capacity: int, tokens: int, room: int, most: int
) -> torch.Tensor:
    """The requests of all slots, (5, slots) int32, found by one kernel.

    The rows are the request's number, the token of row 0, the position of row 0, the number of keys
    and that of queries. There are twice as many slots as the capacity, so that the last call of
    several slots has its own.

    Args:
        starts: (batch + 1,) ints.
        lengths: (batch,) ints.
        capacity: The most such requests, 1 or more.
        tokens: Of the step.
        room: The most keys of a request.
        most: The most queries of one.
    """
    from attndsl.backends.triton.prefill_launch import launch_find  # Imports Triton.

    found = torch.empty((_FIELDS, 2 * capacity), dtype=torch.int32, device=starts.device)
    whole = lengths.shape[0] == 1
    launch_find(starts, lengths, found, whole, (tokens, room, MOST_FEW + 1, most))
    return found


def attend_chunks(
    chunked: Chunked, call: Call, pages: Pages, found: torch.Tensor | None
) -> ChunkResults | None:
    """Results of a step's requests with many queries; None where there is no room for one.

    Args:
        chunked: What steps of the signature share.
        call: With the captures and the scale of the step.
        pages: What is read.
        found: What :func:`found_chunks` found, if a plan has asked.
    """
    from attndsl.backends.triton.prefill_launch import launch_gather, launch_results, launch_rows

    if not chunked.capacity:
        return None
    q, together = pages.q, chunked.together
    tokens, heads, dim = q.shape
    kv_heads, width = pages.k.shape[2], pages.v.shape[3]
    room = pages.table.shape[1] * pages.k.shape[1]
    if found is None:
        sizes = tokens, room, chunked.most
        found = found_chunks(pages.starts, pages.lengths, chunked.capacity, *sizes)
    kind: Any = torch.float32 if call.wide else q.dtype
    out = q.new_empty((0 if chunked.whole else tokens, heads, width), dtype=kind)
    lse = q.new_empty(out.shape[:2], dtype=torch.float32)
    beyond = chunked.beyond[_has_wide_params(call)]
    for first in range(0, chunked.capacity, together):
        k = pages.k.new_empty((together, kv_heads, room, dim))
        v = pages.v.new_empty((together, kv_heads, room, width))
        launch_gather(pages, found, first, (k, v), beyond)
        rows = q.unsqueeze(0)
        if not chunked.whole:
            rows = q.new_empty((together, chunked.rows, heads, dim))
            launch_rows(q, found, first, rows)
        own = chunked.terms.applied(_of_slots(chunked, found, first, call, (rows, k, v)))
        results, sums = chunked.backend.forward(chunked.terms.lowered, own)
        results = results.transpose(1, 2).contiguous()
        if chunked.whole:
            lse = public_lse(sums)[0].t().contiguous()
            return ChunkResults(results[0], lse, chunked.most)
        launch_results((results, public_lse(sums)), found, first, (out, lse))
    return ChunkResults(out, lse, chunked.most)


def _of_slots(
    chunked: Chunked, found: torch.Tensor, first: int, call: Call, operands: tuple[Any, ...]
) -> Call:
    """The call of some slots, before it is put into their terms."""
    request, token, position, length = found[:4, first : first + chunked.together]
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
