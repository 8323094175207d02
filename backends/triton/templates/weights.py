"""Weights again, from the log-sum-exp: what kernels of gradients and of tangents begin with.

Gradients of q, k and v take two passes, dK and dV by key-value tile, then dQ by query tile, so that
each is a sum in a fixed order, without atomics (T. Dao, FlashAttention-2, arXiv 2307.08691, algorithm
2, split in two). With P the weights, dP = dO V^T and delta = rowsum(dO * O) - dlse, the gradient of
the final score is dS = P * (dP - delta).
"""
# ruff: noqa: F821

import triton
import triton.language as tl

from attndsl.backends.triton.dropout import keep_factor, kept_pairs
from attndsl.backends.triton.library import (
    dot, dot_add, load_tile, place_of_item, positions, shift_of_positions, statistics_rows,
    store_tile,
)

#: imports

#: flags

LOG2E = tl.constexpr(1.4426950408889634)

#: functions


@triton.jit
def weights_of_tile(
    score, rows_ok, columns_ok, lse2, q, kv, scale, b, h, hkv, batch, heads, kv_heads, q_len,
    kv_len,
    #: parameters
    PARTIAL: tl.constexpr,
):
    """From the tile's q . k: weights, their slopes, live pairs, the scaled and the final score.

    A softmax weight's slope is the weight itself, once delta is taken off the gradient of the weight.
    ``rows_ok`` and ``columns_ok`` say which queries and keys exist; ``lse2`` broadcasts along keys.
    """
    raw = score * scale
    live = tl.full([], 1, tl.int1)
    if PARTIAL:
        live = rows_ok & columns_ok
        if MASKED:
            live = live & mask_of_pair(
                raw, live, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
                #: arguments
            )
    if MODIFIED:
        final = score_of_pair(
            raw, live, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
    else:
        final = raw
    if OWN_WEIGHTS:
        weight = weight_of_pair(
            final, live, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        slope = slope_of_weight(
            final, live, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        if PARTIAL:
            slope = tl.where(live, slope, 0.0)
    elif MODIFIED:
        weight = tl.exp2(final * LOG2E - lse2)
    else:
        weight = tl.exp2(score * (scale * LOG2E) - lse2)
    if PARTIAL:
        weight = tl.where(live, weight, 0.0)
    if not OWN_WEIGHTS:
        slope = weight
    return weight, slope, live, raw, final


@triton.jit
def gradient_of_raw_score(
    dscore, raw, live, q, kv, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
    #: parameters
    PARTIAL: tl.constexpr,
):
    """Take the gradient of the final score through the program, to that of scale * (q . k)."""
    if PARTIAL:
        dscore = tl.where(live, dscore, 0.0)
    if MODIFIED:
        dscore = dscore * derivative_of_pair(
            raw, live, b, h, hkv, q, kv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        if PARTIAL:
            dscore = tl.where(live, dscore, 0.0)
    return dscore
