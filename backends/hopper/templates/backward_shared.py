"""The common part of Hopper's backward kernels: loads, and weights from a tile of k . q.

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
    fence_async_shared, warpgroup_mma, warpgroup_mma_wait,
)

from attndsl.backends.device.records import (
    Head, KeyGradients, LogSum, Origins, Scope, Sizes, Tensor, Visits,
)
from attndsl.backends.hopper import gluon_dialect as tl
from attndsl.backends.hopper.channels import (
    acquire_item, allocate_barriers, allocate_tiles, announce_item, await_item, consumer_release,
    consumer_release_by, consumer_wait, init_barrier, item_memory, key_item, new_barrier,
    new_barriers, pack_fields, producer_acquire, producer_commit, producer_expect, release_item,
    slot_of, turn_at,
)
from attndsl.backends.hopper.library import (
    add_to_sums, await_turn, count_turn, count_up, lazy_shift, multiply, partial_row_sums,
    pin_before_wait, places_of, signal_p, sync_consumers, wait_for_p,
)
from attndsl.backends.hopper.records import (
    BackwardMemory, BackwardResults, Call, Channel, Kept, KeyItem, KeyRows, KeySums, Parts, Slot,
    Tiles, Turn, Work,
)
from attndsl.backends.hopper.triton_compat import tma_load, tma_store, tma_wait
from attndsl.backends.device.library import place_of_item, positions, shift_of
#: imports

#: flags
LOG2E = tl.constexpr(1.4426950408889634)
SCORES = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16]))
BIAS_PARTS = tl.constexpr(1 if ABOVE_128 else 2)
BIAS_QUERIES = tl.constexpr(BLOCK_M)
BIAS_KEYS = tl.constexpr(BLOCK_N // BIAS_PARTS)


#: functions


@gluon.jit
def place_of_work(work_tile, call):
    """Key-value tile, batch entry, and the head that it is of: a kv head, or HEADS_APART a head."""
    sizes = call.sizes
    heads = sizes.heads if HEADS_APART else sizes.kv_heads
    tile, head_of_batch = place_of_item(
        work_tile, tl.cdiv(sizes.kv_len, BLOCK_N), sizes.batch * heads, call.together, True,
        KV_PASS_DESCENDING,
    )
    return tile, head_of_batch // heads, head_of_batch % heads


@gluon.jit
def number_of_work_tiles(sizes):
    """Work tiles of a call: of each kv head, or HEADS_APART of each head."""
    heads = sizes.heads if HEADS_APART else sizes.kv_heads
    return tl.cdiv(sizes.kv_len, BLOCK_N) * sizes.batch * heads


@gluon.jit
def heads_of_work(own_head, sizes):
    """The kv head of a work tile of ``own_head``, its first query head, and their number."""
    group = sizes.heads // sizes.kv_heads
    hkv, first, number = own_head, own_head * group, group
    if HEADS_APART:
        hkv, first, number = own_head // group, own_head, 1
    return hkv, first, number


@gluon.jit
def count_tiles(tile, shift, scope):
    """``kv_pass_visits``, and how many tiles need the mask's code: all, beside missing keys."""
    visits = kv_pass_visits(tile, shift, scope)
    # Missing keys are zeros, whose weights may be infinite: infinity times zero would spoil dQ.
    ragged = (tile + 1) * BLOCK_N > scope.sizes.kv_len
    masked = visits.partial + visits.full
    if PEELED:
        masked = gl.where(ragged, masked, visits.partial)
    return visits, masked


@gluon.jit
def tile_at(step, work, PARTIAL: gl.constexpr):
    """Index of tile number ``step`` of the PARTIAL ones, or of the FULL ones."""
    return kv_pass_tile(step, work.visits, work.tile, work.shift, work.scope, PARTIAL)


@gluon.jit
def q_tile_at(step, work, PARTIAL: gl.constexpr):
    """Index of query tile number ``step``: PARTIAL ones, then FULL ones."""
    found = 0
    if KV_PASS_HAS_FULL:
        found = tile_at(step - work.visits.partial, work, False)
    if PARTIAL and KV_PASS_HAS_PARTIAL:
        partial = tile_at(step, work, True)
        found = gl.where(step < work.visits.partial, partial, found)
    return found


@gluon.jit
def load_keys(work_index, tile, b, hkv, k, v):
    """Load the tile of k and of v, as soon as the consumers have left both."""
    slot = slot_of(work_index, 1)
    producer_acquire(k, slot)
    ready = producer_expect(k, slot, k.desc.block_type.nbytes)
    tma_load(k.desc, [b, hkv, tile * BLOCK_N, 0], ready, k.data.index(0))
    ready = producer_expect(v, slot, v.desc.block_type.nbytes)
    tma_load(v.desc, [b, hkv, tile * BLOCK_N, 0], ready, v.data.index(0))


@gluon.jit
def load_query_tile(tile_index, first, row, head, memory):
    """Load rows of q and of dO from ``first`` on, and their statistics: a head's begin at ``row``."""
    slot, place = slot_of(tile_index, STAGES), [head.b, head.h, first, 0]
    load_rows(slot, place, row, memory.q, memory.lse)
    load_rows(slot, place, row, memory.do, memory.delta)


