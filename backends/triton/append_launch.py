"""Launches of the kernel that writes new rows into pages.

No value is read on the host, so that a step can be a part of a graph.
"""

from __future__ import annotations

import torch
import triton

from attndsl.errors import BackendError

from ..device.append import attention_append
from ..kernels.device import on_device

_MOST = 448.0
_BLOCK_BATCH = 128
_NONE, _ONE, _HEADS, _POSITIONS = range(4)
_FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs whose kernels know 8-bit numbers as pages have them."""


def why_not_fp8(pages: torch.Tensor) -> str | None:
    """Reason why kernels neither read nor write such pages, or None."""
    device = pages.device
    if pages.element_size() != 1 or device.type != "cuda" or torch.version.hip is not None:
        return None
    capability = torch.cuda.get_device_capability(device)
    if capability >= _FP8_CAPABILITY:
        return None
    own, least = (".".join(map(str, x)) for x in (capability, _FP8_CAPABILITY))
    return f"kernels for pages of fp8 need compute capability {least}, and the GPU has {own}"


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

    Raises:
        BackendError: The GPU's kernels know no numbers of 8 bits.
    """
    reason = why_not_fp8(pages)
    if reason is not None:
        raise BackendError(reason, hint="append by torch operations: backend='auto'")
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
