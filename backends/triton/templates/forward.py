"""Forward kernel: softmax(score) @ v one key-value tile at a time, with the row's log-sum-exp.

Algorithm: T. Dao, FlashAttention-2 (arXiv 2307.08691), over the online softmax of M. Milakov and
N. Gimelshein (arXiv 1805.02867). Exponentials are base 2.
"""
# ruff: noqa: F821

import triton
import triton.language as tl

from attndsl.backends.triton.dropout import keep_factor, kept_pairs
from attndsl.backends.triton.library import (
    dot, dot_add, load_tile, place_of_item, positions, shift_of_positions, store_tile,
)

#: imports

#: flags

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

#: functions


@triton.jit
def soften(score, acc, denominator, peak, factor, PARTIAL: tl.constexpr):
    """A tile's weights before the division, and the running sums scaled down to its maximum."""
    new_peak = tl.maximum(peak, tl.max(score, 1) * factor)
    shift = new_peak
    if (PARTIAL and MASKED) or MODIFIED:
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weight = tl.exp2(score * factor - shift[:, None])
    decay = tl.exp2(peak - shift)
    denominator = denominator * decay + tl.sum(weight, 1)
    return weight, acc * decay[:, None], denominator, new_peak


@triton.jit
def attend(
    acc, denominator, peak, q_tile, first_row, q, kv_tile, k_head, v_head,
    stride_kn, stride_vn,
    factor, scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, kv_origin,
    #: parameters
    D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, KV_KIND: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, PARTIAL: tl.constexpr,
):
    """Take one key-value tile into the running softmax of a query tile."""
    first = kv_tile * BLOCK_N
    columns = first + tl.arange(0, BLOCK_N)
    k_tile = load_tile(k_head, first, stride_kn, kv_len, D, BLOCK_N, BLOCK_D, PARTIAL)
    score = dot(q_tile, tl.trans(k_tile), PRECISION, UPCAST)
    live = tl.full([], 1, tl.int1)
    if SCALED_FIRST:
        score = score * scale
    if PARTIAL or MODIFIED or HAS_DROPOUT or OWN_WEIGHTS:
        kv = positions(columns, kv_len, kv_origin, KV_KIND)[None, :]
        if PARTIAL:
            live = (columns < kv_len)[None, :]
            if MASKED:
                live = live & mask_of_pair(
                    score, live, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
                    #: arguments
                )
        if MODIFIED:
            score = score_of_pair(
                score, live, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
                #: arguments
            )
        if PARTIAL and not OWN_WEIGHTS:
            score = tl.where(live, score, float("-inf"))

    if OWN_WEIGHTS:
        weight = weight_of_pair(
            score, live, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        if PARTIAL:
            weight = tl.where(live, weight, 0.0)
    else:
        weight, acc, denominator, peak = soften(score, acc, denominator, peak, factor, PARTIAL)
    if HAS_DROPOUT:
        p = drop_probability(
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        stays = kept_pairs(first_row, first, p, b * heads + h, seed, q_tile.shape[0], BLOCK_N)
        weight = weight * keep_factor(stays, p)
    v_tile = load_tile(v_head, first, stride_vn, kv_len, DV, BLOCK_N, BLOCK_DV, PARTIAL)
    acc = dot_add(weight.to(v_tile.dtype), v_tile, acc, PRECISION, UPCAST)
    return acc, denominator, peak


@triton.jit
def attention_forward(
    Q, K, V, OUT, LSE,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_ob, stride_oh, stride_om,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, together,
    #: parameters
    #: forward_lists
    D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, Q_KIND: tl.constexpr, KV_KIND: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):
    """One program: one query tile of one head. LSE (batch, heads, q_len) is contiguous fp32."""
    tile, head_of_batch = place_of_item(
        tl.program_id(0), tl.cdiv(q_len, BLOCK_M), batch * heads, together,
        MASKED, FORWARD_DESCENDING,
    )
    b = head_of_batch // heads
    h = head_of_batch % heads
    hkv = h // (heads // kv_heads)
    q_offset = shift_of_positions(q_origin, Q_KIND)
    kv_offset = shift_of_positions(kv_origin, KV_KIND)
    first = tile * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    q = positions(rows, q_len, q_origin, Q_KIND)[:, None]

    q_head = Q + b * stride_qb + h * stride_qh
    k_head = K + b * stride_kb + hkv * stride_kh
    v_head = V + b * stride_vb + hkv * stride_vh
    q_tile = load_tile(q_head, first, stride_qm, q_len, D, BLOCK_M, BLOCK_D, True)
    # The running maximum needs a positive factor, so a negative scale is applied to the scores.
    if SCALED_FIRST:
        factor = LOG2E
    else:
        factor = scale * LOG2E

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    denominator = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    full_tiles, partial_tiles, first_live, first_full = forward_tiles(
        tile, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
        BLOCK_M, BLOCK_N,
        #: arguments
        #: forward_lists
    )
    if FORWARD_HAS_FULL:
        kv_tile = forward_full_tile(
            0, full_tiles, first_live, first_full, tile,
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: forward_lists
        )
        for step in tl.range(0, full_tiles):
            acc, denominator, peak = attend(
                acc, denominator, peak, q_tile, first, q, kv_tile, k_head, v_head,
                stride_kn, stride_vn,
                factor, scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, kv_origin,
                #: arguments
                D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, KV_KIND, PRECISION, UPCAST, PARTIAL=False,
            )
            kv_tile = forward_full_tile(
                step + 1, full_tiles, first_live, first_full, tile,
                b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                BLOCK_M, BLOCK_N,
                #: arguments
                #: forward_lists
            )
    if FORWARD_HAS_PARTIAL:
        kv_tile = forward_partial_tile(
            0, full_tiles, first_live, first_full, tile,
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: forward_lists
        )
        for step in tl.range(0, partial_tiles):
            acc, denominator, peak = attend(
                acc, denominator, peak, q_tile, first, q, kv_tile, k_head, v_head,
                stride_kn, stride_vn,
                factor, scale, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, kv_origin,
                #: arguments
                D, DV, BLOCK_N, BLOCK_D, BLOCK_DV, KV_KIND, PRECISION, UPCAST, PARTIAL=True,
            )
            kv_tile = forward_partial_tile(
                step + 1, full_tiles, first_live, first_full, tile,
                b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                BLOCK_M, BLOCK_N,
                #: arguments
                #: forward_lists
            )

    # A row with no live pair gives zeros and a log-sum-exp of -inf; weights of the program's own are
    # not divided by anything.
    empty = denominator == 0.0
    if HAS_SINK:
        sink = LOG2E * sink_of_head(
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        top = tl.where(empty, 0.0, tl.maximum(peak, sink))
        kept = tl.exp2(peak - top)
        denominator = denominator * kept + tl.exp2(sink - top)
        acc = acc * kept[:, None]
        peak = tl.where(empty, peak, top)
    acc = acc / tl.where(empty, 1.0, denominator)[:, None]
    lse = peak * LN2 + tl.log(tl.where(empty, 1.0, denominator))
    out_head = OUT + b * stride_ob + h * stride_oh
    store_tile(out_head, first, stride_om, q_len, acc, DV, BLOCK_M, BLOCK_DV)
    tl.store(LSE + head_of_batch.to(tl.int64) * q_len + rows, lse, mask=rows < q_len)