@gluon.jit
def load_rows(slot, place, row, rows, statistics):
    """Load rows of q or of dO and their statistics, as soon as the consumers have left the stage."""
    producer_acquire(rows, slot)
    BYTES: gl.constexpr = rows.desc.block_type.nbytes + statistics.desc.block_type.nbytes
    ready = producer_expect(rows, slot, BYTES)
    tma_load(statistics.desc, [row + place[2]], ready, statistics.data.index(slot.stage))
    tma_load(rows.desc, place, ready, rows.data.index(slot.stage))


@gluon.jit
def load_work(work_tile, work_index, tiles_before, memory, call):
    """Load k and v once, and every query tile's q, dO and row statistics.

    Returns the program's number of query tiles so far, ``tiles_before`` of which were before this
    work tile.
    """
    sizes, given = call.sizes, call.given
    tile, b, own_head = place_of_work(work_tile, call)
    hkv, first_head, members = heads_of_work(own_head, sizes)
    shift = shift_of(call.origins, Q_KIND, KV_KIND)
    if PERSISTENT:
        acquire_item(memory.items, work_index)
        announce_item(KeyItem(work_tile, tile, b, own_head), memory.items)
    else:
        load_keys(work_index, tile, b, hkv, memory.k, memory.v)
    tile_index = tiles_before
    if ADDS_DIAGONALS:
        sums_before = given.DISTANCE_SUMS
    for member in range(0, members):
        head = Head(b, first_head + member, hkv)
        scope = Scope(head, sizes, given)
        visits, masked = count_tiles(tile, shift, scope)
        work = Work(tile, scope, visits, None, None, call.origins, shift)
        if TAKES_TURNS:
            ahead = tiles_ahead(masked, work)
        row = (b * sizes.heads + head.h) * call.padded
        if ADDS_DIAGONALS:
            line = line_of_sums(tile, head, call)
        if HAS_DROPOUT:
            drop = drop_of_item(scope)
        for step in range(0, visits.partial + visits.full):
            if TAKES_TURNS:
                first = BLOCK_M * q_tile_in_turn(step, ahead, masked, work)
            else:
                first = BLOCK_M * q_tile_at(step, work, True)
            load_query_tile(tile_index, first, row, head, memory)
            if TAKES_TURNS:
                follow_turns(tile_index, tile, first // BLOCK_M, work, memory)
            if HAS_BIAS:
                load_bias(
                    tile_index, step < masked if BIAS_IN_MASK else True, head, first + shift.q,
                    tile * BLOCK_N + shift.kv, memory.bias,
                )
            if PERSISTENT:
                # The consumers may be busy with the work tile before, and its keys with them.
                if tile_index == tiles_before:
                    load_keys(work_index, tile, b, hkv, memory.k, memory.v)
            if HAS_DROPOUT:
                draw_tile(drop, tile_index, tile * BLOCK_N, first, memory.kept, 2, BLOCK_M)
            if ADDS_DIAGONALS:
                if tile_index > tiles_before:
                    add_tile(tile_index - 1, sums_before, memory)
                sums_before = line + first
            tile_index += 1
    if PERSISTENT:
        if tile_index == tiles_before:
            if TAKES_TURNS:
                finish_turns(tile_index, memory, given)
            load_keys(work_index, tile, b, hkv, memory.k, memory.v)
    if ADDS_DIAGONALS:
        if tile_index > tiles_before:
            add_tile(tile_index - 1, sums_before, memory)
    return tile_index


@gluon.jit
def keys_of_tile(first, NUMBER: gl.constexpr, sizes, origins):
    """Numbers and logical positions of a consumer's keys from ``first`` on."""
    numbers = first + gl.arange(0, NUMBER, layout=gl.SliceLayout(1, SCORES))
    return numbers, positions(numbers, sizes.kv_len, origins.kv, KV_KIND)


@gluon.jit
def keys_of_head(first, numbers, places, kv, origin, ragged, scale, work):
    """A consumer's keys as one query head sees them."""
    scope = work.scope
    kv_parts = kv_parts_of_pairs(places, scope)
    away = (places - origin).to(gl.float32)
    column = column_of_score(places, away, kv_parts, scope)
    if HAS_FACTOR:
        scale = scale * factor_of_score(scope)
    return KeyRows(first, numbers, kv, kv_parts, column, origin, ragged, scale)


@gluon.jit
def parts_of_queries(first, work):
    """Values looked up by the tile's queries: by neighbouring threads, once."""
    rows = first + gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [4], [0]))
    q = positions(rows, work.scope.sizes.q_len, work.origins.q, Q_KIND)
    return q_parts_of_pairs(q, work.scope)


@gluon.jit
def place_of_shifts(shifts, head, first, sizes, padded):
    """Pointer to the shifts of a query tile's ``LogSum``; themselves, where the tile needs them."""
    found = None
    if WIDE_LINES or SHIFTED:
        found = shifts + (head.b * sizes.heads + head.h).to(gl.int64) * padded + first
    if WIDE_LINES:
        found = gl.load(found + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, SCORES)))
    return found


