"""The common part of Hopper's forward kernels: their head, their order of tiles, their softmax."""
# ruff: noqa: F821

#: begin
"""softmax(score) @ v by a producer and consumer warpgroups (arXiv 2407.08608).

Exponentials are base 2.
"""

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, warpgroup_mma, warpgroup_mma_wait,
)

from attndsl.backends.device.records import Head, LogSum, Origins, Scope, Sizes, Visits
from attndsl.backends.hopper import gluon_dialect as tl
from attndsl.backends.hopper.channels import (
    acquire_item, allocate_barriers, allocate_tiles, announce_item, await_item, consumer_release,
    consumer_wait, init_barrier, item_memory, new_barriers, pack_fields, producer_acquire,
    producer_commit, producer_expect, producer_load, producer_load_blocks, query_item, read_field, release_item, slot_of,
)
from attndsl.backends.hopper.library import (
    await_written, column_blocks, count_up, fold_partials, halves, lazy_difference, lazy_max, lazy_rescale,
    max_of_two_rows, mixed_exp2, multiply, multiply_blocks, pack, partial_row_sums, pin_before_wait, places_of, ramp,
    ramps, unpack, widened,
)
from attndsl.backends.hopper.records import (
    Call, Channel, Columns, Draw, Factors, ForwardMemory, ForwardResults, MaxRule, Parts, QueryItem,
    Rows, RunningSoftmax, RunningTangent, Slot, Tiles, Work,
)
from attndsl.backends.hopper.triton_compat import tma_load, tma_store, tma_wait, view_memory
from attndsl.backends.device.library import head_of, place_of_item, positions, shift_of
#: imports

#: flags
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(2.0**-100)
FAR = tl.constexpr(2.0**10)
MOST_PEAK = tl.constexpr(2.0**28)
MOST_TOTAL = tl.constexpr(2.0**48)
LEAST_TOTAL = tl.constexpr(2.0**-48)
ROWS = tl.constexpr(BLOCK_M // CONSUMERS)
SCORES = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
OUTPUT = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16]))
WEIGHTS = tl.constexpr(gl.DotOperandLayout(0, OUTPUT, 2))
BIAS_PARTS = tl.constexpr(CONSUMERS)
BIAS_QUERIES = tl.constexpr(ROWS)
BIAS_KEYS = tl.constexpr(BLOCK_N)


#: functions


@gluon.jit
def place_of_work(work_tile, call):
    """Query tile and head."""
    sizes = call.sizes
    tile, head_of_batch = place_of_item(
        work_tile, tl.cdiv(sizes.q_len, BLOCK_M), sizes.batch * sizes.heads, call.together,
        True, FORWARD_DESCENDING,
    )
    return tile, head_of(head_of_batch, sizes)


@gluon.jit
def parts_of_keys(kv_tile, work):
    """Values looked up by the tile's keys: by neighbouring threads, once."""
    columns = kv_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    kv = positions(columns, work.scope.sizes.kv_len, work.origins.kv, KV_KIND)
    return kv_parts_of_pairs(kv, work.scope)


@gluon.jit
def factors_of_scores(scale, work):
    """Factors of ``q . k``, then of final scores, which are in base 2 after it; steepness of columns.

    The running maximum needs a positive factor, so a negative scale is applied to the scores, and
    the sign of a factor that programs know to the queries.
    """
    scope = work.scope
    if HAS_FACTOR:
        scale = scale * factor_of_score(scope)
    if SCALED_FIRST:
        natural = OUTER
        factor = OUTER * LOG2E
    else:
        natural = scale * OUTER
        factor = scale * (OUTER * LOG2E)
    steepness = 0.0
    if HAS_STEEPNESS:
        steepness = steepness_of_column(scope)
    return Factors(scale, natural, factor, steepness)


@gluon.jit
def factor_of_final(factors):
    """The factor that takes what :func:`final_scores` returns to base 2."""
    if HAS_COLUMN:
        factor = LOG2E if WIDE else 1.0
    else:
        factor = factors.factor
    return factor


