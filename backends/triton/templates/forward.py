"""Forward kernel: softmax(S) @ V one key-value tile at a time, with the row's log-sum-exp.

Algorithm: T. Dao, FlashAttention-2 (arXiv 2307.08691), over the online softmax of M. Milakov and
N. Gimelshein (arXiv 1805.02867). Exponentials are base 2.
"""
# ruff: noqa: F821

from typing import NamedTuple

import triton
import triton.language as tl

from attndsl.backends.device.records import (
    Corner, Head, Keys, Origins, Piece, Sizes, Softmax, Tensor, Visits,
)
from attndsl.backends.device.dropout import (
    keep_factor, kept_pairs, kept_pairs_of_part, kept_single_pairs,
)
from attndsl.backends.device.library import (
    dot, dot_add, head_of, load_tile, place_of_item, positions, rows_of, shift_of, store_tile,
)

#: imports

#: flags

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

#: functions


@triton.jit
def rescale(s, softmax, factor, PARTIAL: tl.constexpr, FIRST: tl.constexpr):
    """A tile's weights before the division, and the running sums scaled down to its maximum.

    There are no sums before the FIRST tile.
    """
    row_max = tl.max(s, 1) * factor
    if not FIRST:
        row_max = tl.maximum(softmax.row_max, row_max)
    shift = row_max
    if (PARTIAL and MASKED) or MODIFIED:
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    p = tl.exp2(s * factor - shift[:, None])
    if FIRST:
        return p, Softmax(softmax.acc, tl.sum(p, 1), row_max)
    decay = tl.exp2(softmax.row_max - shift)
    row_sum = softmax.row_sum * decay + tl.sum(p, 1)
    return p, Softmax(softmax.acc * decay[:, None], row_sum, row_max)


@triton.jit
def weigh(
    s, softmax, corner, q, origin, scale, factor, head, sizes, given,
    PARTIAL: tl.constexpr, FIRST: tl.constexpr,
):
    """A tile's weights from its q . k, and the running sums scaled down to its maximum."""
    columns = corner.kv + tl.arange(0, s.shape[1])
    live = tl.full([], 1, tl.int1)
    if SCALED_FIRST:
        s = s * scale
    if PARTIAL or MODIFIED or HAS_DROPOUT or OWN_WEIGHTS:
        kv = positions(columns, sizes.kv_len, origin, KV_KIND)[None, :]
        if PARTIAL:
            live = (columns < sizes.kv_len)[None, :]
            if MASKED:
                live = live & mask_of_pair(s, live, head, q, kv, sizes, given)
        if MODIFIED:
            s = score_of_pair(s, live, head, q, kv, sizes, given)
        if PARTIAL and not OWN_WEIGHTS:
            s = tl.where(live, s, float("-inf"))

    if OWN_WEIGHTS:
        p = weight_of_pair(s, live, head, q, kv, sizes, given)
        if PARTIAL:
            p = tl.where(live, p, 0.0)
    else:
        p, softmax = rescale(s, softmax, factor, PARTIAL, FIRST)
    if HAS_DROPOUT:
        drop = drop_probability(head, sizes, given)
        stays = kept_of_tile(
            corner.q, corner.kv, drop, head, q, kv, sizes, given, s.shape[0], s.shape[1]
        )
        p = p * keep_factor(stays, drop)
    return p, softmax


@triton.jit
def attend(
    softmax, q_tile, first_row, q, kv_tile, keys, scale, factor, head, sizes, given,
    PARTIAL: tl.constexpr,
):
    """Take one key-value tile into the running softmax of a query tile."""
    first = kv_tile * BLOCK_N
    k_tile = load_tile(keys.k, first, sizes.kv_len, D, BLOCK_N, BLOCK_D, PARTIAL)
    s = dot(q_tile, tl.trans(k_tile), PRECISION, UPCAST)
    p, softmax = weigh(
        s, softmax, Corner(first_row, first), q, keys.origin, scale, factor, head, sizes, given,
        PARTIAL, False,
    )
    v_tile = load_tile(keys.v, first, sizes.kv_len, DV, BLOCK_N, BLOCK_DV, PARTIAL)
    acc = dot_add(p.to(v_tile.dtype), v_tile, softmax.acc, PRECISION, UPCAST)
    return Softmax(acc, softmax.row_sum, softmax.row_max)


