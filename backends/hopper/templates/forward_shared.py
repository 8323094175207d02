"""What the forward kernels for Hopper share: their head, their order of tiles, their softmax."""
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
    fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait,
)

from attndsl.backends.device.records import Head, Origins, Scope, Sizes, Visits
from attndsl.backends.hopper import dialect as tl
from attndsl.backends.hopper.library import (
    await_written, count_up, fold_partials, halves, lazy_max, lazy_rescale, max_of_two_rows,
    mixed_exp2, multiply, pack, pack_fields, partial_row_sums, pin_before_wait, places_of, ramp,
    ramps, read_field, release, slot_of, unpack, widened,
)
from attndsl.backends.hopper.records import (
    Call, Columns, Draw, Factors, ForwardMemory, ForwardResults, MaxRule, Parts, Ring, Rows,
    RunningSoftmax, RunningTangent, Tangent, Work,
)
from attndsl.backends.hopper.shim import tma_load, tma_store, tma_wait
from attndsl.backends.device.library import head_of, place_of_item, positions, shift_of
#: imports

#: flags
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
TINY = tl.constexpr(2.0**-100)
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
    """What is looked up by the tile's keys: by neighbouring threads, once."""
    columns = kv_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    kv = positions(columns, work.scope.sizes.kv_len, work.origins.kv, KV_KIND)
    return kv_parts_of_pairs(kv, work.scope)


@gluon.jit
def factors_of_scores(scale, work):
    """Of ``q . k`` first, of final scores then, which are in base 2 after it; steepness of columns.

    The running maximum needs a positive factor, so a negative scale is applied to the scores, and
    the sign of a factor that programs know to the queries.
    """
    scope = work.scope
    if HAS_FACTOR:
        scale = scale * factor_of_score(scope)
    if SCALED_FIRST:
        factor = OUTER * LOG2E
    else:
        factor = scale * (OUTER * LOG2E)
    steepness = 0.0
    if HAS_STEEPNESS:
        steepness = LOG2E * steepness_of_column(scope)
    return Factors(scale, factor, steepness)


@gluon.jit
def add_column(score, places, columns, rows, row_max, factors, work, FIXED: gl.constexpr):
    """Scores in base 2 with what they have of the column alone; FIXED: less the maximum."""
    factor, steepness = factors.factor, factors.steepness
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
            column = ramps(begin * steepness - max_of_two_rows(row_max), steepness, BLOCK_N, SCORES)
        else:
            column = ramp(begin * steepness, steepness, BLOCK_N, KEYS)[None, :]
    else:
        column = LOG2E * column_of_score(places, away, columns.parts, work.scope)[None, :]
        if FIXED:
            column = column - max_of_two_rows(row_max)[:, None]
    return score * factor + column


@gluon.jit
def final_scores(
    score, rows, columns, row_max, factors, work, PARTIAL: gl.constexpr, FIXED: gl.constexpr
):
    """Scores of one tile without what varies with the row alone; -inf for pairs that take no part.

    In base 2 where a column's part has been added, else yet to be multiplied by the factor.
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
        parts = Parts(rows.parts, columns.parts, columns.pairs)
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

    FIXED: they are relative to the maximum so far, and may be larger than 1. Where columns have a
    part, it is without that maximum, which a thread's two rows share if ``rule.uses_fixed_max``.
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
            score = score * factor - row_max[:, None]
        p = gl.exp2(score)
        decay, new_max = 1.0, row_max
    else:
        highest = gl.max(score, 1)
        if not HAS_COLUMN:
            highest = highest * factor
        if FIXED_MAX:
            highest = gl.maximum(highest, rule.least_max)
            if HAS_COLUMN:
                highest = gl.where(rule.uses_fixed_max, max_of_two_rows(highest), highest)
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
def normalise(total, row_max, rows, work):
    """Log-sum-exp of each row, and the factor of sums by its weights, from these and its maximum.

    A row with no live pair gives zeros and a log-sum-exp of -inf.
    """
    scope = work.scope
    empty = total == 0.0
    if HAS_ROW:
        part = row_of_score(rows.places, rows.origin, rows.parts, scope)
        empty = empty | (part == float("-inf"))
    decay = 1.0
    if HAS_SINK:
        sink = LOG2E * sink_of_head(scope)
        if HAS_ROW:
            # Weights are without the row's part, so that their sums are.
            sink = sink - LOG2E * part
        top = gl.where(empty, 0.0, gl.maximum(row_max, sink))
        decay = gl.exp2(row_max - top)
        total = total * decay + gl.exp2(sink - top)
        row_max = gl.where(empty, row_max, top)
    total = gl.where(empty, 1.0, total)
    lse = row_max * LN2 + gl.log(total)
    inverse = decay / total
    if HAS_ROW:
        lse = lse + part
        # Infinite and NaN parts do to their rows what they would do to all their pairs.
        inverse = gl.where(gl.abs(part) < float("inf"), inverse, float("nan"))
        inverse = gl.where(empty, 0.0, inverse)
    if HAS_ROW or BOUNDED:
        lse = gl.where(empty, float("-inf"), lse)
    return lse, inverse