@gluon.jit
def add_column(score, places, columns, rows, row_max, factors, work, FIXED: gl.constexpr):
    """Scores with what they have of the column alone; FIXED: less the maximum.

    In base 2, unless the column may be so large that it would be infinite there.
    """
    IN_BASE_2: gl.constexpr = FIXED or not WIDE
    factor, steepness = factors.natural, factors.steepness
    if IN_BASE_2:
        factor, steepness = factors.factor, factors.steepness * LOG2E
    if FIXED:
        peaks = max_of_two_rows(peaks_of(row_max, factor_of_final(factors)))
    first = columns.tile * BLOCK_N
    KEYS: gl.constexpr = gl.SliceLayout(0, SCORES)
    if KV_KIND == "index":
        away = (places - rows.origin).to(gl.float32)
    else:
        # Positions are rows plus an offset.
        begin = positions(first, work.scope.sizes.kv_len, work.origins.kv, KV_KIND) - rows.origin
        begin = begin.to(gl.float32)
        away = ramp(begin, 1.0, BLOCK_N, KEYS)
    if HAS_STEEPNESS and KV_KIND != "index":
        if FIXED:
            column = ramps(begin * steepness - peaks, steepness, BLOCK_N, SCORES)
        else:
            column = ramp(begin * steepness, steepness, BLOCK_N, KEYS)[None, :]
    else:
        column = column_of_score(places, away, columns.parts, work.scope)[None, :]
        if IN_BASE_2:
            column = LOG2E * column
        if FIXED:
            column = column - peaks[:, None]
    return score * factor + column


@gluon.jit
def final_scores(
    score, rows, columns, row_max, factors, work, PARTIAL: gl.constexpr, FIXED: gl.constexpr
):
    """Scores of one tile without what varies with the row alone; -inf for pairs that take no part.

    Yet to be multiplied by :func:`factor_of_final`.
    Of programs with weights of their own, these, 0 for such pairs; and 0 for rows with others.
    """
    any_live = 0.0
    scope, sizes = work.scope, work.scope.sizes
    if SCALED_FIRST:
        score = score * factors.scale
    if PARTIAL or MODIFIED or HAS_COLUMN or OWN_WEIGHTS:
        KEYS: gl.constexpr = gl.SliceLayout(0, SCORES)
        first = columns.tile * BLOCK_N
        numbers = count_up(first, BLOCK_N, KEYS)
        places = places_of(first, sizes.kv_len, work.origins.kv, KV_KIND, BLOCK_N, KEYS)
        kv = places[None, :]
        live = (numbers < sizes.kv_len)[None, :]
        parts = Parts(rows.parts, columns.parts, columns.pairs, first)
        if PARTIAL and MASKED:
            allowed = mask_of_pair(score, live, parts, rows.q, kv, scope)
        if MODIFIED:
            score, _ = gl.broadcast(score_of_pair(score, live, parts, rows.q, kv, scope), score)
        if HAS_COLUMN:
            score = add_column(score, places, columns, rows, row_max, factors, work, FIXED)
        if OWN_WEIGHTS:
            score, _ = gl.broadcast(weight_of_pair(score, live, parts, rows.q, kv, scope), score)
            if PARTIAL:
                if MASKED:
                    live = live & allowed
                live, _ = gl.broadcast(live, score)
                score = gl.where(live, score, 0.0)
                any_live = gl.max(gl.where(live, 0.0, float("-inf")), 1)
        elif PARTIAL:
            if MASKED:
                score = gl.where(allowed, score, float("-inf"))
            if (columns.tile + 1) * BLOCK_N > sizes.kv_len:
                score = gl.where(live, score, float("-inf"))
    return score, any_live


@gluon.jit
def soften(
    score, any_live, row_max, rule, factor, PARTIAL: gl.constexpr, FIXED: gl.constexpr
):
    """Weights of one tile; their sums, decay, new maximum, which is at least ``rule.least_max``.

    ``factor`` takes scores to base 2, and maxima too if they are WIDE. FIXED: weights are relative to the maximum so
    far, and may be larger than 1. Where columns have a part, scores are without that maximum, which
    a thread's two rows share if ``rule.uses_fixed_max``.
    """
    if OWN_WEIGHTS:
        p = score
        decay = 1.0
        new_max = gl.maximum(row_max, any_live)
    elif BOUNDED:
        # No score is so large that its weight would not fit, whatever the others of its row are.
        if MIXED and not PARTIAL:
            p = mixed_exp2(score * factor, MIXED)
        else:
            p = gl.exp2(score * factor)
        decay, new_max = 1.0, row_max
    elif FIXED:
        if not HAS_COLUMN:
            score = score * factor - peaks_of(row_max, factor)[:, None]
        p = gl.exp2(score)
        decay, new_max = 1.0, row_max
    else:
        highest = gl.max(score, 1)
        if not (WIDE or HAS_COLUMN):
            highest = highest * factor
        if FIXED_MAX:
            highest = gl.maximum(highest, rule.least_max)
            if HAS_COLUMN:
                highest = gl.where(rule.uses_fixed_max, max_of_two_rows(highest), highest)
        if WIDE:
            new_max = gl.maximum(row_max, highest)
            top = gl.where(new_max == float("-inf"), 0.0, new_max)
            # One multiply-add takes off a maximum in base 2. Its rounding error would be a factor
            # of all weights of a row that is far from 0, so there the maximum is taken off first.
            shift = top * factor
            far = gl.abs(shift) > FAR
            score = lazy_difference(score, gl.where(far, top, 0.0))
            p = gl.exp2(score * factor - gl.where(far, 0.0, shift)[:, None])
            decay = gl.exp2((row_max - top) * factor)
        else:
            new_max = lazy_max(row_max, highest) if LAZY else gl.maximum(row_max, highest)
            shift = new_max
            if (PARTIAL and MASKED) or MODIFIED or HAS_COLUMN:
                shift = gl.where(new_max == float("-inf"), 0.0, new_max)
            if HAS_COLUMN:
                p = gl.exp2(score - shift[:, None])
            else:
                p = gl.exp2(score * factor - shift[:, None])
            decay = gl.exp2(row_max - shift)
    return p, partial_row_sums(p), decay, new_max


