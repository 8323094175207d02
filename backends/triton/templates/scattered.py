"""Sums that any pairs may meet in, exact ones. Follows ``tile_gradients.py`` in one module."""
# ruff: noqa: F821

import triton
import triton.language as tl

from attndsl.backends.triton.library import positions, raise_bound, statistics_rows

#: begin


@triton.jit
def scattered(
    Q, K, V, DOUT, LSE, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    #: parameters
    #: sum_parameters
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, Q_KIND: tl.constexpr, KV_KIND: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """One program: one query tile of one head.

    It either finds the greatest of its rows' sums of sizes (``scattered.py`` in the package of
    kernels says what for), or adds to integers. LSE (batch * heads, q_len) is in base e, DELTA
    padded as ``statistics_rows`` says.
    """
    q_tiles = tl.cdiv(q_len, BLOCK_M)
    first = (tl.program_id(0) % q_tiles) * BLOCK_M
    head_of_batch = tl.program_id(0) // q_tiles
    b = head_of_batch // heads
    h = head_of_batch % heads
    hkv = h // (heads // kv_heads)
    q_head = Q + b * stride_qb + h * stride_qh
    k_head = K + b * stride_kb + hkv * stride_kh
    v_head = V + b * stride_vb + hkv * stride_vh
    dout_head = DOUT + b * stride_gb + h * stride_gh
    lse_head = LSE + head_of_batch.to(tl.int64) * q_len
    delta_head = DELTA + statistics_rows(head_of_batch, q_len)
    q = positions(first + tl.arange(0, BLOCK_M), q_len, q_origin, Q_KIND)[:, None]
    #: begin_sums
    for tile in range(0, tl.cdiv(kv_len, BLOCK_N)):
        kv_first = tile * BLOCK_N
        some, every = lives_of_tile(
            first, kv_first, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
            #: arguments
            BLOCK_M, BLOCK_N, Q_KIND, KV_KIND,
        )
        if some:
            kv = positions(kv_first + tl.arange(0, BLOCK_N), kv_len, kv_origin, KV_KIND)[None, :]
            (
                #: sums
            ) = add_tile(
                #: sums
                first, kv_first, q, kv, q_head, k_head, v_head, dout_head, lse_head, delta_head,
                stride_qm, stride_kn, stride_vn, stride_gm,
                scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
                #: arguments
                #: sum_parameters
                D, DV, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, PRECISION, UPCAST, True,
            )
    #: end_sums
