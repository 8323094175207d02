"""What a tile of pairs adds to sums. Follows ``weights.py`` in one module, its kernel follows."""
# ruff: noqa: F821

import triton
import triton.language as tl

from attndsl.backends.triton.dropout import keep_factor, kept_pairs
from attndsl.backends.triton.library import (
    dot, load_tile, positions, statistics_rows,
)

#: begin


@triton.jit
def add_pairs(
    #: sums
    q_tile, k_tile, dout_tile, v_tile, lse2, delta, first, kv_first, rows_ok, columns_ok, q, kv,
    scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
    #: parameters
    #: sum_parameters
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, PARTIAL: tl.constexpr,
):
    """The sums with what these pairs add."""
    # Both before what takes either, so that the second runs meanwhile.
    score = dot(q_tile, tl.trans(k_tile), PRECISION, UPCAST)
    dweight = dot(dout_tile, tl.trans(v_tile), PRECISION, UPCAST)
    weight, slope, live, raw, final = weights_of_tile(
        score, rows_ok, columns_ok, lse2[:, None],
        q, kv, scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
        #: arguments
        PARTIAL,
    )
    if HAS_DROPOUT:
        p = drop_probability(
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        stays = kept_pairs(first, kv_first, p, b * heads + h, seed, q_tile.shape[0], k_tile.shape[0])
        keep = keep_factor(stays, p)
        dweight = dweight * keep
    if LEARNS_WEIGHT:
        (
            #: sums
        ) = add_weight_gradients(
            #: sums
            tl.where(live, dweight, 0.0), final, live,
            b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
            #: sum_parameters
        )
    if not OWN_WEIGHTS:
        dweight = dweight - delta[:, None]
    if LEARNS_SCORE:
        (
            #: sums
        ) = add_score_gradients(
            #: sums
            tl.where(live, slope * dweight, 0.0), raw, live,
            b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
            #: sum_parameters
        )
    return (
        #: sums
    )


@triton.jit
def lives_of_tile(
    first, kv_first,
    b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    #: parameters
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, Q_KIND: tl.constexpr, KV_KIND: tl.constexpr,
):
    """Whether some and whether all pairs take part, from query ``first`` and key ``kv_first`` on."""
    rows = first + tl.arange(0, BLOCK_M)
    columns = kv_first + tl.arange(0, BLOCK_N)
    live = (rows < q_len)[:, None] & (columns < kv_len)[None, :]
    if MASKED and not MASK_READS_SCORE:
        q = positions(rows, q_len, q_origin, Q_KIND)[:, None]
        kv = positions(columns, kv_len, kv_origin, KV_KIND)[None, :]
        live = live & mask_of_pair(
            tl.zeros([BLOCK_M, BLOCK_N], tl.float32), live,
            b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
    counted = tl.sum(tl.sum(live.to(tl.int32), 1), 0)
    every = counted == BLOCK_M * BLOCK_N
    if MASK_READS_SCORE:
        every = every & False
    return counted > 0, every


@triton.jit
def add_tile(
    #: sums
    first, kv_first, q, kv, q_head, k_head, v_head, dout_head, lse_head, delta_head,
    stride_qm, stride_kn, stride_vn, stride_gm,
    scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
    #: parameters
    #: sum_parameters
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, PARTIAL: tl.constexpr,
):
    """The sums with what the tile from query ``first`` and key ``kv_first`` on adds.

    ``q`` and ``kv`` are logical positions. ``lse_head`` is in base e. PARTIAL: the tile reaches
    beyond the lengths, or has dead pairs.
    """
    # Triton's interpreter counts loops in numbers of Python.
    first = first + tl.full([], 0, tl.int32)
    kv_first = kv_first + tl.full([], 0, tl.int32)
    rows = first + tl.arange(0, BLOCK_M)
    columns = kv_first + tl.arange(0, BLOCK_N)
    q_tile = load_tile(q_head, first, stride_qm, q_len, D, BLOCK_M, BLOCK_D, PARTIAL)
    k_tile = load_tile(k_head, kv_first, stride_kn, kv_len, D, BLOCK_N, BLOCK_D, PARTIAL)
    v_tile = load_tile(v_head, kv_first, stride_vn, kv_len, DV, BLOCK_N, BLOCK_DV, PARTIAL)
    dout_tile = load_tile(dout_head, first, stride_gm, q_len, DV, BLOCK_M, BLOCK_DV, PARTIAL)
    # A masked load with another value than zero cannot be asynchronous.
    lse = tl.load(lse_head + rows, mask=rows < q_len, other=0.0)
    # Rows with no live pair have weights of 0.
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    delta = tl.load(delta_head + rows, mask=rows < q_len, other=0.0)
    (
        #: sums
    ) = add_pairs(
        #: sums
        q_tile, k_tile, dout_tile, v_tile, lse2, delta, first, kv_first,
        (rows < q_len)[:, None], (columns < kv_len)[None, :],
        q, kv, scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
        #: arguments
        #: sum_parameters
        PRECISION, UPCAST, PARTIAL,
    )
    return (
        #: sums
    )