@gluon.jit
def natural_peak(row_max, factors):
    """The peak that weights of rows are relative to, in natural units; and what rounding took from it."""
    found, lost = row_max, 0.0
    if WIDE:
        factor = factor_of_final(factors)
        natural = 1.0 if HAS_COLUMN else factors.natural
        # See ``soften``.
        peak = row_max * factor
        far = gl.abs(peak) > FAR
        peak = gl.where(far, row_max, peak)
        # From base 2 to natural units, and what rounding takes from that.
        usual = natural / factor
        ratio = gl.where(far, natural, usual)
        ratio_lost = gl.where(far, 0.0, gl.fma(-usual, factor, natural) / factor)
        found = peak * ratio
        lost = gl.fma(peak, ratio, -found) + peak * ratio_lost
        lost = gl.where(gl.abs(found) < float("inf"), lost, 0.0)
    elif not BOUNDED:
        found = row_max * LN2
    return found, lost


@gluon.jit
def peaks_of(row_max, factor):
    """Maxima in base 2."""
    return row_max * factor if WIDE else row_max


@gluon.jit
def store_lse(pointer, row, lse, numbers, sizes):
    """Store the ``LogSum`` of a head's rows, the first of which is number ``row`` of all.

    Near 0 it is one number.
    """
    inside = numbers < sizes.q_len
    whole = lse.shift + lse.rest
    is_one_number = gl.abs(whole) <= FAR
    rests = (gl.to_tensor(sizes.batch) * sizes.heads).to(gl.int64) * sizes.q_len
    gl.store(pointer + row + numbers, gl.where(is_one_number, whole, lse.shift), mask=inside)
    gl.store(pointer + rests + row + numbers, gl.where(is_one_number, 0.0, lse.rest), mask=inside)


@gluon.jit
def normalise(total, row_max, rows, factors, work):
    """Log-sum-exp of each row, and the factor of sums by its weights, from these and its maximum.

    A row with no live pair gives zeros and a log-sum-exp of -inf, whose rest is 0.
    """
    scope = work.scope
    empty = total == 0.0
    if HAS_ROW:
        part = row_of_score(rows.places, rows.origin, rows.parts, scope)
        empty = empty | (part == float("-inf"))
    decay = 1.0
    peak, lost = natural_peak(row_max, factors)
    if HAS_SINK:
        sink = sink_of_head(scope)
        if HAS_ROW:
            # Weights are without the row's part, so that their sums are.
            sink = sink - part
        top = gl.where(empty, 0.0, gl.maximum(peak, sink))
        decay = gl.exp2((peak - top + lost) * LOG2E)
        total = total * decay + gl.exp2((sink - top) * LOG2E)
        peak, lost = gl.where(empty, peak, top), 0.0
    total = gl.where(empty, 1.0, total)
    if not (WIDE or BOUNDED):
        # Beyond, rounding errors of maxima are exponents that weights have no room for. All weights
        # of such a row may be 0, as of one with no live pair. See M64 in docs/dev/measured.md.
        too_far = (gl.abs(row_max) > MOST_PEAK) & (gl.abs(row_max) < float("inf"))
        total = gl.where(too_far, float("nan"), total)
    rest = gl.log(total) + lost
    inverse = decay / total
    if HAS_ROW:
        # A sum and what rounding takes from it: D. Knuth, TAOCP, vol. 2, 4.2.2.
        whole = peak + part
        own = whole - part
        rest = rest + ((peak - own) + (part - (whole - own)))
        peak = whole
        # Infinite and NaN parts do to their rows what they would do to all their pairs.
        inverse = gl.where(gl.abs(part) < float("inf"), inverse, float("nan"))
        inverse = gl.where(empty, 0.0, inverse)
    if HAS_ROW or BOUNDED:
        peak = gl.where(empty, float("-inf"), peak)
    if HAS_ROW:
        rest = gl.where(gl.abs(peak) < float("inf"), rest, 0.0)
    return LogSum(peak, rest), inverse
