"""Sums of dS along diagonals. Follows ``weights.py`` in one module."""
# ruff: noqa: F821

import triton
import triton.language as tl

from attndsl.backends.triton.library import (
    dot, load_tile, positions, statistics_rows,
)

#: begin


@triton.jit
def dscore_of_tile(
    q_tile, k_tile, dout_tile, v_tile, lse2, delta, rows_ok, columns_ok, q, kv,
    scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
    #: parameters
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """The gradient of the final score of a tile's pairs, 0 for those that take no part."""
    score = dot(q_tile, tl.trans(k_tile), PRECISION, UPCAST)
    weight, slope, live, raw, final = weights_of_tile(
        score, rows_ok, columns_ok, lse2[:, None],
        q, kv, scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
        #: arguments
        True,
    )
    dweight = dot(dout_tile, tl.trans(v_tile), PRECISION, UPCAST)
    return tl.where(live, weight * (dweight - delta[:, None]), 0.0)


@triton.jit
def distances(
    Q, K, V, DOUT, LSE, DELTA, DISTANCE_SUMS,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    #: parameters
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, Q_KIND: tl.constexpr, KV_KIND: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """One program: the tiles of one head along one diagonal, whose pairs lie alike in all of them.

    Tiles are square, so that they can be added up as they are; only their sum is summed along its
    own diagonals. DISTANCE_SUMS (batch * heads, diagonals of tiles, 2 * BLOCK_M) are of q - kv from
    1 - BLOCK_M on, relative to the diagonal's first pair; the last is not used. LSE (batch * heads,
    q_len) is in base e, DELTA padded as ``statistics_rows`` says.
    """
    q_tiles = tl.cdiv(q_len, BLOCK_M)
    kv_tiles = tl.cdiv(kv_len, BLOCK_N)
    diagonals = q_tiles + kv_tiles - 1
    ahead = tl.program_id(0) % diagonals - (kv_tiles - 1)
    head_of_batch = tl.program_id(0) // diagonals
    b = head_of_batch // heads
    h = head_of_batch % heads
    hkv = h // (heads // kv_heads)
    q_head = Q + b * stride_qb + h * stride_qh
    k_head = K + b * stride_kb + hkv * stride_kh
    v_head = V + b * stride_vb + hkv * stride_vh
    dout_head = DOUT + b * stride_gb + h * stride_gh
    lse_head = LSE + head_of_batch.to(tl.int64) * q_len
    delta_head = DELTA + statistics_rows(head_of_batch, q_len)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(tl.maximum(ahead, 0), tl.minimum(q_tiles, kv_tiles + ahead)):
        first = tile * BLOCK_M
        kv_first = (tile - ahead) * BLOCK_N
        rows = first + tl.arange(0, BLOCK_M)
        columns = kv_first + tl.arange(0, BLOCK_N)
        rows_ok = (rows < q_len)[:, None]
        columns_ok = (columns < kv_len)[None, :]
        q = positions(rows, q_len, q_origin, Q_KIND)[:, None]
        kv = positions(columns, kv_len, kv_origin, KV_KIND)[None, :]
        some = rows_ok & columns_ok
        if MASKED and not MASK_READS_SCORE:
            some = some & mask_of_pair(
                total, some, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
                #: arguments
            )
        if tl.max(tl.max(some.to(tl.int32), 1), 0) > 0:
            q_tile = load_tile(q_head, first, stride_qm, q_len, D, BLOCK_M, BLOCK_D, True)
            k_tile = load_tile(k_head, kv_first, stride_kn, kv_len, D, BLOCK_N, BLOCK_D, True)
            v_tile = load_tile(v_head, kv_first, stride_vn, kv_len, DV, BLOCK_N, BLOCK_DV, True)
            dout_tile = load_tile(dout_head, first, stride_gm, q_len, DV, BLOCK_M, BLOCK_DV, True)
            lse = tl.load(lse_head + rows, mask=rows < q_len, other=float("-inf"))
            # Rows with no live pair have weights of 0.
            lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            delta = tl.load(delta_head + rows, mask=rows < q_len, other=0.0)
            total += dscore_of_tile(
                q_tile, k_tile, dout_tile, v_tile, lse2, delta, rows_ok, columns_ok, q, kv,
                scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
                #: arguments
                PRECISION, UPCAST,
            )
    row = tl.arange(0, BLOCK_M)[:, None]
    place = tl.arange(0, 2 * BLOCK_M)[None, :]
    column = row - place + (BLOCK_N - 1)
    inside = (column >= 0) & (column < BLOCK_N)
    skewed = tl.gather(total, tl.where(inside, column, 0), 1)
    sums = tl.sum(tl.where(inside, skewed, 0.0), 0)
    tl.store(DISTANCE_SUMS + tl.program_id(0).to(tl.int64) * (2 * BLOCK_M) + tl.arange(0, 2 * BLOCK_M), sums)
