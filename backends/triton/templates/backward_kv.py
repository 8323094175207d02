"""Backward, first pass: dK and dV of a key-value tile. Follows ``weights.py`` in one module."""
# ruff: noqa: F821

import triton
import triton.language as tl

from attndsl.backends.triton.dropout import keep_factor, kept_pairs
from attndsl.backends.triton.library import (
    dot, dot_add, load_tile, place_of_item, positions, shift_of_positions, statistics_rows,
    store_tile,
)

#: begin


@triton.jit
def add_query_tile(
    #: sums
    dk, dv, k_tile, v_tile, first_column, kv, columns_ok, q_tile_index, q_head, dout_head, LSE2, DELTA,
    stride_qm, stride_gm,
    scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin,
    #: parameters
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, Q_KIND: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, PARTIAL: tl.constexpr,
):
    """Add one query tile's part to dK (before the scale), to dV, and to columns' sums.

    Tiles are (keys, queries) here.
    """
    first = q_tile_index * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    q_tile = load_tile(q_head, first, stride_qm, q_len, D, BLOCK_M, BLOCK_D, PARTIAL or RAGGED_FULL)
    statistics = statistics_rows(b * heads + h, q_len)
    lse2 = tl.load(LSE2 + statistics + rows)
    q = positions(rows, q_len, q_origin, Q_KIND)[None, :]
    score = dot(k_tile, tl.trans(q_tile), PRECISION, UPCAST)
    weight, slope, live, raw, final = weights_of_tile(
        score,
        (rows < q_len)[None, :],
        columns_ok[:, None],
        lse2[None, :],
        q, kv, scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
        #: arguments
        PARTIAL,
    )
    dout_tile = load_tile(dout_head, first, stride_gm, q_len, DV, BLOCK_M, BLOCK_DV, PARTIAL or RAGGED_FULL)
    dweight = dot(v_tile, tl.trans(dout_tile), PRECISION, UPCAST)
    delta = tl.load(DELTA + statistics + rows)
    kept = weight
    exists = live & (rows < q_len)[None, :] & columns_ok[:, None]
    if HAS_DROPOUT:
        p = drop_probability(
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        stays = kept_pairs(first, first_column, p, b * heads + h, seed, BLOCK_M, k_tile.shape[0])
        keep = keep_factor(tl.trans(stays), p)
        dweight = dweight * keep
        kept = weight * keep
    if LEARNS_WEIGHT:
        (
            #: sums
        ) = add_weight_gradients(
            #: sums
            tl.where(exists, dweight, 0.0), final, exists, b, h, hkv, q, kv, batch, heads, kv_heads,
            q_len, kv_len,
            #: arguments
        )
    if not OWN_WEIGHTS:
        dweight = dweight - delta[None, :]
    dscore = slope * dweight
    if LEARNS_SCORE:
        (
            #: sums
        ) = add_score_gradients(
            #: sums
            tl.where(exists, dscore, 0.0), raw, exists, b, h, hkv, q, kv, batch, heads, kv_heads,
            q_len, kv_len,
            #: arguments
        )
    draw = gradient_of_raw_score(
        dscore,
        raw, live, q, kv, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
        #: arguments
        PARTIAL,
    )
    # dV comes after dS: its operand is ready, and issuing it earlier spills registers.
    dv = dot_add(kept.to(dout_tile.dtype), dout_tile, dv, PRECISION, UPCAST)
    dk = dot_add(draw.to(q_tile.dtype), q_tile, dk, PRECISION, UPCAST)
    return (
        #: sums
        dk,
        dv,
    )


@triton.jit
def attention_backward_kv(
    Q, K, V, DOUT, DK, DV_OUT, LSE2, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    rows_dkb, rows_dkh, rows_dkn, rows_dvb, rows_dvh, rows_dvn, together,
    #: parameters
    #: kv_pass_lists
    #: outputs
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, Q_KIND: tl.constexpr, KV_KIND: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """One program: dK and dV of one key-value tile, summed over the head's group of query heads.

    DK is (batch, kv_heads, kv_len, D), its rows ``rows_dkb``, ``rows_dkh`` and ``rows_dkn`` apart.
    DV_OUT (batch, kv_heads, kv_len, DV) likewise. LINE_SUMS (sums, batch, heads, kv_len) is
    contiguous; the sums are each head's own columns'.
    """
    tile, head_of_batch = place_of_item(
        tl.program_id(0), tl.cdiv(kv_len, BLOCK_N), batch * kv_heads, together,
        MASKED, KV_PASS_DESCENDING,
    )
    b = head_of_batch // kv_heads
    hkv = head_of_batch % kv_heads
    group = heads // kv_heads
    q_offset = shift_of_positions(q_origin, Q_KIND)
    kv_offset = shift_of_positions(kv_origin, KV_KIND)
    first = tile * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    kv = positions(columns, kv_len, kv_origin, KV_KIND)[:, None]
    k_tile = load_tile(K + b * stride_kb + hkv * stride_kh, first, stride_kn, kv_len, D, BLOCK_N, BLOCK_D, True)
    v_tile = load_tile(V + b * stride_vb + hkv * stride_vh, first, stride_vn, kv_len, DV, BLOCK_N, BLOCK_DV, True)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for member in tl.range(0, group):
        h = hkv * group + member
        q_head = Q + b * stride_qb + h * stride_qh
        dout_head = DOUT + b * stride_gb + h * stride_gh
        #: begin_sums
        full_tiles, partial_tiles, first_live, first_full = kv_pass_tiles(
            tile, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: kv_pass_lists
        )
        if KV_PASS_HAS_FULL:
            q_tile_index = kv_pass_full_tile(
                0, full_tiles, first_live, first_full, tile,
                b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                BLOCK_M, BLOCK_N,
                #: arguments
                #: kv_pass_lists
            )
            for step in tl.range(0, full_tiles):
                (
                    #: sums
                    dk,
                    dv,
                ) = add_query_tile(
                    #: sums
                    dk, dv, k_tile, v_tile, first, kv,
                    columns < kv_len,
                    q_tile_index, q_head, dout_head, LSE2, DELTA,
                    stride_qm, stride_gm,
                    scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin,
                    #: arguments
                    D, DV, BLOCK_M, BLOCK_D, BLOCK_DV, Q_KIND, PRECISION, UPCAST,
                    PARTIAL=False,
                )
                q_tile_index = kv_pass_full_tile(
                    step + 1, full_tiles, first_live, first_full, tile,
                    b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                    BLOCK_M, BLOCK_N,
                    #: arguments
                    #: kv_pass_lists
                )
        if KV_PASS_HAS_PARTIAL:
            q_tile_index = kv_pass_partial_tile(
                0, full_tiles, first_live, first_full, tile,
                b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                BLOCK_M, BLOCK_N,
                #: arguments
                #: kv_pass_lists
            )
            for step in tl.range(0, partial_tiles):
                (
                    #: sums
                    dk,
                    dv,
                ) = add_query_tile(
                    #: sums
                    dk, dv, k_tile, v_tile, first, kv,
                    columns < kv_len,
                    q_tile_index, q_head, dout_head, LSE2, DELTA,
                    stride_qm, stride_gm,
                    scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_origin,
                    #: arguments
                    D, DV, BLOCK_M, BLOCK_D, BLOCK_DV, Q_KIND, PRECISION, UPCAST, PARTIAL=True,
                )
                q_tile_index = kv_pass_partial_tile(
                    step + 1, full_tiles, first_live, first_full, tile,
                    b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                    BLOCK_M, BLOCK_N,
                    #: arguments
                    #: kv_pass_lists
                )
        #: end_sums
    dk_head = DK + (b * rows_dkb + hkv * rows_dkh) * D
    dv_head = DV_OUT + (b * rows_dvb + hkv * rows_dvh) * DV
    store_tile(dk_head, first, rows_dkn * D, kv_len, dk * scale, D, BLOCK_N, BLOCK_D)
    store_tile(dv_head, first, rows_dvn * DV, kv_len, dv, DV, BLOCK_N, BLOCK_DV)
