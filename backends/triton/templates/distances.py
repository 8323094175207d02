"""Sums of dS along diagonals. Follows ``tile_gradients.py`` in one module."""
# ruff: noqa: F821

import triton
import triton.language as tl

from attndsl.backends.triton.library import statistics_rows

#: begin


@triton.jit
def distances(
    Q, K, V, DOUT, LSE, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    #: parameters
    DISTANCE_SUMS,
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
    sum0 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for tile in range(tl.maximum(ahead, 0), tl.minimum(q_tiles, kv_tiles + ahead)):
        first = tile * BLOCK_M
        kv_first = (tile - ahead) * BLOCK_N
        if tile_lives(
            first, kv_first, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
            #: arguments
            BLOCK_M, BLOCK_N, Q_KIND, KV_KIND,
        ):
            (sum0,) = add_tile(
                sum0,
                first, kv_first, q_head, k_head, v_head, dout_head, lse_head, delta_head,
                stride_qm, stride_kn, stride_vn, stride_gm,
                scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
                #: arguments
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, Q_KIND, KV_KIND, PRECISION, UPCAST,
            )
    row = tl.arange(0, BLOCK_M)[:, None]
    place = tl.arange(0, 2 * BLOCK_M)[None, :]
    column = row - place + (BLOCK_N - 1)
    inside = (column >= 0) & (column < BLOCK_N)
    skewed = tl.gather(sum0, tl.where(inside, column, 0), 1)
    sums = tl.sum(tl.where(inside, skewed, 0.0), 0)
    tl.store(DISTANCE_SUMS + tl.program_id(0).to(tl.int64) * (2 * BLOCK_M) + tl.arange(0, 2 * BLOCK_M), sums)
