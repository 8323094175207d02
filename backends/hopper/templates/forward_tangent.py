"""Forward kernel for Hopper that makes tangents as well: one pass over the keys for all four results.

Stands in the place of ``forward`` in a module. With a prime for the tangents, a tile has six products
where a forward's has two: S = Q K^T, S' = Q' K^T + Q K'^T, then, with weights W relative to the
maximum so far and M = W S', O += W V and O' += M V + W V'. At the end, with l the sums of W, lse' is
the sum of M over l, and out' is O' / l - lse' out. (``backends/tangent.py`` has the formulas in torch.)

Two sums of products fill the registers of a consumer, and leave none to carry weights to the next
tile. Weights are computed while the products of S' run, which come first where a score's slope varies
from pair to pair; sums of their tangents while the last three do, or before them where EARLY; and else
products of the other consumer run.
"""
# ruff: noqa: F821

#: begin
@gluon.jit
def slopes_of_scores(
    score, q, q_parts, kv_parts, kv_tile, head, sizes, kv_origin, SCORES: gl.constexpr, given,
):
    """Derivatives of a tile's final scores by ``scale * (q . k)``.

    ``score`` is that times the factor that :func:`factor_of_score` gives its head.
    """
    KEYS: gl.constexpr = gl.SliceLayout(0, SCORES)
    columns = count_up(kv_tile * BLOCK_N, BLOCK_N, KEYS)
    kv = places_of(kv_tile * BLOCK_N, sizes.kv_len, kv_origin, KV_KIND, BLOCK_N, KEYS)[None, :]
    live = (columns < sizes.kv_len)[None, :]
    slope, _ = gl.broadcast(
        derivative_of_pair(score, live, q_parts, kv_parts, head, q, kv, sizes, given),
        score,
    )
    return slope


@gluon.jit
def add_to_moved_sums(moved_sums, rounded, decays, moved, moved_words, SCORES: gl.constexpr):
    """Add a tile's tangents of weights to their sums, and ``moved_words``, what they are rounded to."""
    moved_sums = moved_sums * decays + paired(eighths_of_sums(moved))
    rounded = rounded * decays + paired(eighths_of_sums(widened(moved_words, HALF, SCORES)))
    return moved_sums, rounded


