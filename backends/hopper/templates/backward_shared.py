"""What the backward kernels for Hopper share: their loads, and weights from a tile of k . q.

``backward`` or ``backward_wide``, which say what the consumers do, follows, then
``backward_kernel``.

Algorithm: T. Dao, FlashAttention-2 (arXiv 2307.08691), algorithm 2; J. Shah et al.,
FlashAttention-3 (arXiv 2407.08608), section 3 for the roles of warps. With P the weights, dP =
dO V^T and delta = rowsum(dO * O) - dlse, the gradient of the final score is dS = P * (dP - delta).
"""
# ruff: noqa: F821

#: begin
"""Backward kernel: dQ, dK and dV by key-value tile, by a producer and two consumer warpgroups.

With P the weights, dP = dO V^T and delta = rowsum(dO * O) - dlse, the gradient of the final score
is dS = P * (dP - delta) (FlashAttention-2, arXiv 2307.08691, algorithm 2).
"""

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait,
)

from attndsl.backends.device.records import (
    Head, KeyGradients, Origins, Sizes, Tensor, Visits,
)
from attndsl.backends.hopper import dialect as tl
from attndsl.backends.hopper.library import (
    add_to_sums, announce, await_announced, count_up, eighths_of_sums, finish, leave, meet,
    multiply,
    places_of, slot_of, word, words,
)
from attndsl.backends.hopper.shim import tma_load
#: storing_imports
from attndsl.backends.device.library import place_of_item, positions, shift_of
#: imports

#: flags
LOG2E = tl.constexpr(1.4426950408889634)


#: functions


@gluon.jit
def place_of_kv_item(item, sizes, together):
    """Key-value tile, batch entry and kv head."""
    tile, head_of_batch = place_of_item(
        item, tl.cdiv(sizes.kv_len, BLOCK_N), sizes.batch * sizes.kv_heads, together,
        True, KV_PASS_DESCENDING,
    )
    return tile, head_of_batch // sizes.kv_heads, head_of_batch % sizes.kv_heads


@gluon.jit
def count_tiles(tile, head, sizes, shift, given):
    """As ``kv_pass_visits``, and how many tiles need the mask's code: all, beside missing keys."""
    visits = kv_pass_visits(tile, head, sizes, shift, given)
    # Missing keys are zeros, whose weights may be infinite: infinity times zero would spoil dQ.
    ragged = (tile + 1) * BLOCK_N > sizes.kv_len
    masked = visits.partial + visits.full
    if PEELED:
        masked = gl.where(ragged, masked, visits.partial)
    return visits, masked


@gluon.jit
def q_tile_of(step, visits, tile, head, sizes, shift, PARTIAL: gl.constexpr, given):
    """Index of query tile number ``step``: PARTIAL ones, then FULL ones."""
    found = 0
    if KV_PASS_HAS_FULL:
        found = kv_pass_tile(step - visits.partial, visits, tile, head, sizes, shift, given, False)
    if PARTIAL and KV_PASS_HAS_PARTIAL:
        partial = kv_pass_tile(step, visits, tile, head, sizes, shift, given, True)
        found = gl.where(step < visits.partial, partial, found)
    return found


@gluon.jit
def announce_item(turn, item, tile, b, hkv, item_s, item_full, item_empty):
    """Tell the consumers what the item is, as soon as they know what the one before was."""
    mbarrier.wait(item_empty, (turn & 1) ^ 1)
    item_s.store(words((item, tile, b, hkv)))
    mbarrier.arrive(item_full, count=1)


@gluon.jit
def load_keys(
    turn, tile, b, hkv, k_desc, v_desc, k_s, v_s, k_full, v_full,
    #: again
):
    """Load the tile of k and of v; where PERSISTENT, as soon as the consumers have left them."""
    if PERSISTENT:
        mbarrier.wait(kv_empty, (turn & 1) ^ 1)
    mbarrier.expect(k_full, k_desc.block_type.nbytes)
    tma_load(k_desc, [b, hkv, tile * BLOCK_N, 0], k_full, k_s.index(0))
    mbarrier.expect(v_full, v_desc.block_type.nbytes)
    tma_load(v_desc, [b, hkv, tile * BLOCK_N, 0], v_full, v_s.index(0))


