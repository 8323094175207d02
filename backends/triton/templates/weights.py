"""Weights again, from the log-sum-exp: what kernels of gradients and of tangents begin with.

Gradients of q, k and v take two passes: dK and dV by key-value tile, then dQ by query tile. So each is
a sum in a fixed order, without atomics (T. Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2, split
in two). Where a program holds all keys of a head, one pass makes all three. With P the weights,
dP = dO V^T and delta = rowsum(dO * O) - dlse, the gradient of the final score is dS = P * (dP - delta).
"""
# ruff: noqa: F821

from typing import NamedTuple

import triton
import triton.language as tl

from attndsl.backends.device.records import (
    Corner, Head, Keys, KeyTile, LogSum, Operands, Origins, Pairs, QueryTile, Rows, Scope, Share, Sizes,
    Steps, Tensor, Visits, Weights,
)
from attndsl.backends.device.dropout_tile import keep_factor, kept_pairs, kept_pairs_of_part, kept_single_pairs
from attndsl.backends.device.library import (
    STATISTICS_PADDING, dot, dot_add, for_live_pairs, head_of, head_of_result, is_finite, is_number,
    load_log_sum, load_tile, operands_of, place_of_item, plane_of, positions, rows_of,
    rows_of_result, shift_of, statistics_rows, store_tile, with_statistics,
)

#: imports

#: flags

LOG2E = tl.constexpr(1.4426950408889634)

#: functions


@triton.jit
def weights_of_tile(s, pairs, lse, scale, scope, PARTIAL: tl.constexpr):
    """A tile's weights from its q . k. ``lse``, a ``LogSum``, broadcasts along keys."""
    raw = s * scale
    live = True
    if PARTIAL:
        live = pairs.rows_ok & pairs.columns_ok
        if MASKED:
            live = live & mask_of_pair(raw, live, pairs.q, pairs.kv, scope)
    if MODIFIED:
        final = score_of_pair(raw, live, pairs.q, pairs.kv, scope)
    else:
        final = raw
    if OWN_WEIGHTS:
        p = weight_of_pair(final, live, pairs.q, pairs.kv, scope)
        p_slope = slope_of_weight(final, live, pairs.q, pairs.kv, scope)
        if PARTIAL:
            p_slope = tl.where(live, p_slope, 0.0)
    else:
        p = tl.exp2((final - lse.shift) * LOG2E - lse.rest)
    if PARTIAL:
        p = tl.where(live, p, 0.0)
    if not OWN_WEIGHTS:
        p_slope = p
    return Weights(p, p_slope, live, raw, final)


@triton.jit
def through_score(ds, weights, pairs, scope, PARTIAL: tl.constexpr):
    """Take dS, the gradient of the final score, through the program to that of scale * (q . k)."""
    if PARTIAL:
        ds = tl.where(weights.live, ds, 0.0)
    if MODIFIED:
        ds = ds * derivative_of_pair(weights.raw, weights.live, pairs.q, pairs.kv, scope)
        if PARTIAL:
            ds = tl.where(weights.live, ds, 0.0)
    return ds
