"""Backward, second pass: dQ of a query tile. Follows ``weights.py`` in one module."""
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
def add_key_tile(
    #: sums
    dq, q_tile, dout_tile, lse2, delta, first_row, q, rows_ok, kv_tile, k_head, v_head,
    stride_kn, stride_vn,
    scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, kv_origin,
    #: parameters
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, KV_KIND: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, PARTIAL: tl.constexpr,
):
    """Add one key-value tile's part to dQ (before the scale), and to rows' sums."""
    first = kv_tile * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    k_tile = load_tile(k_head, first, stride_kn, kv_len, D, BLOCK_N, BLOCK_D, PARTIAL)
    v_tile = load_tile(v_head, first, stride_vn, kv_len, DV, BLOCK_N, BLOCK_DV, PARTIAL)
    kv = positions(columns, kv_len, kv_origin, KV_KIND)[None, :]
    score = dot(q_tile, tl.trans(k_tile), PRECISION, UPCAST)
    weight, slope, live, raw, final = weights_of_tile(
        score,
        rows_ok[:, None],
        (columns < kv_len)[None, :],
        lse2[:, None],
        q, kv, scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
        #: arguments
        PARTIAL,
    )
    dweight = dot(dout_tile, tl.trans(v_tile), PRECISION, UPCAST)
    exists = live & rows_ok[:, None] & (columns < kv_len)[None, :]
    if HAS_DROPOUT:
        p = drop_probability(
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        stays = kept_pairs(first_row, first, p, b * heads + h, seed, q_tile.shape[0], BLOCK_N)
        keep = keep_factor(stays, p)
        dweight = dweight * keep
        if LEARNS_DROPOUT:
            # keep is 1 / (1 - p), whose derivative is its square; outside of [0, 1) it is constant.
            varies = exists & (p >= 0.0) & (p < 1.0)
            (
                #: sums
            ) = add_dropout_gradients(
                #: sums
                tl.where(varies, dweight * weight * keep, 0.0), raw, exists, b, h, hkv, q, kv, batch,
                heads, kv_heads, q_len, kv_len,
                #: arguments
            )
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
        dweight = dweight - delta[:, None]
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
        dscore, raw, live, q, kv, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
        #: arguments
        PARTIAL,
    )
    dq = dot_add(draw.to(k_tile.dtype), k_tile, dq, PRECISION, UPCAST)
    return (
        #: sums
        dq,
    )


@triton.jit
def attention_backward_q(
    Q, K, V, DOUT, DQ, LSE2, DELTA,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_gb, stride_gh, stride_gm,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    rows_dqb, rows_dqh, rows_dqm, together,
    #: parameters
    #: q_pass_lists
    #: outputs
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, Q_KIND: tl.constexpr, KV_KIND: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """One program: dQ of one query tile of one head, and its rows' sums for other gradients.

    DQ is (batch, heads, q_len, D), its rows ``rows_dqb``, ``rows_dqh`` and ``rows_dqm`` apart.
    LINE_SUMS (sums, batch, heads, q_len) is contiguous.
    """
    tile, head_of_batch = place_of_item(
        tl.program_id(0), tl.cdiv(q_len, BLOCK_M), batch * heads, together,
        MASKED, Q_PASS_DESCENDING,
    )
    b = head_of_batch // heads
    h = head_of_batch % heads
    hkv = h // (heads // kv_heads)
    q_offset = shift_of_positions(q_origin, Q_KIND)
    kv_offset = shift_of_positions(kv_origin, KV_KIND)
    first = tile * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    q = positions(rows, q_len, q_origin, Q_KIND)[:, None]
    k_head = K + b * stride_kb + hkv * stride_kh
    v_head = V + b * stride_vb + hkv * stride_vh
    q_tile = load_tile(Q + b * stride_qb + h * stride_qh, first, stride_qm, q_len, D, BLOCK_M, BLOCK_D, True)
    dout_tile = load_tile(DOUT + b * stride_gb + h * stride_gh, first, stride_gm, q_len, DV, BLOCK_M, BLOCK_DV, True)
    statistics = statistics_rows(head_of_batch, q_len)
    lse2 = tl.load(LSE2 + statistics + rows, mask=rows < q_len, other=float("inf"))
    delta = tl.load(DELTA + statistics + rows, mask=rows < q_len, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    #: begin_sums
    full_tiles, partial_tiles, first_live, first_full = q_pass_tiles(
        tile, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
        BLOCK_M, BLOCK_N,
        #: arguments
        #: q_pass_lists
    )
    if Q_PASS_HAS_FULL:
        kv_tile = q_pass_full_tile(
            0, full_tiles, first_live, first_full, tile,
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: q_pass_lists
        )
        for step in tl.range(0, full_tiles):
            (
                #: sums
                dq,
            ) = add_key_tile(
                #: sums
                dq, q_tile, dout_tile, lse2, delta, first, q,
                rows < q_len,
                kv_tile, k_head, v_head,
                stride_kn, stride_vn,
                scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, kv_origin,
                #: arguments
                D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, KV_KIND, PRECISION, UPCAST, PARTIAL=False,
            )
            kv_tile = q_pass_full_tile(
                step + 1, full_tiles, first_live, first_full, tile,
                b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                BLOCK_M, BLOCK_N,
                #: arguments
                #: q_pass_lists
            )
    if Q_PASS_HAS_PARTIAL:
        kv_tile = q_pass_partial_tile(
            0, full_tiles, first_live, first_full, tile,
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: q_pass_lists
        )
        for step in tl.range(0, partial_tiles):
            (
                #: sums
                dq,
            ) = add_key_tile(
                #: sums
                dq, q_tile, dout_tile, lse2, delta, first, q,
                rows < q_len,
                kv_tile, k_head, v_head,
                stride_kn, stride_vn,
                scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, kv_origin,
                #: arguments
                D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, KV_KIND, PRECISION, UPCAST, PARTIAL=True,
            )
            kv_tile = q_pass_partial_tile(
                step + 1, full_tiles, first_live, first_full, tile,
                b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                BLOCK_M, BLOCK_N,
                #: arguments
                #: q_pass_lists
            )
    dq_head = DQ + (b * rows_dqb + h * rows_dqh) * D
    store_tile(dq_head, first, rows_dqm * D, q_len, dq * scale, D, BLOCK_M, BLOCK_D)
    #: end_sums
