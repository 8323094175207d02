"""The online softmax of a forward: weights of a tile, and the rows' sums and log-sum-exp.

Algorithm: T. Dao, FlashAttention-2 (arXiv 2307.08691), over the online softmax of M. Milakov and
N. Gimelshein (arXiv 1805.02867). Exponentials are base 2.
"""
# ruff: noqa: F821

from typing import NamedTuple

import triton
import triton.language as tl

from attndsl.backends.device.records import (
    Columns, EveryPart, Factors, Head, Keys, LogSum, Origins, PackedRows, PagedKeys, PageOfKeys, PageRows,
    PartsRoom, Piece, RequestTokens, RowFactors, RunningParts, Scope, ShareLimits, ShareOfParts, Sizes,
    Softmax, Tensor, UnitPlaces, Visits,
)
from attndsl.backends.device.dropout_tile import keep_factor, kept_pairs, kept_pairs_of_part, kept_single_pairs
from attndsl.backends.device.library import (
    dot, dot_add, for_live_pairs, head_of, is_finite, is_number, load_tile, not_finite,
    place_of_item, positions, rows_of, shift_of, store_log_sum, store_tile,
)

#: imports

#: flags

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

#: functions


@triton.jit
def rescale(s, softmax, factor, PARTIAL: tl.constexpr, FIRST: tl.constexpr):
    """A tile's weights before the division, and the running sums scaled down to its maximum.

    There are no sums before the FIRST tile. The maximum is taken off before ``factor`` takes scores
    to base 2: the rounding error of a large one times ``factor`` would change all weights.
    """
    row_max = tl.max(s, 1)
    if not FIRST:
        row_max = tl.maximum(softmax.row_max, row_max)
    shift = row_max
    if (PARTIAL and MASKED) or MODIFIED:
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    p = tl.exp2((s - shift[:, None]) * factor)
    if FIRST:
        return p, Softmax(softmax.acc, tl.sum(p, 1), row_max)
    decay = tl.exp2((softmax.row_max - shift) * factor)
    row_sum = softmax.row_sum * decay + tl.sum(p, 1)
    return p, Softmax(softmax.acc * decay[:, None], row_sum, row_max)


@triton.jit
def weigh(
    s, softmax, first_row, q, columns, scale, factor, scope,
    PARTIAL: tl.constexpr, FIRST: tl.constexpr,
):
    """A tile's weights from its q . k, and the running sums scaled down to its maximum."""
    sizes = scope.sizes
    live = True
    if SCALED_FIRST:
        s = s * scale
    if PARTIAL or MODIFIED or HAS_DROPOUT or OWN_WEIGHTS:
        kv = positions(columns.numbers, sizes.kv_len, columns.origin, KV_KIND)[None, :]
        if PARTIAL:
            live = (columns.numbers < sizes.kv_len)[None, :]
            if MASKED:
                live = live & mask_of_pair(s, live, q, kv, scope)
        if MODIFIED:
            s = score_of_pair(s, live, q, kv, scope)
        if PARTIAL and not OWN_WEIGHTS:
            s = tl.where(live, s, float("-inf"))

    if OWN_WEIGHTS:
        p = weight_of_pair(s, live, q, kv, scope)
        if PARTIAL:
            p = tl.where(live, p, 0.0)
    else:
        p, softmax = rescale(s, softmax, factor, PARTIAL, FIRST)
    if HAS_DROPOUT:
        drop = drop_probability(scope)
        stays = kept_of_tile(first_row, columns.first, drop, q, kv, scope, s.shape[0], s.shape[1])
        p = p * keep_factor(stays, drop)
    return p, softmax


@triton.jit
def live_pairs(s, q, columns, scale, scope):
    """Mask of the pairs of a tile that take part, from their q . k."""
    if SCALED_FIRST:
        s = s * scale
    live = (columns.numbers < scope.sizes.kv_len)[None, :]
    kv = positions(columns.numbers, scope.sizes.kv_len, columns.origin, KV_KIND)[None, :]
    return live & mask_of_pair(s, live, q, kv, scope)


@triton.jit
def with_sink(softmax, empty, scope):
    """The running softmax with the head's sink in its denominator, where rows have live pairs."""
    sink = sink_of_head(scope)
    top = tl.where(empty, 0.0, tl.maximum(softmax.row_max, sink))
    decay = tl.exp2((softmax.row_max - top) * LOG2E)
    row_sum = softmax.row_sum * decay + tl.exp2((sink - top) * LOG2E)
    acc = softmax.acc * decay[:, None]
    return Softmax(acc, row_sum, tl.where(empty, softmax.row_max, top))


@triton.jit
def results_of(softmax, scale, scope):
    """A query tile's output, and its ``LogSum``: the greatest score and what is added to it.

    A row with no live pair gives zeros and a log-sum-exp of -inf. Weights of the program's own are
    not divided by anything.
    """
    empty = softmax.row_sum == 0.0
    peak = softmax.row_max
    lost = 0.0
    if not SCALED_FIRST:
        peak = peak * scale
        # What rounding took from the product.
        lost = tl.where(empty, 0.0, tl.fma(softmax.row_max, scale, -peak))
    softmax = Softmax(softmax.acc, softmax.row_sum, peak)
    if HAS_SINK:
        softmax = with_sink(softmax, empty, scope)
    row_sum = tl.where(empty, 1.0, softmax.row_sum)
    return softmax.acc / row_sum[:, None], LogSum(softmax.row_max, tl.log(row_sum) + lost)
