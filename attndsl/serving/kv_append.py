"""New keys and values written into pages, in the pages' dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from attndsl.call.dispatch import get_backend
from attndsl.errors import BackendError

if TYPE_CHECKING:
    from .paged import PagedCache

FP8 = torch.float8_e4m3fn
Scale = float | torch.Tensor | None
MOST = 448.0
"""The largest number of :data:`FP8`."""
AUTO = "auto"
BY_KERNEL = "decode"
"""Backends of :func:`append`. The kernel has to be asked for: it is not measured yet."""


class Places(NamedTuple):
    """Pages and rows in which the tokens of a step lie.

    A token that has no place stands for the first one that has, so that sizes tell no values.
    """

    token: torch.Tensor
    """(tokens,), int64: the tokens whose rows are written."""
    page: torch.Tensor
    row: torch.Tensor
    exist: torch.Tensor
    """0-d bool: True if any token has a place."""


def append(
    cache: PagedCache, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, backend: str
) -> None:
    """See :meth:`.paged.PagedCache.append`.

    Raises:
        BackendError: The kernel does not run there.
    """
    if not k.shape[0] * cache.room * cache.batch * cache.k_pages.shape[0]:
        return
    if backend != AUTO:
        reason = get_backend(backend).why_not(k.device)
        if reason is not None:
            raise BackendError(
                f"the kernel that appends cannot run on {k.device}: {reason}",
                hint="append by torch operations: backend='auto'",
            )
        from attndsl.backends.triton.append_launch import launch_append  # Imports Triton.

        for rows, pages, scale in ((k, cache.k_pages, cache.k_scale),
                                   (v, cache.v_pages, cache.v_scale)):  # fmt: skip
            launch_append(rows.detach(), pages, scale, (cache.table, cache.lengths, starts))
        return
    places = places_of(cache, starts, k.shape[0])
    with torch.no_grad():
        _write(k, cache.k_pages, cache.k_scale, places)
        _write(v, cache.v_pages, cache.v_scale, places)


def places_of(cache: PagedCache, starts: torch.Tensor, tokens: int) -> Places:
    """Page and row of each token; tokens without a request, or with a wrong page, have none.

    Reads no value on the host. There is a token, a request and a page at least.
    """
    starts, table = starts.long(), cache.table.long()
    token = torch.arange(tokens, device=table.device)
    b = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    exist = (token >= starts[0]) & (b < cache.batch)
    b = b.clamp(max=cache.batch - 1)
    position = cache.lengths.long()[b] - starts[b + 1] + token
    exist = exist & (position >= 0) & (position < cache.room)
    position = position.clamp(0, cache.room - 1)
    page = table[b, position // cache.page_size]
    pages = cache.k_pages.shape[0]
    exist = exist & (page >= 0) & (page < pages)
    token = torch.where(exist, token, exist.int().argmax())
    page, row = page.clamp(0, pages - 1)[token], (position % cache.page_size)[token]
    return Places(token, page, row, exist.any())


def _write(rows: torch.Tensor, pages: torch.Tensor, scale: Scale, places: Places) -> None:
    new = rows[places.token]
    if pages.dtype is not FP8:
        _put(new.to(pages.dtype), pages, places)
        return
    new = new.float()
    factor: float | torch.Tensor = 1.0
    if isinstance(scale, torch.Tensor) and scale.dim() == 3:
        # A quotient of the largest number is that number, so that nothing is cut off.
        own = new.abs().amax(-1) / MOST
        # Numbers so small that their quotient is 0 become zeros.
        own = torch.where(own > 0, own, 1.0)
        _put(own, scale, places)
        factor = own.unsqueeze(-1)
    elif isinstance(scale, torch.Tensor):
        factor = scale.unsqueeze(-1)
    elif scale is not None:
        factor = scale
    stored = (new / factor).clamp(-MOST, MOST).to(FP8)
    _put(stored.view(torch.uint8), pages.view(torch.uint8), places)


def _put(new: torch.Tensor, pool: torch.Tensor, places: Places) -> None:
    """Write rows to their places; what was there stays where no token has one."""
    at = (places.page, places.row)
    pool[at] = torch.where(places.exist, new, pool[at])