@gluon.jit
def attend(
    PART: gl.constexpr, count, kv_tile, acc, moved_acc, sums, moved_sums, rounded, peak, q, q_parts,
    zeros, q_s, k_s, v_s, q_moved_s, k_moved_s, v_moved_s, k_full, k_empty, v_full, v_empty, factor,
    speed, steepness, scale, origin, head, sizes, kv_origin, PARTIAL: gl.constexpr,
    SCORES: gl.constexpr, OUTPUT: gl.constexpr, WEIGHTS: gl.constexpr, given,
):
    """Add what tile number ``count`` has to all sums."""
    stage, phase = slot_of(count, STAGES)
    # PART, since tiles' indices are less than the number of keys, but no compiler knows: it would
    # keep in registers where each part of q lies.
    part = PART + 1 + ((kv_tile - sizes.kv_len) >> 31)
    q_part = q_s.index(part).reshape([zeros.shape[0], D])
    mbarrier.wait(k_full.index(stage), phase)
    k = k_s.index(stage).reshape([BLOCK_N, D])
    scoring = multiply(q_part, k, zeros, HEAD_DIM)
    if MOVES_Q:
        q_moved = q_moved_s.index(part).reshape([zeros.shape[0], D])
        moving = multiply(q_moved, k, zeros, HEAD_DIM)
    if MOVES_K:
        k_moved = k_moved_s.index(stage).reshape([BLOCK_N, D])
        if MOVES_Q:
            moving = warpgroup_mma(q_part, k_moved.permute((1, 0)), moving, is_async=True)
        else:
            moving = multiply(q_part, k_moved, zeros, HEAD_DIM)
    kv_parts = parts_of_keys(kv_tile, head, sizes, kv_origin, given)
    score = warpgroup_mma_wait(MOVES_Q + MOVES_K, deps=[scoring])
    if MOVES_WEIGHTS and PAIRWISE_DERIVATIVE:
        # Scores and slopes take registers, which S' leaves where it has been multiplied by these.
        moved = warpgroup_mma_wait(0, deps=[moving]) * speed
        slope = slopes_of_scores(
            score * scale, q, q_parts, kv_parts, kv_tile, head, sizes, kv_origin, SCORES, given,
        )
        # Where the slope is infinite, a score that does not move still does not.
        moved = gl.where(moved == 0.0, 0.0, moved * slope)
    score, reached = final_scores(
        score, q, q_parts, kv_parts, kv_tile, peak, factor, steepness, scale, origin, head, sizes,
        kv_origin, PARTIAL, False, SCORES, given,
    )
    weight, own, decay, peak = soften(
        score, reached, peak, float("-inf"), False, factor, PARTIAL, False,
    )
    if EARLY:
        weight_words = pack(weight, HALF)
    own = paired(own)
    decays = 1.0
    if BOUNDED:
        sums = sums + own
    else:
        decays = gl.convert_layout(decay, gl.SliceLayout(1, own.type.layout))[:, None]
        sums = sums * decays + own
        factors = gl.convert_layout(decay, gl.SliceLayout(1, OUTPUT))
        acc = scaled(acc, factors) if LAZY else acc * factors[:, None]
        moved_acc = scaled(moved_acc, factors) if LAZY else moved_acc * factors[:, None]
    if not EARLY:
        # ptxas orders nothing across a wait: with this one behind S', weights and their tangents would
        # be kept both before and after they are rounded.
        mbarrier.wait(v_full.index(stage), phase)
    if MOVES_WEIGHTS:
        if not PAIRWISE_DERIVATIVE:
            finish(sums, sizes.q_len >> 31)
            moved = warpgroup_mma_wait(0, deps=[moving]) * speed
        mbarrier.arrive(k_empty.index(stage), count=1)
        moved = weight * moved
        if PARTIAL or MODIFIED:
            # What takes no part may move by what is no number.
            moved = gl.where(weight == 0.0, 0.0, moved)
        moved_words = pack(moved, HALF)
        if EARLY:
            moved_sums, rounded = add_to_moved_sums(
                moved_sums, rounded, decays, moved, moved_words, SCORES,
            )
        moved_operand = halves(moved_words, HALF, WEIGHTS)
    else:
        mbarrier.arrive(k_empty.index(stage), count=1)
    if EARLY:
        mbarrier.wait(v_full.index(stage), phase)
    else:
        weight_words = pack(weight, HALF)
    operand = halves(weight_words, HALF, WEIGHTS)
    v = v_s.index(stage).reshape([BLOCK_N, DV])
    adding = warpgroup_mma(operand, v, acc, is_async=True)
    if MOVES_WEIGHTS:
        moved_acc = warpgroup_mma(moved_operand, v, moved_acc, is_async=True)
    if MOVES_V:
        v_moved = v_moved_s.index(stage).reshape([BLOCK_N, DV])
        moved_acc = warpgroup_mma(operand, v_moved, moved_acc, is_async=True)
    if MOVES_WEIGHTS and not EARLY:
        # While the products run.
        moved_sums, rounded = add_to_moved_sums(
            moved_sums, rounded, decays, moved, moved_words, SCORES,
        )
        finish(moved_sums, sizes.q_len >> 31)
        finish(rounded, sizes.q_len >> 31)
    acc, moved_acc = warpgroup_mma_wait(0, deps=[adding, moved_acc])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc, moved_acc, sums, moved_sums, rounded, peak