@triton.jit
def with_sink(softmax, empty, head, sizes, given):
    """The running softmax with the head's sink in its denominator, where rows have live pairs."""
    sink = LOG2E * sink_of_head(head, sizes, given)
    top = tl.where(empty, 0.0, tl.maximum(softmax.row_max, sink))
    decay = tl.exp2(softmax.row_max - top)
    row_sum = softmax.row_sum * decay + tl.exp2(sink - top)
    acc = softmax.acc * decay[:, None]
    return Softmax(acc, row_sum, tl.where(empty, softmax.row_max, top))


@triton.jit
def results_of(softmax, head, sizes, given):
    """A query tile's output and log-sum-exp.

    A row with no live pair gives zeros and a log-sum-exp of -inf. Weights of the program's own are
    not divided by anything.
    """
    empty = softmax.row_sum == 0.0
    if HAS_SINK:
        softmax = with_sink(softmax, empty, head, sizes, given)
    row_sum = tl.where(empty, 1.0, softmax.row_sum)
    return softmax.acc / row_sum[:, None], softmax.row_max * LN2 + tl.log(row_sum)


@triton.jit
def attention_forward(
    Q, K, V, OUT, LSE,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh,
    stride_vn, stride_ob, stride_oh, stride_om,
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, together,
    #: given
):
    """One program: one query tile of one head. LSE (batch, heads, q_len) is contiguous fp32."""
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    origins = Origins(q_origin, kv_origin)
    given = Given(
        #: given
    )
    tile, head_of_batch = place_of_item(
        tl.program_id(0), tl.cdiv(q_len, BLOCK_M), batch * heads, together,
        MASKED, FORWARD_DESCENDING,
    )
    head = head_of(head_of_batch, sizes)
    shift = shift_of(origins, Q_KIND, KV_KIND)
    first = tile * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    q = positions(rows, q_len, q_origin, Q_KIND)[:, None]
    q_rows = rows_of(Tensor(Q, stride_qb, stride_qh, stride_qm), head.b, head.h)
    keys = Keys(
        rows_of(Tensor(K, stride_kb, stride_kh, stride_kn), head.b, head.hkv),
        rows_of(Tensor(V, stride_vb, stride_vh, stride_vn), head.b, head.hkv),
        kv_origin,
    )
    q_tile = load_tile(q_rows, first, q_len, D, BLOCK_M, BLOCK_D, True)
    # The running maximum needs a positive factor, so a negative scale is applied to the scores.
    if SCALED_FIRST:
        factor = LOG2E
    else:
        factor = scale * LOG2E
    softmax = Softmax(
        tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
    )
    visits = forward_visits(tile, head, sizes, shift, given)
    for PARTIAL in tl.static_range(2):
        if (PARTIAL and FORWARD_HAS_PARTIAL) or (not PARTIAL and FORWARD_HAS_FULL):
            kv_tile = forward_tile(0, visits, tile, head, sizes, shift, given, PARTIAL)
            for step in tl.range(0, visits.partial if PARTIAL else visits.full):
                softmax = attend(
                    softmax, q_tile, first, q, kv_tile, keys, scale, factor, head, sizes, given,
                    PARTIAL,
                )
                kv_tile = forward_tile(step + 1, visits, tile, head, sizes, shift, given, PARTIAL)

    out_tile, lse = results_of(softmax, head, sizes, given)
    out = rows_of(Tensor(OUT, stride_ob, stride_oh, stride_om), head.b, head.h)
    store_tile(out, first, q_len, out_tile, DV, BLOCK_M, BLOCK_DV)
    tl.store(LSE + head_of_batch.to(tl.int64) * q_len + rows, lse, mask=rows < q_len)
