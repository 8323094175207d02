"""Packed requests: where their queries lie, and their keys in pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Packed(NamedTuple):
    """Layout of packed requests' queries: a call's rows are theirs, with room for more."""

    starts: torch.Tensor
    """(B,) int: the token that is each request's row 0."""
    tokens: int
    """Number of tokens, those of no request included."""
    room: int
    """The most keys of a request: the value of ``q_len`` and ``kv_len`` in the dims of tensors."""
    positions: torch.Tensor | None
    """(tokens,) int: logical positions, where they are not the request's last ones."""
    requests: torch.Tensor | None = None
    """(B,) int: the request of each batch entry, where only the device knows. Of such an entry the
    mask leaves out the rows that stand for no query."""


class Pages(NamedTuple):
    """Packed queries, and keys and values in pages: see :class:`attndsl.PagedCache`."""

    q: torch.Tensor
    """(tokens, Hq, D)."""
    starts: torch.Tensor
    """(batch + 1,)."""
    k: torch.Tensor
    """(pages, size, Hkv, D)."""
    v: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None
    made: tuple[tuple[str, str], ...] = ()
    """Captures of the call that follow from ``starts`` and ``lengths``, by name, and which field of
    :class:`Requests` each of them is. Their values in the call may be those of another step."""


class ChunkResults(NamedTuple):
    """Results of a step's requests with many queries: nothing else of these tensors is written."""

    out: torch.Tensor
    """(tokens, Hq, Dv), contiguous."""
    lse: torch.Tensor
    """(tokens, Hq), contiguous."""
    most: int
    """Queries of such a request. It has more than the call of all others has rows."""


class Requests(NamedTuple):
    """Ints of a step's requests that programs read: (batch,) each."""

    first_query: torch.Tensor
    """Position of the first query, as if all of a request's queries were its last positions."""
    first_token: torch.Tensor
    length: torch.Tensor
    """Number of keys."""


def requests_of(starts: torch.Tensor, lengths: torch.Tensor, tokens: int, room: int) -> Requests:
    """The requests of a step. Values that nobody has looked at are cut to what can be.

    Args:
        starts: (batch + 1,) ints.
        lengths: (batch,) ints.
        tokens: Rows of q.
        room: The most keys of a request.
    """
    length = lengths.long().clamp(0, room)
    starts = starts.long().clamp(0, tokens)
    return Requests(length - starts.diff(), starts[:-1], length)
