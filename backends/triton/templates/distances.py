"""Sums of dS along diagonals. Follows ``tile_gradients.py`` in one module."""
# ruff: noqa: F821

import triton
import triton.language as tl

from attndsl.backends.triton.library import positions, statistics_rows

#: begin


@triton.jit
def diagonal_lives(
    q, kv, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
    #: parameters
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Whether some, and whether all pairs take part that have the distances of a tile."""
    live = tl.full([BLOCK_M, BLOCK_N], 1, tl.int1)
    if MASKED:
        live = live & mask_of_pair(
            tl.zeros([BLOCK_M, BLOCK_N], tl.float32), live,
            b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
    counted = tl.sum(tl.sum(live.to(tl.int32), 1), 0)
    return counted > 0, counted == BLOCK_M * BLOCK_N


@triton.jit
def add_at(
    sum0, tile, ahead, q, kv, q_head, k_head, v_head, dout_head, lse_head, delta_head,
    stride_qm, stride_kn, stride_vn, stride_gm,
    scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    #: parameters
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, Q_KIND: tl.constexpr, KV_KIND: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, PARTIAL: tl.constexpr,
):
    """The sum with what a tile of the diagonal adds; ``q`` and ``kv`` are of the first one."""
    first = tile * BLOCK_M
    kv_first = first - ahead * BLOCK_N
    if not ALL_MEETS_DISTANCES:
        q = positions(first + tl.arange(0, BLOCK_M), q_len, q_origin, Q_KIND)[:, None]
        kv = positions(kv_first + tl.arange(0, BLOCK_N), kv_len, kv_origin, KV_KIND)[None, :]
    return add_tile(
        sum0, first, kv_first, q, kv, q_head, k_head, v_head, dout_head, lse_head, delta_head,
        stride_qm, stride_kn, stride_vn, stride_gm,
        scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
        #: arguments
        D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, UPCAST, PARTIAL,
    )


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

    So they can be added up as they are; only their sum is summed along its own diagonals. BLOCK_M
    is a multiple of BLOCK_N, and a step along the diagonal is BLOCK_M queries and keys.
    DISTANCE_SUMS (batch * heads, diagonals of tiles, BLOCK_M + BLOCK_N) are of q - kv from
    1 - BLOCK_N on, relative to the diagonal's first pair; the last is not used. LSE (batch * heads,
    q_len) is in base e, DELTA padded as ``statistics_rows`` says.
    """
    RATIO: tl.constexpr = BLOCK_M // BLOCK_N
    q_tiles = tl.cdiv(q_len, BLOCK_M)
    kv_tiles = tl.cdiv(kv_len, BLOCK_N)
    diagonals = RATIO * (q_tiles - 1) + kv_tiles
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
    begin = tl.cdiv(tl.maximum(ahead, 0), RATIO)
    end = tl.minimum(q_tiles, tl.cdiv(kv_tiles + ahead, RATIO))
    # Of the first tile: where positions matter by their distance alone, of all tiles.
    q = positions(begin * BLOCK_M + tl.arange(0, BLOCK_M), q_len, q_origin, Q_KIND)[:, None]
    kv_first = begin * BLOCK_M - ahead * BLOCK_N
    kv = positions(kv_first + tl.arange(0, BLOCK_N), kv_len, kv_origin, KV_KIND)[None, :]
    sum0 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if MASK_MEETS_DISTANCES:
        # Loops without branches, whose loads Triton can have run ahead.
        some, every = diagonal_lives(
            q, kv, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
            BLOCK_M, BLOCK_N,
        )
        last = (end - 1) * BLOCK_M
        inside = (last + BLOCK_M <= q_len) & (last - (ahead - 1) * BLOCK_N <= kv_len)
        end = tl.where(some, end, begin)
        # Where tiles are oblong some diagonals have none; the one before begins before all keys, and
        # so counts as inside.
        middle = tl.where(every, tl.where(inside, end, end - 1), begin)
        for tile in tl.range(begin, middle):
            (sum0,) = add_at(
                sum0, tile, ahead, q, kv, q_head, k_head, v_head, dout_head, lse_head, delta_head,
                stride_qm, stride_kn, stride_vn, stride_gm,
                scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
                #: arguments
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, Q_KIND, KV_KIND, PRECISION, UPCAST,
                False,
            )
        for tile in tl.range(middle, end):
            (sum0,) = add_at(
                sum0, tile, ahead, q, kv, q_head, k_head, v_head, dout_head, lse_head, delta_head,
                stride_qm, stride_kn, stride_vn, stride_gm,
                scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
                #: arguments
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, Q_KIND, KV_KIND, PRECISION, UPCAST,
                True,
            )
    else:
        for tile in tl.range(begin, end):
            some, every = lives_of_tile(
                tile * BLOCK_M, tile * BLOCK_M - ahead * BLOCK_N,
                b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
                #: arguments
                BLOCK_M, BLOCK_N, Q_KIND, KV_KIND,
            )
            if some:
                (sum0,) = add_at(
                    sum0, tile, ahead, q, kv,
                    q_head, k_head, v_head, dout_head, lse_head, delta_head,
                    stride_qm, stride_kn, stride_vn, stride_gm,
                    scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
                    #: arguments
                    D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, Q_KIND, KV_KIND, PRECISION, UPCAST,
                    True,
                )
    row = tl.arange(0, BLOCK_M)[:, None]
    place = tl.arange(0, 2 * BLOCK_M)
    column = row - place[None, :] + (BLOCK_N - 1)
    inside = (column >= 0) & (column < BLOCK_N)
    skewed = tl.gather(sum0, tl.where(inside, column, 0), 1)
    sums = tl.sum(tl.where(inside, skewed, 0.0), 0)
    places = tl.program_id(0).to(tl.int64) * (BLOCK_M + BLOCK_N) + place
    tl.store(DISTANCE_SUMS + places, sums, mask=place < BLOCK_M + BLOCK_N)
