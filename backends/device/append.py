"""New rows written into pages: a kernel that finds each token's place by itself.

It depends on no program, so that its text is the same for all and lies here.
"""

import triton
import triton.language as tl


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
                factor = largest / MOST
                # Numbers so small that their quotient is 0 become zeros.
                factor = tl.where(factor > 0, factor, 1.0)
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
