"""Launches of the kernel that writes new rows into pages.

No value is read on the host, so that a step can be a part of a graph.

Non-goals: checks of arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton

from ..device.append import attention_append
from ..kernels.device import on_device

if TYPE_CHECKING:
    import torch

_MOST = 448.0
_BLOCK_BATCH = 128
_NONE, _ONE, _HEADS, _POSITIONS = range(4)


def launch_append(
    rows: torch.Tensor,
    pages: torch.Tensor,
    scale: float | torch.Tensor | None,
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write ``rows`` (tokens, heads, dim) to their places in ``pages`` (pages, size, heads, dim).

    Args:
        rows: Floats, any strides.
        pages: The pool.
        scale: Of fp8 pages; see :class:`attndsl.PagedCache`.
        places: The cache's table and lengths, and the starts of requests.
    """
    table, lengths, starts = places
    tokens, heads, dim = rows.shape
    if not tokens or not table.shape[0]:
        return
    kind, number = _NONE, 1.0
    strides: tuple[int, ...] = (0, 0, 0)
    held = pages
    if not isinstance(scale, int | float | None):
        kind, held = (_ONE, _HEADS, _NONE, _POSITIONS)[scale.dim()], scale
        strides = (*[0] * (3 - scale.dim()), *scale.stride())
    elif scale is not None:
        number = float(scale)
    with on_device(rows.device):
        attention_append[tokens, heads](
            rows, pages, held, table, lengths, starts,
            *rows.stride(), *pages.stride()[:3], *strides, *table.stride(), lengths.stride(0),
            starts.stride(0), number, table.shape[0], table.shape[1], pages.shape[0],
            SIZE=pages.shape[1], D=dim, BLOCK_D=triton.next_power_of_2(dim),
            BLOCK_B=_BLOCK_BATCH, SCALES=kind, FP8=pages.dtype.itemsize == 1, MOST=_MOST,
        )  # fmt: skip
