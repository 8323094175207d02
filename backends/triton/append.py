"""New rows written into pages: a kernel that finds each token's place by itself.

No value is read on the host, so that a step can be a part of a graph. It depends on no program: it
is plain Triton and not generated.

Non-goals: checks of arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ..kernels.device import on_device

if TYPE_CHECKING:
    import torch

_MOST = 448.0
_BLOCK_BATCH = 128
_NONE, _ONE, _HEADS, _POSITIONS = range(4)


@triton.jit
def attention_append(
    ROWS, PAGES, SCALE, TABLE, LENGTHS, STARTS,
    stride_rt, stride_rh, stride_rd, stride_pp, stride_pn, stride_ph, stride_sp, stride_sn,
    stride_sh, stride_tb, stride_tp, stride_l, stride_s, scale, batch, columns, pages,
    SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_B: tl.constexpr,
    SCALES: tl.constexpr, FP8: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One program: one token of one head.

    SCALES says what pages of fp8 are multiplied by: 0 by ``scale``, 1 by SCALE's one number, 2 by
    one for each head, 3 by one for each position and head, which is written here.
    """
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1)
    # The request is the first one that ends behind the token.
    b = 0
    for first in range(0, batch, BLOCK_B):
        numbers = first + tl.arange(0, BLOCK_B)
        ends = tl.load(STARTS + (numbers + 1) * stride_s, mask=numbers < batch, other=0)
        b += tl.sum(((ends <= token) & (numbers < batch)).to(tl.int32), 0)
    exists = (b < batch) & (token >= tl.load(STARTS).to(tl.int64))
    b = tl.minimum(b, batch - 1)
    end = tl.load(STARTS + (b + 1) * stride_s).to(tl.int64)
    position = tl.load(LENGTHS + b * stride_l).to(tl.int64) - end + token
    exists = exists & (position >= 0) & (position < columns.to(tl.int64) * SIZE)
    position = tl.where(exists, position, 0)
    at = TABLE + b.to(tl.int64) * stride_tb + position // SIZE * stride_tp
    page = tl.load(at, mask=exists, other=0).to(tl.int64)
    exists = exists & (page >= 0) & (page < pages)
    if exists:
        row = position % SIZE
        dims = tl.arange(0, BLOCK_D)
        own = ROWS + token * stride_rt + h.to(tl.int64) * stride_rh + dims * stride_rd
        values = tl.load(own, mask=dims < D, other=0.0)
        if FP8:
            values = values.to(tl.float32)
            factor = scale
            if SCALES == 3:
                largest = tl.max(tl.abs(values), 0)
                factor = tl.where(largest > 0, largest / MOST, 1.0)
                there = SCALE + page * stride_sp + row * stride_sn + h * stride_sh
                tl.store(there, factor)
            if SCALES == 2:
                factor = tl.load(SCALE + h * stride_sh)
            if SCALES == 1:
                factor = tl.load(SCALE)
            values = tl.div_rn(values, tl.zeros([BLOCK_D], tl.float32) + factor)
            values = tl.clamp(values, -MOST, MOST, tl.PropagateNan.ALL)
        there = PAGES + page * stride_pp + row * stride_pn + h.to(tl.int64) * stride_ph
        tl.store(there + dims, values.to(PAGES.dtype.element_ty), mask=dims < D)


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
    kind, number, strides = _NONE, 1.0, (0, 0, 0)
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
