"""Tangents of a query tile's output and log-sum-exp. Follows ``weights.py`` in one module.

With P the weights and a dot for the derivative along the tangents: dot(lse) = sum P dot(score) over
a row's pairs and its sink, and dot(out) = sum (P dot(score) V + P dot(V)) - dot(lse) out, so that one
pass over the keys needs no row sum beforehand (``backends/tangent.py`` has the formulas in torch).
"""
# ruff: noqa: F821

import triton
import triton.language as tl

from attndsl.backends.triton.dropout import keep_factor, kept_pairs
from attndsl.backends.triton.library import (
    dot, dot_add, load_tile, place_of_item, positions, shift_of_positions, store_tile,
)

#: begin


@triton.jit
def moved_score(
    q_tile, q_moved, k_tile, k_moved_head, first, stride_tkn, raw, live, q, kv,
    scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
    #: parameters
    D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, PARTIAL: tl.constexpr,
):
    """The final score's tangent; where the slope is infinite, one that does not move has none."""
    if MOVES_Q:
        moved = dot(q_moved, tl.trans(k_tile), PRECISION, UPCAST)
    else:
        moved = tl.zeros(raw.shape, tl.float32)
    if MOVES_K:
        k_moved = load_tile(k_moved_head, first, stride_tkn, kv_len, D, BLOCK_N, BLOCK_D, PARTIAL)
        moved = dot_add(q_tile, tl.trans(k_moved), moved, PRECISION, UPCAST)
    moved = moved * scale
    if MODIFIED:
        slope = derivative_of_pair(
            raw, live, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        moved = tl.where(moved == 0.0, 0.0, moved * slope)
    if MOVES_SCORE:
        moved = moved + moved_score_of_pair(
            raw, live, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
    return moved


@triton.jit
def add_key_tile(
    acc, dlse, rounded, q_tile, q_moved, lse2, first_row, q, rows_ok, kv_tile, k_head, v_head, k_moved_head,
    v_moved_head, stride_kn, stride_vn, stride_tkn, stride_tvn,
    scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, kv_origin,
    #: parameters
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, KV_KIND: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, PARTIAL: tl.constexpr,
):
    """Add one key-value tile's part to the tangents."""
    first = kv_tile * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    k_tile = load_tile(k_head, first, stride_kn, kv_len, D, BLOCK_N, BLOCK_D, PARTIAL)
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
    if MOVES_WEIGHTS:
        moved = moved_score(
            q_tile, q_moved, k_tile, k_moved_head, first, stride_tkn, raw, live, q, kv,
            scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
            D, BLOCK_N, BLOCK_D, PRECISION, UPCAST, PARTIAL,
        )
        if MODIFIED or OWN_WEIGHTS:
            # Whichever is 0 leaves nothing, be the other infinite.
            moved = tl.where((slope == 0.0) | (moved == 0.0), 0.0, slope * moved)
        else:
            moved = slope * moved
        if MOVES_WEIGHT:
            moved = moved + moved_weight_of_pair(
                final, live, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
                #: arguments
            )
        if PARTIAL:
            moved = tl.where(live, moved, 0.0)
        if not OWN_WEIGHTS:
            dlse += tl.sum(moved, 1)
    if HAS_DROPOUT:
        p = drop_probability(
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        stays = kept_pairs(first_row, first, p, b * heads + h, seed, q_tile.shape[0], BLOCK_N)
        keep = keep_factor(stays, p)
        if MOVES_WEIGHTS:
            moved = moved * keep
        if MOVES_DROPOUT:
            # keep is 1 / (1 - p), whose derivative is its square; outside of [0, 1) it is constant.
            moved_p = moved_dropout_of_pair(
                raw, live, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
                #: arguments
            )
            varies = (weight != 0.0) & (p >= 0.0) & (p < 1.0)
            moved += tl.where(varies, weight * moved_p * keep * keep, 0.0)
        weight = weight * keep
    if MOVES_WEIGHTS:
        v_tile = load_tile(v_head, first, stride_vn, kv_len, DV, BLOCK_N, BLOCK_DV, PARTIAL)
        moved = moved.to(v_tile.dtype)
        if not OWN_WEIGHTS and not HAS_DROPOUT:
            rounded += tl.sum(moved.to(tl.float32), 1)
        acc = dot_add(moved, v_tile, acc, PRECISION, UPCAST)
    if MOVES_V:
        v_moved = load_tile(v_moved_head, first, stride_tvn, kv_len, DV, BLOCK_N, BLOCK_DV, PARTIAL)
        acc = dot_add(weight.to(v_moved.dtype), v_moved, acc, PRECISION, UPCAST)
    return acc, dlse, rounded


@triton.jit
def attention_tangent(
    Q, K, V, OUT, LSE, Q_MOVED, K_MOVED, V_MOVED, OUT_MOVED, LSE_MOVED,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_tqb, stride_tqh, stride_tqm, stride_tkb, stride_tkh, stride_tkn,
    stride_tvb, stride_tvh, stride_tvn,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin,
    rows_ob, rows_oh, rows_om, together,
    #: parameters
    #: q_pass_lists
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, Q_KIND: tl.constexpr, KV_KIND: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """One program: one query tile of one head.

    OUT and OUT_MOVED are (batch, heads, q_len, DV), their rows ``rows_ob``, ``rows_oh`` and
    ``rows_om`` apart. LSE and LSE_MOVED (batch, heads, q_len) are contiguous, LSE in base e. Of
    Q_MOVED, K_MOVED and V_MOVED those are read that move.
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
    k_moved_head = K_MOVED + b * stride_tkb + hkv * stride_tkh
    v_moved_head = V_MOVED + b * stride_tvb + hkv * stride_tvh
    q_tile = load_tile(Q + b * stride_qb + h * stride_qh, first, stride_qm, q_len, D, BLOCK_M, BLOCK_D, True)
    q_moved = q_tile
    if MOVES_Q:
        q_moved = load_tile(
            Q_MOVED + b * stride_tqb + h * stride_tqh, first, stride_tqm, q_len, D, BLOCK_M, BLOCK_D, True
        )
    lse_head = LSE + head_of_batch.to(tl.int64) * q_len
    lse = tl.load(lse_head + rows, mask=rows < q_len, other=float("-inf"))
    # Rows with no live pair have weights of 0.
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    dlse = tl.zeros([BLOCK_M], tl.float32)
    rounded = tl.zeros([BLOCK_M], tl.float32)
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
            acc, dlse, rounded = add_key_tile(
                acc, dlse, rounded, q_tile, q_moved, lse2, first, q,
                rows < q_len,
                kv_tile, k_head, v_head, k_moved_head, v_moved_head,
                stride_kn, stride_vn, stride_tkn, stride_tvn,
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
            acc, dlse, rounded = add_key_tile(
                acc, dlse, rounded, q_tile, q_moved, lse2, first, q,
                rows < q_len,
                kv_tile, k_head, v_head, k_moved_head, v_moved_head,
                stride_kn, stride_vn, stride_tkn, stride_tvn,
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
    if MOVES_SINK:
        sink = sink_of_head(
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        sink_moved = moved_sink_of_head(
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        sink_weight = tl.exp2(sink * LOG2E - lse2)
        sink_part = tl.where(sink_weight == 0.0, 0.0, sink_weight * sink_moved)
        dlse += sink_part
        rounded += sink_part
    if not OWN_WEIGHTS:
        out_head = OUT + (b * rows_ob + h * rows_oh) * DV
        out = load_tile(out_head, first, rows_om * DV, q_len, DV, BLOCK_M, BLOCK_DV, True)
        # What the product's operand was rounded to cancels better; a dropped weight is not in it.
        common = dlse if HAS_DROPOUT else rounded
        acc -= common[:, None] * out.to(tl.float32)
    moved_head = OUT_MOVED + (b * rows_ob + h * rows_oh) * DV
    store_tile(moved_head, first, rows_om * DV, q_len, acc, DV, BLOCK_M, BLOCK_DV)
    tl.store(LSE_MOVED + head_of_batch.to(tl.int64) * q_len + rows, dlse, mask=rows < q_len)