@gluon.jit
def consume_item(
    item, turn, done, PART: gl.constexpr, o_desc, LSE, q_s, k_s, v_s, q_full, k_full, k_empty,
    v_full, v_empty, scale, sizes, origins, together,
    #: output
    #: again
    #: also_read
    given,
):
    """Results of the query tile's rows number ``PART``; returns as :func:`load_item`."""
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    shift = shift_of(origins, Q_KIND, KV_KIND)
    tile, head, visits, nothing, _ = take_item(
        item, sizes, shift, together,
        #: again
        given,
    )
    begin_partial, end_partial, own_full = tiles_of_rows(
        PART, nothing, visits, tile, head, sizes, shift, given
    )
    first = tile * BLOCK_M + PART * ROWS
    rows = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    row_places = positions(rows, sizes.q_len, origins.q, Q_KIND)
    q = row_places[:, None]
    q_parts = q_parts_of_pairs(head, row_places, sizes, given)
    origin = tile * BLOCK_M + shift.q
    acc = gl.zeros([ROWS, DV], gl.float32, layout=OUTPUT)
    moved_acc = gl.zeros([ROWS, DV], gl.float32, layout=OUTPUT)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    lowest = 0.0 if BOUNDED else float("-inf")
    peak = gl.full([ROWS], lowest, gl.float32, layout=gl.SliceLayout(1, SCORES))
    sums = paired(eighths_of_sums(zeros))
    moved_sums, rounded = sums, sums
    # How fast final scores are where q . k has a speed of 1, but for what differs from pair to pair.
    speed = scale
    if HAS_DERIVATIVE and not PAIRWISE_DERIVATIVE:
        speed = speed * derivative_of_pair(
            zeros, q == q, q_parts, q_parts, head, q, q, sizes, given,
        )
    scale, factor, steepness = factors_of_scores(scale, head, sizes, given)
    tiles = visits.partial + visits.full
    if SKIPS:
        leave_tiles(done, done + begin_partial, k_full, k_empty, v_full, v_empty)
    mbarrier.wait(q_full.index(PART), turn & 1)

    if FORWARD_HAS_PARTIAL:
        kv_tile = partial_tile(begin_partial, nothing, visits, tile, head, sizes, shift, given)
        for step in range(begin_partial, end_partial):
            acc, moved_acc, sums, moved_sums, rounded, peak = attend(
                PART, done + step, kv_tile, acc, moved_acc, sums, moved_sums, rounded, peak, q,
                q_parts, zeros, q_s, k_s, v_s, q_moved_s, k_moved_s, v_moved_s, k_full, k_empty,
                v_full, v_empty, factor, speed, steepness, scale, origin, head, sizes, origins.kv,
                True, SCORES, OUTPUT, WEIGHTS, given,
            )
            kv_tile = partial_tile(step + 1, nothing, visits, tile, head, sizes, shift, given)
    if FORWARD_HAS_FULL:
        kv_tile = forward_tile(0, visits, tile, head, sizes, shift, given, False)
        for step in range(0, own_full):
            acc, moved_acc, sums, moved_sums, rounded, peak = attend(
                PART, done + visits.partial + step, kv_tile, acc, moved_acc, sums, moved_sums,
                rounded, peak, q, q_parts, zeros, q_s, k_s, v_s, q_moved_s, k_moved_s, v_moved_s,
                k_full, k_empty, v_full, v_empty, factor, speed, steepness, scale, origin, head,
                sizes, origins.kv, False, SCORES, OUTPUT, WEIGHTS, given,
            )
            kv_tile = forward_tile(step + 1, visits, tile, head, sizes, shift, given, False)

    if SKIPS:
        left = gl.where(own_full > 0, tiles, end_partial)
        leave_tiles(done + left, done + tiles, k_full, k_empty, v_full, v_empty)
    if PERSISTENT and OWN_OUTPUT:
        # The next item's rows of q may come.
        mbarrier.arrive(q_empty.index(PART), count=1)
    total, moved_total, common = whole(sums, SCORES), whole(moved_sums, SCORES), whole(
        rounded, SCORES,
    )
    lse, inverse = normalise(total, peak, row_places, origin, q_parts, head, sizes, given)
    row = (head.b * sizes.heads + head.h).to(gl.int64) * sizes.q_len
    gl.store(LSE + row + rows, lse, mask=rows < sizes.q_len)
    gl.store(LSE_MOVED + row + rows, moved_total * inverse, mask=rows < sizes.q_len)
    if OWN_OUTPUT:
        place = o_s.index(PART)
        if PERSISTENT:
            # The item before has been read from there.
            tma_wait(0)
    else:
        # The rows of q have been read for the last time.
        place = q_s.index(PART)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT))[:, None]
    out = acc * inverse
    place.reshape([ROWS, DV]).store(out.to(HALF))
    fence_async_shared()
    tma_store(o_desc, [head.b, head.h, first, 0], place)
    # Of the tangents of weights, the sum of what they were rounded to cancels better.
    common = gl.convert_layout(common, gl.SliceLayout(1, OUTPUT))[:, None] * inverse
    out_moved = moved_acc * inverse - common * out
    tma_wait(0)
    place.reshape([ROWS, DV]).store(out_moved.to(HALF))
    fence_async_shared()
    tma_store(o_moved_desc, [head.b, head.h, first, 0], place)
    if not (PERSISTENT and OWN_OUTPUT):
        tma_wait(0)
    if PERSISTENT and not OWN_OUTPUT:
        mbarrier.arrive(q_empty.index(PART), count=1)
    return done + visits.partial + visits.full


@gluon.jit
def whole(quarters, SCORES: gl.constexpr):
    """Rows' sums from four each."""
    return gl.convert_layout(gl.sum(quarters, 1), gl.SliceLayout(1, SCORES))
