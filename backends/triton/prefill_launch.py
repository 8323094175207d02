"""Launches of the kernels that make dense calls of requests with many queries.

No value is read on the host, so that a step can be a part of a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from ..device.chunks import find_chunks, gather_chunk_keys, move_chunk_rows
from ..kernels.device import on_device

if TYPE_CHECKING:
    import torch

    from ..paged_requests import Pages

_REQUESTS_AT_ONCE = 256
_KEYS_AT_ONCE = 64
_ROWS_AT_ONCE = 32
_PADDING = 256
"""Rows of zeros behind keys end at multiples of this: of the keys of any family's tile."""
_ALL = 1 << 30
"""The same where a call may read all rows: more than there are."""


def launch_find(
    starts: torch.Tensor, lengths: torch.Tensor, found: torch.Tensor, whole: bool,
    numbers: tuple[int, int, int, int],
) -> None:  # fmt: skip
    """Fill ``found`` (5, slots), int32; see ``find_chunks``.

    Args:
        starts: (batch + 1,) ints.
        lengths: (batch,) ints.
        found: What is written.
        whole: Whether rows are tokens.
        numbers: Tokens, room of a request, and the least and the most queries of one.
    """
    with on_device(starts.device):
        find_chunks[1,](
            starts, lengths, found, starts.stride(0), lengths.stride(0), lengths.shape[0],
            *numbers, found.shape[1], WHOLE=whole, BLOCK=_REQUESTS_AT_ONCE,
        )  # fmt: skip


def launch_gather(
    pages: Pages, found: torch.Tensor, first_slot: int, copies: tuple[torch.Tensor, torch.Tensor],
    beyond: bool,
) -> None:  # fmt: skip
    """Copy the keys and values of some slots.

    Args:
        pages: Where they lie.
        found: Which requests have the slots; see :func:`launch_find`.
        first_slot: The first of those slots.
        copies: Where keys and values are put, (slots, Hkv, room, dim) each.
        beyond: Whether all of that is read, so that zeros are behind the keys up to its end.
    """
    k, v = copies
    slots, kv_heads, room, dim = k.shape
    width = v.shape[3]
    grid = (-(-room // _KEYS_AT_ONCE), kv_heads, slots)
    with on_device(k.device):
        gather_chunk_keys[grid](
            pages.k, pages.v, k, v, pages.table, found, *pages.k.stride()[:3],
            *pages.v.stride()[:3], *pages.table.stride(), first_slot, found.shape[1],
            pages.k.shape[0], room, kv_heads, PAGE=pages.k.shape[1], D=dim, DV=width,
            BLOCK_D=triton.next_power_of_2(dim), BLOCK_DV=triton.next_power_of_2(width),
            BLOCK=_KEYS_AT_ONCE, PADDING=_ALL if beyond else _PADDING,
        )  # fmt: skip


def launch_rows(q: torch.Tensor, found: torch.Tensor, first_slot: int, rows: torch.Tensor) -> None:
    """Copy packed queries (tokens, heads, dim) to ``rows`` (slots, rows, heads, dim)."""
    _move(q, rows, (q, q), found, first_slot, False)


def launch_results(
    results: tuple[torch.Tensor, torch.Tensor], found: torch.Tensor, first_slot: int,
    packed: tuple[torch.Tensor, torch.Tensor],
) -> None:  # fmt: skip
    """Copy outputs (slots, rows, heads, dim) and log-sum-exps (slots, heads, rows) to tokens."""
    _move(packed[0], results[0], (packed[1], results[1]), found, first_slot, True)


def _move(
    packed: torch.Tensor, padded: torch.Tensor, lse: tuple[torch.Tensor, torch.Tensor],
    found: torch.Tensor, first_slot: int, to_packed: bool,
) -> None:  # fmt: skip
    slots, rows, heads, dim = padded.shape
    with on_device(packed.device):
        move_chunk_rows[-(-rows // _ROWS_AT_ONCE), heads, slots](
            packed, padded, *lse, found, *packed.stride()[:2], heads, rows, packed.shape[0],
            first_slot, found.shape[1], D=dim, BLOCK_D=triton.next_power_of_2(dim),
            BLOCK=_ROWS_AT_ONCE, TO_PACKED=to_packed,
        )  # fmt: skip