@gluon.jit
def exponents_of_tile(final, lse, keys, part):
    """Logarithms of weights in base 2, dead pairs' too. ``part`` is what scores have of the row.

    ``lse`` has what :func:`place_of_shifts` returns, and the query tile's rests.
    """
    factor = OUTER if MODIFIED else keys.scale * OUTER
    if WIDE_LINES:
        # What lines add may be so large that differences come first.
        shift = lse.shift
        if HAS_ROW:
            shift = shift - part
        natural = final * factor
        if HAS_COLUMN:
            natural = natural + keys.column[:, None]
        exponent = (natural - shift[None, :]) * LOG2E - lse.rest[None, :]
    else:
        rest = lse.rest
        if SHIFTED:
            final = lazy_shift(final, rest, lse.shift, factor)
        exponent = final * (factor * LOG2E)
        if HAS_COLUMN:
            exponent = exponent + (LOG2E * keys.column)[:, None]
        if HAS_ROW:
            rest = rest - part * LOG2E
        exponent = exponent - rest[None, :]
    return exponent


@gluon.jit
def weights_of_tile(score, first, parts, lse, keys, work, PARTIAL: gl.constexpr):
    """From the tile's k . q: weights, their slopes, and the derivative of the score by its raw one.

    A softmax weight's slope is the weight itself, once delta is taken off the weight's gradient.
    """
    scope, sizes, kv = work.scope, work.scope.sizes, keys.kv
    QUERIES: gl.constexpr = gl.SliceLayout(0, SCORES)
    rows = count_up(first, BLOCK_M, QUERIES)
    places = places_of(first, sizes.q_len, work.origins.q, Q_KIND, BLOCK_M, QUERIES)
    derivative = 1.0
    if HAS_ROW:
        part = row_of_score(places, keys.origin, parts.q, scope)
    if PARTIAL or MODIFIED or HAS_DERIVATIVE or OWN_WEIGHTS:
        q = places[None, :]
        live = (rows < sizes.q_len)[None, :] & (keys.numbers < sizes.kv_len)[:, None]
        raw = score * keys.scale
    if HAS_DERIVATIVE:
        derivative, _ = gl.broadcast(derivative_of_pair(raw, live, parts, q, kv, scope), score)
    if MODIFIED:
        final, _ = gl.broadcast(score_of_pair(raw, live, parts, q, kv, scope), score)
    if PARTIAL and MASKED:
        allowed = mask_of_pair(raw, live, parts, q, kv, scope)
    if OWN_WEIGHTS:
        if not MODIFIED:
            final = raw
        p, _ = gl.broadcast(weight_of_pair(final, live, parts, q, kv, scope), score)
        p_slope, _ = gl.broadcast(slope_of_weight(final, live, parts, q, kv, scope), score)
        if PARTIAL:
            if MASKED:
                live = live & allowed
            p = gl.where(live, p, 0.0)
            p_slope = gl.where(live, p_slope, 0.0)
    else:
        exponent = exponents_of_tile(
            final if MODIFIED else score, lse, keys, part if HAS_ROW else None
        )
        if PARTIAL and MASKED:
            exponent = gl.where(allowed, exponent, float("-inf"))
        if PARTIAL:
            if keys.ragged | (first + BLOCK_M > sizes.q_len):
                exponent = gl.where(live, exponent, float("-inf"))
        p = gl.exp2(exponent)
        p_slope = p
    return p, p_slope, derivative


@gluon.jit
def gradient_of_score(p_slope, dp, delta):
    """From the gradient of the weights: that of the score, ``p_slope`` slopes of the weights by it."""
    if not OWN_WEIGHTS:
        dp = dp - delta[None, :]
    if SPARES_DEAD:
        # Sums of several sequences' pairs must not take in 0 times what is not finite.
        return gl.where(p_slope == 0.0, 0.0, p_slope * dp)
    else:
        return p_slope * dp


@gluon.jit
def store_rows(NUMBER: gl.constexpr, result, rows, own, b, hkv, call, WIDTH: gl.constexpr):
    """Store gradients of the keys from ``own`` on into result NUMBER, dK or dV, of WIDTH columns."""
    LAYOUT: gl.constexpr = rows.type.layout
    kv_len = call.sizes.kv_len
    keys = own + gl.arange(0, rows.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    fields = gl.arange(0, rows.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    first_row = result.base + (b * result.stride_b + hkv * result.stride_h) * WIDTH
    inside = (keys < kv_len)[:, None] & (fields < WIDTH)[None, :]
    places = (keys.to(gl.int64) * result.stride_n)[:, None] * WIDTH + fields[None, :]
    gl.store(first_row + places, rows, mask=inside)
    if CHECKS_RESULTS:
        # NaN, or 0 if all of the row is finite.
        head = (NUMBER * call.sizes.batch + b) * call.sizes.kv_heads + hkv
        checks = call.given.CHECKS + head.to(gl.int64) * kv_len
        gl.store(checks + keys, gl.sum(rows.to(gl.float32) * 0.0, 1), mask=keys < kv_len)
