"""Kernels around the backward kernel: row statistics and empty sums before, dQ after.

Kernels of plain Triton, bound by memory. The sums of dQ are (batch * heads, padded query rows, D)
in fp32, within 64 rows in the order of ``library.add_to_sums``.
"""

import triton
import triton.language as tl

from ..device.library import STATISTICS_PADDING, row_statistics
from ..device.records import Tensor

_ROWS_OF_BLOCK = tl.constexpr(64)
_HEADS_AT_ONCE = tl.constexpr(4)
SUM_BLOCK = 1024
"""Elements that a program of ``sum_of_heads`` adds up."""


@triton.jit
def prepare_backward(
    OUT, DOUT, LSE, DLSE, LSE_SHIFT, LSE_REST, DELTA, SUMS,
    stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm, heads, q_len,
    DV: tl.constexpr, ROWS: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_DLSE: tl.constexpr,
    WIDTH: tl.constexpr, FAR: tl.constexpr,
):  # fmt: skip
    """Row statistics (see ``row_statistics``), and zeros in the rows' sums of dQ.

    One program: ROWS rows of one head, of the padded length; WIDTH columns of sums.
    """
    first = tl.program_id(0).to(tl.int64) * (ROWS * WIDTH)
    for part in tl.static_range(0, WIDTH // 64):
        places = part * (ROWS * 64) + tl.arange(0, ROWS * 64)
        tl.store(SUMS + first + places, tl.zeros([ROWS * 64], tl.float32))
    row_statistics(
        OUT, DOUT, LSE, DLSE, LSE_SHIFT, LSE_REST, DELTA,
        stride_ob, stride_oh, stride_om, stride_gb, stride_gh, stride_gm, heads, q_len,
        DV, ROWS, BLOCK_DV, HAS_DLSE, FAR,
    )  # fmt: skip


@triton.jit
def add_heads(PARTS, out, head, kv_heads, place, kv_len, group, WIDTH: tl.constexpr):
    """Store elements ``place`` of a kv head in ``out``: sums of those of its query heads."""
    BLOCK: tl.constexpr = place.shape[0]
    inside = place < kv_len * WIDTH
    numbers = tl.arange(0, _HEADS_AT_ONCE)[:, None]
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, group, _HEADS_AT_ONCE):
        member = first + numbers
        of_heads = PARTS + (head * group + member).to(tl.int64) * kv_len * WIDTH
        exist = (member < group) & inside[None, :]
        total += tl.sum(tl.load(of_heads + place[None, :], mask=exist, other=0.0), 0)
    own = out.base + (head // kv_heads * out.stride_b + head % kv_heads * out.stride_h) * WIDTH
    row = (place // WIDTH).to(tl.int64) * out.stride_n
    tl.store(own + row * WIDTH + place % WIDTH, total.to(out.base.dtype.element_ty), mask=inside)


@triton.jit
def sum_of_heads(
    DK, DV_OUT, DK_SUM, DV_SUM, rows_dkb, rows_dkh, rows_dkn, rows_dvb, rows_dvh, rows_dvn,
    kv_heads, kv_len, group,
    D: tl.constexpr, DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """DK_SUM and DV_SUM, their rows ``rows_*`` apart: gradients of keys, of all heads of a kv head.

    DK is (batch, heads, kv_len, D) in fp32, DV_OUT likewise. One program: BLOCK elements of one kv
    head's DK_SUM or DV_SUM.
    """
    blocks_of_dk = tl.cdiv(kv_len * D, BLOCK)
    blocks = blocks_of_dk + tl.cdiv(kv_len * DV, BLOCK)
    head = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    numbers = tl.arange(0, BLOCK)
    if block < blocks_of_dk:
        out = Tensor(DK_SUM, rows_dkb, rows_dkh, rows_dkn)
        add_heads(DK, out, head, kv_heads, block * BLOCK + numbers, kv_len, group, D)
    else:
        out = Tensor(DV_SUM, rows_dvb, rows_dvh, rows_dvn)
        place = (block - blocks_of_dk) * BLOCK + numbers
        add_heads(DV_OUT, out, head, kv_heads, place, kv_len, group, DV)


@triton.jit
def dq_from_sums(
    SUMS, DQ, LSE_REST, scale, rows_dqb, rows_dqh, rows_dqm, heads, q_len,
    D: tl.constexpr, WIDTH: tl.constexpr, CHECKS: tl.constexpr,
):  # fmt: skip
    """DQ (batch, heads, q_len, D), its rows ``rows_dq*`` apart: the sums times ``scale``.

    One program: 64 rows of one head, half of the WIDTH columns of sums. With CHECKS its number of
    the rests, which nobody reads any more, is NaN if a sum is not finite, or 0.
    """
    q_blocks = tl.cdiv(q_len, STATISTICS_PADDING) * (STATISTICS_PADDING // _ROWS_OF_BLOCK)
    HALF: tl.constexpr = WIDTH // 2
    part = tl.program_id(0) % 2
    block = tl.program_id(0) // 2
    head = block // q_blocks
    first = (block % q_blocks) * _ROWS_OF_BLOCK
    sums = SUMS + tl.program_id(0).to(tl.int64) * (_ROWS_OF_BLOCK * HALF)
    held = tl.load(sums + tl.arange(0, _ROWS_OF_BLOCK * HALF))
    # Eight columns, warp, row of eight, pair of columns, half of the warp's rows, column of a pair.
    parts = tl.permute(tl.reshape(held, [HALF // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    tile = tl.reshape(parts, [_ROWS_OF_BLOCK, HALF]) * scale
    rows = first + tl.arange(0, _ROWS_OF_BLOCK)
    columns = part * HALF + tl.arange(0, HALF)
    inside = (rows < q_len)[:, None] & (columns < D)[None, :]
    own = DQ + (head // heads * rows_dqb + head % heads * rows_dqh).to(tl.int64) * D
    places = rows.to(tl.int64)[:, None] * (rows_dqm * D) + columns[None, :]
    tl.store(own + places, tile.to(DQ.dtype.element_ty), mask=inside)
    if CHECKS:
        tl.store(LSE_REST + tl.program_id(0), tl.sum(held * 0.0, 0))