@gluon.jit
def load_item(
    item, turn, done, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_s, k_s, v_s, do_s,
    lse_s, delta_s, k_full, v_full, q_full, do_full, q_empty, do_empty, sizes, origins, padded,
    together,
    #: kept
    #: diagonal_producer
    #: again
    #: pair_producer
    given,
):
    """Load k and v once, and every query tile's q, dO and row statistics.

    Returns the program's number of query tiles so far, ``done`` of which were before this item.
    """
    tile, b, hkv = place_of_kv_item(item, sizes, together)
    shift = shift_of(origins, Q_KIND, KV_KIND)
    if PERSISTENT:
        announce_item(turn, item, tile, b, hkv, item_s, item_full, item_empty)
    else:
        load_keys(
            turn, tile, b, hkv, k_desc, v_desc, k_s, v_s, k_full, v_full,
            #: again
        )
    group = sizes.heads // sizes.kv_heads
    count = done
    #: no_tile_before
    for member in range(0, group):
        head = Head(b, hkv * group + member, hkv)
        visits, masked = count_tiles(tile, head, sizes, shift, given)
        row = (b * sizes.heads + head.h) * padded
        #: line_of_sums
        if HAS_DROPOUT:
            drop = drop_of_item(head, sizes, given)
        for step in range(0, visits.partial + visits.full):
            first = BLOCK_M * q_tile_of(step, visits, tile, head, sizes, shift, True, given)
            stage, phase = slot_of(count, STAGES)
            mbarrier.wait(q_empty.index(stage), phase ^ 1)
            q_ready = q_full.index(stage)
            mbarrier.expect(q_ready, q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
            tma_load(lse_desc, [row + first], q_ready, lse_s.index(stage))
            tma_load(q_desc, [b, head.h, first, 0], q_ready, q_s.index(stage))
            mbarrier.wait(do_empty.index(stage), phase ^ 1)
            do_ready = do_full.index(stage)
            mbarrier.expect(do_ready, do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
            tma_load(delta_desc, [row + first], do_ready, delta_s.index(stage))
            tma_load(do_desc, [b, head.h, first, 0], do_ready, do_s.index(stage))
            #: load_pairs
            if PERSISTENT:
                # The consumers may be busy with the item before, and its keys with them.
                if count == done:
                    load_keys(
                        turn, tile, b, hkv, k_desc, v_desc, k_s, v_s, k_full, v_full,
                        #: again
                    )
            if HAS_DROPOUT:
                draw_tile(drop, count, tile * BLOCK_N, first, kept_s, kept_full, 2, BLOCK_M)
            #: add_tile_before
            count += 1
    if PERSISTENT:
        if count == done:
            load_keys(
                turn, tile, b, hkv, k_desc, v_desc, k_s, v_s, k_full, v_full,
                #: again
            )
    #: add_last_tile
    return count


@gluon.jit
def parts_of_queries(first, head, sizes, q_origin, given):
    """What is looked up by the tile's queries: by neighbouring threads, once."""
    rows = first + gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return q_parts_of_pairs(head, positions(rows, sizes.q_len, q_origin, Q_KIND), sizes, given)


@gluon.jit
def weights_of_tile(
    score, q_parts, kv_parts, lse2, columns, column2, first, kv, scale, origin, ragged, head, sizes,
    q_origin, PARTIAL: gl.constexpr, SCORES: gl.constexpr, given,
    #: pair_parts
):
    """From the tile's k . q: weights, their slopes, and the derivative of the score by its raw one.

    A softmax weight's slope is the weight itself, once delta is taken off the weight's gradient.
    ``column2`` is what the score has of each key alone, in base 2.
    """
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    rows = count_up(first, BLOCK_M, QUERIES)
    places = places_of(first, sizes.q_len, q_origin, Q_KIND, BLOCK_M, QUERIES)
    derivative = 1.0
    if HAS_ROW:
        part = row_of_score(head, places, origin, q_parts, sizes, given)
        lse2 = lse2 - part * LOG2E
    if PARTIAL or MODIFIED or HAS_DERIVATIVE or OWN_WEIGHTS:
        q = places[None, :]
        live = (rows < sizes.q_len)[None, :] & (columns < sizes.kv_len)[:, None]
        raw = score * scale
    if HAS_DERIVATIVE:
        derivative, _ = gl.broadcast(
            derivative_of_pair(
                raw, live, q_parts, kv_parts, head, q, kv, sizes, given,
                #: pair_parts
            ),
            score,
        )
    if MODIFIED:
        final, _ = gl.broadcast(
            score_of_pair(
                raw, live, q_parts, kv_parts, head, q, kv, sizes, given,
                #: pair_parts
            ),
            score,
        )
    if PARTIAL and MASKED:
        allowed = mask_of_pair(
            raw, live, q_parts, kv_parts, head, q, kv, sizes, given,
            #: pair_parts
        )
    if OWN_WEIGHTS:
        if not MODIFIED:
            final = raw
        weight, _ = gl.broadcast(
            weight_of_pair(
                final, live, q_parts, kv_parts, head, q, kv, sizes, given,
                #: pair_parts
            ),
            score,
        )
        slope, _ = gl.broadcast(
            slope_of_weight(
                final, live, q_parts, kv_parts, head, q, kv, sizes, given,
                #: pair_parts
            ),
            score,
        )
        if PARTIAL:
            if MASKED:
                live = live & allowed
            weight = gl.where(live, weight, 0.0)
            slope = gl.where(live, slope, 0.0)
    else:
        if MODIFIED:
            exponent = final * (OUTER * LOG2E)
        else:
            exponent = score * (scale * (OUTER * LOG2E))
        if HAS_COLUMN:
            exponent = exponent + column2[:, None]
        exponent = exponent - lse2[None, :]
        if PARTIAL and MASKED:
            exponent = gl.where(allowed, exponent, float("-inf"))
        if PARTIAL:
            if ragged | (first + BLOCK_M > sizes.q_len):
                exponent = gl.where(live, exponent, float("-inf"))
        weight = gl.exp2(exponent)
        slope = weight
    return weight, slope, derivative


@gluon.jit
def gradient_of_score(steep, dweight, delta):
    """From the gradient of the weights: that of the score, ``steep`` slopes of the weights by it."""
    if not OWN_WEIGHTS:
        dweight = dweight - delta[None, :]
    return steep * dweight


@gluon.jit
def store_rows(result, rows, own, b, hkv, kv_len, WIDTH: gl.constexpr):
    """Store gradients of the keys from ``own`` on into a result of WIDTH columns."""
    LAYOUT: gl.constexpr = rows.type.layout
    keys = own + gl.arange(0, rows.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    fields = gl.arange(0, rows.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    first_row = result.base + (b * result.stride_b + hkv * result.stride_h) * WIDTH
    inside = (keys < kv_len)[:, None] & (fields < WIDTH)[None, :]
    places = (keys.to(gl.int64) * result.stride_n)[:, None] * WIDTH + fields[None, :]
    gl.store(first_row + places, rows, mask=inside)
