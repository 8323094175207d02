"""New keys and values written into pages, in the pages' dtype.

Non-goals: checks (:mod:`.paged`), and which pages a request has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from .paged import PagedCache

FP8 = torch.float8_e4m3fn
Scale = float | torch.Tensor | None
MOST = 448.0
"""The largest number of :data:`FP8`."""


class Places(NamedTuple):
    """Where the tokens of a step lie in pages."""

    token: torch.Tensor
    """int64: those that have a place."""
    page: torch.Tensor
    row: torch.Tensor


def append(cache: PagedCache, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> None:
    """See :meth:`.paged.PagedCache.append`."""
    if cache.k_pages.device.type != "cpu":
        from attndsl.backends.triton.append import launch_append  # Imports Triton.

        for rows, pages, scale in ((k, cache.k_pages, cache.k_scale),
                                   (v, cache.v_pages, cache.v_scale)):  # fmt: skip
            launch_append(rows.detach(), pages, scale, (cache.table, cache.lengths, starts))
        return
    places = places_of(cache, starts, k.shape[0])
    with torch.no_grad():
        _write(k, cache.k_pages, cache.k_scale, places)
        _write(v, cache.v_pages, cache.v_scale, places)


def places_of(cache: PagedCache, starts: torch.Tensor, tokens: int) -> Places:
    """Where each token lies; tokens without a request, or with a wrong page, have no place."""
    starts, table = starts.long(), cache.table.long()
    token = torch.arange(tokens, device=table.device)
    b = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    exist = (token >= starts[0]) & (b < cache.batch)
    token, b = token[exist], b[exist]
    position = cache.lengths.long()[b] - starts[b + 1] + token
    exist = (position >= 0) & (position < cache.room)
    token, b, position = token[exist], b[exist], position[exist]
    page = table[b, position // cache.page_size]
    exist = (page >= 0) & (page < cache.k_pages.shape[0])
    return Places(token[exist], page[exist], (position % cache.page_size)[exist])


def _write(rows: torch.Tensor, pages: torch.Tensor, scale: Scale, places: Places) -> None:
    new = rows[places.token]
    at = (places.page, places.row)
    if pages.dtype is not FP8:
        pages[at] = new.to(pages.dtype)
        return
    new = new.float()
    factor: float | torch.Tensor = 1.0
    if isinstance(scale, torch.Tensor) and scale.dim() == 3:
        # A quotient of the largest number is that number, so that nothing is cut off.
        largest = new.abs().amax(-1)
        own = torch.where(largest > 0, largest / MOST, 1.0)
        scale[at] = own
        factor = own.unsqueeze(-1)
    elif isinstance(scale, torch.Tensor):
        factor = scale.unsqueeze(-1)
    elif scale is not None:
        factor = scale
    pages[at] = (new / factor).clamp(-MOST, MOST).to(FP8)
