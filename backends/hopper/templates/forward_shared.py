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

from attndsl.backends.device.records import Head, Origins, Sizes, Visits
from attndsl.backends.hopper import dialect as tl
from attndsl.backends.hopper.library import (
    await_written, count_up, eighths_of_sums, finish, halves, joint, line, lines, mixed_exp2,
    multiply,
    pack, paired, places_of, raised, scaled, slot_of, unpack, widened, word, words,
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


#: functions


@gluon.jit
def place_of_q_item(item, sizes, together):
    """Query tile and head."""
    tile, head_of_batch = place_of_item(
        item, tl.cdiv(sizes.q_len, BLOCK_M), sizes.batch * sizes.heads, together,
        True, FORWARD_DESCENDING,
    )
    return tile, head_of(head_of_batch, sizes)


@gluon.jit
def parts_of_keys(kv_tile, head, sizes, kv_origin, given):
    """What is looked up by the tile's keys: by neighbouring threads, once."""
    columns = kv_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return kv_parts_of_pairs(
        head, positions(columns, sizes.kv_len, kv_origin, KV_KIND), sizes, given,
    )


@gluon.jit
def factors_of_scores(scale, head, sizes, given):
    """Of ``q . k`` first, of final scores then, which are in base 2 after it; steepness of columns.

    The running maximum needs a positive factor, so a negative scale is applied to the scores, and
    the sign of a factor that programs know to the queries.
    """
    if HAS_FACTOR:
        scale = scale * factor_of_score(head, sizes, given)
    if SCALED_FIRST:
        factor = OUTER * LOG2E
    else:
        factor = scale * (OUTER * LOG2E)
    steepness = 0.0
    if HAS_STEEPNESS:
        steepness = LOG2E * steepness_of_column(head, sizes, given)
    return scale, factor, steepness


@gluon.jit
def final_scores(
    score, q, q_parts, kv_parts, kv_tile, peak, factor, steepness, scale, origin, head, sizes,
    kv_origin, PARTIAL: gl.constexpr, FIXED: gl.constexpr, SCORES: gl.constexpr, given,
    #: pair_parts
):
    """Scores of one tile without what varies with the row alone; -inf for pairs that take no part.

    In base 2 where a column's part has been added, else yet to be multiplied by ``factor``.
    Of programs with weights of their own, these, 0 for such pairs; and 0 for rows with others.
    """
    reached = 0.0
    if SCALED_FIRST:
        score = score * scale
    if PARTIAL or MODIFIED or HAS_COLUMN or OWN_WEIGHTS:
        KEYS: gl.constexpr = gl.SliceLayout(0, SCORES)
        columns = count_up(kv_tile * BLOCK_N, BLOCK_N, KEYS)
        places = places_of(kv_tile * BLOCK_N, sizes.kv_len, kv_origin, KV_KIND, BLOCK_N, KEYS)
        kv = places[None, :]
        live = (columns < sizes.kv_len)[None, :]
        if PARTIAL and MASKED:
            allowed = mask_of_pair(
                score, live, q_parts, kv_parts, head, q, kv, sizes, given,
                #: pair_parts
            )
        if MODIFIED:
            score, _ = gl.broadcast(
                score_of_pair(
                    score, live, q_parts, kv_parts, head, q, kv, sizes, given,
                    #: pair_parts
                ),
                score,
            )
        if HAS_COLUMN:
            if KV_KIND == "index":
                away = (places - origin).to(gl.float32)
            else:
                # Positions are rows plus an offset.
                begin = positions(kv_tile * BLOCK_N, sizes.kv_len, kv_origin, KV_KIND) - origin
                begin = begin.to(gl.float32)
                away = line(begin, 1.0, BLOCK_N, gl.SliceLayout(0, SCORES))
            if HAS_STEEPNESS and KV_KIND != "index":
                if FIXED:
                    column = lines(begin * steepness - joint(peak), steepness, BLOCK_N, SCORES)
                else:
                    column = line(begin * steepness, steepness, BLOCK_N, gl.SliceLayout(0, SCORES))[None, :]
            else:
                column = LOG2E * column_of_score(head, places, away, kv_parts, sizes, given)[None, :]
                if FIXED:
                    column = column - joint(peak)[:, None]
            score = score * factor + column
        if OWN_WEIGHTS:
            score, _ = gl.broadcast(
                weight_of_pair(
                    score, live, q_parts, kv_parts, head, q, kv, sizes, given,
                    #: pair_parts
                ),
                score,
            )
            if PARTIAL:
                if MASKED:
                    live = live & allowed
                live, _ = gl.broadcast(live, score)
                score = gl.where(live, score, 0.0)
                reached = gl.max(gl.where(live, 0.0, float("-inf")), 1)
        elif PARTIAL:
            if MASKED:
                score = gl.where(allowed, score, float("-inf"))
            if (kv_tile + 1) * BLOCK_N > sizes.kv_len:
                score = gl.where(live, score, float("-inf"))
    return score, reached


@gluon.jit
def soften(
    score, reached, peak, floor, anchored, factor, PARTIAL: gl.constexpr, FIXED: gl.constexpr,
):
    """Weights of one tile; their sums, decay, new maximum, which is at least ``floor``.

    FIXED: they are relative to the maximum so far, and may be larger than 1. Where columns have a
    part, it is without that maximum, which a thread's two rows share if ``anchored``.
    """
    if OWN_WEIGHTS:
        weight = score
        decay = 1.0
        new_peak = gl.maximum(peak, reached)
    elif BOUNDED:
        # No score is so large that its weight would not fit, whatever the others of its row are.
        if MIXED and not PARTIAL:
            weight = mixed_exp2(score * factor, MIXED)
        else:
            weight = gl.exp2(score * factor)
        decay, new_peak = 1.0, peak
    elif FIXED:
        if not HAS_COLUMN:
            score = score * factor - peak[:, None]
        weight = gl.exp2(score)
        decay, new_peak = 1.0, peak
    else:
        highest = gl.max(score, 1)
        if not HAS_COLUMN:
            highest = highest * factor
        if ANCHORED:
            highest = gl.maximum(highest, floor)
            if HAS_COLUMN:
                highest = gl.where(anchored, joint(highest), highest)
        new_peak = raised(peak, highest) if LAZY else gl.maximum(peak, highest)
        shift = new_peak
        if (PARTIAL and MASKED) or MODIFIED or HAS_COLUMN:
            shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
        if HAS_COLUMN:
            weight = gl.exp2(score - shift[:, None])
        else:
            weight = gl.exp2(score * factor - shift[:, None])
        decay = gl.exp2(peak - shift)
    return weight, eighths_of_sums(weight), decay, new_peak


@gluon.jit
def normalise(total, peak, row_places, origin, q_parts, head, sizes, given):
    """Log-sum-exp of each row, and the factor of sums by its weights, from these and its maximum.

    A row with no live pair gives zeros and a log-sum-exp of -inf.
    """
    empty = total == 0.0
    if HAS_ROW:
        part = row_of_score(head, row_places, origin, q_parts, sizes, given)
        empty = empty | (part == float("-inf"))
    kept = 1.0
    if HAS_SINK:
        sink = LOG2E * sink_of_head(head, sizes, given)
        if HAS_ROW:
            # Weights are without the row's part, so that their sums are.
            sink = sink - LOG2E * part
        top = gl.where(empty, 0.0, gl.maximum(peak, sink))
        kept = gl.exp2(peak - top)
        total = total * kept + gl.exp2(sink - top)
        peak = gl.where(empty, peak, top)
    total = gl.where(empty, 1.0, total)
    lse = peak * LN2 + gl.log(total)
    inverse = kept / total
    if HAS_ROW:
        lse = lse + part
        # Infinite and NaN parts do to their rows what they would do to all their pairs.
        inverse = gl.where(gl.abs(part) < float("inf"), inverse, float("nan"))
        inverse = gl.where(empty, 0.0, inverse)
    if HAS_ROW or BOUNDED:
        lse = gl.where(empty, float("-inf"), lse)
    return lse, inverse
