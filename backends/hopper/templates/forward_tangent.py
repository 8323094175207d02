"""Forward kernel for Hopper that makes tangents as well: one pass over the keys for all four results.

Stands in the place of ``forward`` in a module. With a prime for the tangents, a tile has six products
where a forward's has two: S = Q K^T, S' = Q' K^T + Q K'^T, then, with weights W relative to the
maximum so far and M = W S', O += W V and O' += M V + W V'. At the end, with l the sums of W, lse' is
the sum of M over l, and out' is O' / l - lse' out. (``backends/dense/dense_jvp.py`` has the formulas in
torch.)

Two sums of products fill the registers of a consumer, and leave none to carry weights to the next
tile. Weights are computed while the products of S' run, which come first where a score's slope varies
from pair to pair; sums of their tangents while the last three do, or before them where EARLY; and else
products of the other consumer run.
"""
# ruff: noqa: F821

#: begin
@gluon.jit
def slopes_of_scores(score, rows, columns, work):
    """Derivatives of a tile's final scores by ``scale * (q . k)``.

    ``score`` is that times the factor that :func:`factor_of_score` gives its head.
    """
    sizes = work.scope.sizes
    KEYS: gl.constexpr = gl.SliceLayout(0, SCORES)
    first = columns.tile * BLOCK_N
    numbers = count_up(first, BLOCK_N, KEYS)
    kv = places_of(first, sizes.kv_len, work.origins.kv, KV_KIND, BLOCK_N, KEYS)[None, :]
    live = (numbers < sizes.kv_len)[None, :]
    parts = Parts(rows.parts, columns.parts, None, None)
    slope = derivative_of_pair(score, live, parts, rows.q, kv, work.scope)
    slope, _ = gl.broadcast(slope, score)
    return slope


@gluon.jit
def add_to_tangent_sums(sums, rounded, decays, p_tangent, packed):
    """Add a tile's tangents of weights to their sums, and ``packed``, what they are rounded to."""
    sums = sums * decays + fold_partials(partial_row_sums(p_tangent))
    rounded = rounded * decays + fold_partials(partial_row_sums(widened(packed, HALF, SCORES)))
    return sums, rounded


@gluon.jit
def tangents_of_scores(part, q_tile, k_tile, stage, memory):
    """Begin the products of S'."""
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    if HAS_TANGENT_Q:
        q_tangent = memory.q.tangent.data.index(part).reshape([ROWS, D])
        moving = multiply(q_tangent, k_tile, zeros, HEAD_DIM)
    if HAS_TANGENT_K:
        k_tangent = memory.k.tangent.data.index(stage).reshape([BLOCK_N, D])
        if HAS_TANGENT_Q:
            moving = warpgroup_mma(q_tile, k_tangent.permute((1, 0)), moving, is_async=True)
        else:
            moving = multiply(q_tile, k_tangent, zeros, HEAD_DIM)
    return moving


@gluon.jit
def attend(
    PART: gl.constexpr, tile_index, kv_tile, state, rows, factors, speed, memory, work,
    PARTIAL: gl.constexpr,
):
    """Add what one tile has to all sums."""
    k, v, q_len = memory.k, memory.v, work.scope.sizes.q_len
    acc, acc_tangent, row_max, row_sum, sum_tangent, rounded = state
    slot = slot_of(tile_index, STAGES)
    # PART, since tiles' indices are less than the number of keys, but no compiler knows: it would
    # keep in registers where each part of q lies.
    part = PART + 1 + ((kv_tile - work.scope.sizes.kv_len) >> 31)
    q_tile = memory.q.data.index(part).reshape([ROWS, D])
    consumer_wait(k, slot)
    k_tile = k.data.index(slot.stage).reshape([BLOCK_N, D])
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    scoring = multiply(q_tile, k_tile, zeros, HEAD_DIM)
    if HAS_TANGENT_WEIGHTS:
        moving = tangents_of_scores(part, q_tile, k_tile, slot.stage, memory)
    columns = Columns(kv_tile, parts_of_keys(kv_tile, work), None)
    score = warpgroup_mma_wait(HAS_TANGENT_Q + HAS_TANGENT_K, deps=[scoring])
    if HAS_TANGENT_WEIGHTS and PAIRWISE_DERIVATIVE:
        # Scores and slopes take registers, which S' leaves where it has been multiplied by these.
        p_tangent = warpgroup_mma_wait(0, deps=[moving]) * speed
        slope = slopes_of_scores(score * factors.scale, rows, columns, work)
        # Where the slope is infinite, a score that does not move still does not.
        p_tangent = gl.where(p_tangent == 0.0, 0.0, p_tangent * slope)
    score, any_live = final_scores(score, rows, columns, row_max, factors, work, PARTIAL, False)
    p, own, decay, row_max = soften(
        score, any_live, row_max, MaxRule(float("-inf"), False), factor_of_final(factors), PARTIAL,
        False,
    )
    if EARLY:
        packed = pack(p, HALF)
    own = fold_partials(own)
    decays = 1.0
    if BOUNDED:
        row_sum = row_sum + own
    else:
        decays = gl.convert_layout(decay, gl.SliceLayout(1, own.type.layout))[:, None]
        row_sum = row_sum * decays + own
        rescale = gl.convert_layout(decay, gl.SliceLayout(1, OUTPUT))
        acc = lazy_rescale(acc, rescale) if LAZY else acc * rescale[:, None]
        acc_tangent = lazy_rescale(acc_tangent, rescale) if LAZY else acc_tangent * rescale[:, None]
    if not EARLY:
        # ptxas orders nothing across a wait: with this one behind S', weights and their tangents would
        # be kept both before and after they are rounded.
        consumer_wait(v, slot)
    if HAS_TANGENT_WEIGHTS:
        if not PAIRWISE_DERIVATIVE:
            pin_before_wait(row_sum, q_len >> 31)
            p_tangent = warpgroup_mma_wait(0, deps=[moving]) * speed
        consumer_release(k, slot)
        p_tangent = p * p_tangent
        if PARTIAL or MODIFIED:
            # What takes no part may move by what is no number.
            p_tangent = gl.where(p == 0.0, 0.0, p_tangent)
        packed_tangent = pack(p_tangent, HALF)
        if EARLY:
            sum_tangent, rounded = add_to_tangent_sums(
                sum_tangent, rounded, decays, p_tangent, packed_tangent
            )
        operand_tangent = halves(packed_tangent, HALF, WEIGHTS)
    else:
        consumer_release(k, slot)
    if EARLY:
        consumer_wait(v, slot)
    else:
        packed = pack(p, HALF)
    operand = halves(packed, HALF, WEIGHTS)
    v_tile = v.data.index(slot.stage).reshape([BLOCK_N, DV])
    adding = warpgroup_mma(operand, v_tile, acc, is_async=True)
    if HAS_TANGENT_WEIGHTS:
        acc_tangent = warpgroup_mma(operand_tangent, v_tile, acc_tangent, is_async=True)
    if HAS_TANGENT_V:
        v_tangent = v.tangent.data.index(slot.stage).reshape([BLOCK_N, DV])
        acc_tangent = warpgroup_mma(operand, v_tangent, acc_tangent, is_async=True)
    if HAS_TANGENT_WEIGHTS and not EARLY:
        # While the products run.
        sum_tangent, rounded = add_to_tangent_sums(
            sum_tangent, rounded, decays, p_tangent, packed_tangent
        )
        pin_before_wait(sum_tangent, q_len >> 31)
        pin_before_wait(rounded, q_len >> 31)
    acc, acc_tangent = warpgroup_mma_wait(0, deps=[adding, acc_tangent])
    consumer_release(v, slot)
    return RunningTangent(acc, acc_tangent, row_max, row_sum, sum_tangent, rounded)


@gluon.jit
def consume_work(
    work_tile, work_index, tiles_before, PART: gl.constexpr, results, memory, call
):
    """Results of the query tile's rows number ``PART``; returns as :func:`load_work`."""
    k, v, sizes = memory.k, memory.v, call.sizes
    shift = shift_of(call.origins, Q_KIND, KV_KIND)
    work = take_work(work_tile, shift, memory.items, call)
    tile, scope, head, visits = work.tile, work.scope, work.scope.head, work.visits
    begin_partial, end_partial, own_full = tiles_of_rows(PART, work)
    first = tile * BLOCK_M + PART * ROWS
    numbers = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
    places = positions(numbers, sizes.q_len, call.origins.q, Q_KIND)
    q = places[:, None]
    q_parts = q_parts_of_pairs(places, scope)
    rows = Rows(numbers, places, q, q_parts, tile * BLOCK_M + shift.q, None)
    acc = gl.zeros([ROWS, DV], gl.float32, layout=OUTPUT)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    lowest = 0.0 if BOUNDED else float("-inf")
    row_max = gl.full([ROWS], lowest, gl.float32, layout=gl.SliceLayout(1, SCORES))
    sums = fold_partials(partial_row_sums(zeros))
    state = RunningTangent(acc, acc, row_max, sums, sums, sums)
    # How fast final scores are where q . k has a speed of 1, but for what differs from pair to pair.
    speed = call.scale
    if HAS_DERIVATIVE and not PAIRWISE_DERIVATIVE:
        parts = Parts(q_parts, q_parts, None, None)
        speed = speed * derivative_of_pair(zeros, q == q, parts, q, q, scope)
    factors = factors_of_scores(call.scale, work)
    tiles = visits.partial + visits.full
    if SKIPS:
        skip_tiles(tiles_before, tiles_before + begin_partial, k, v)
    q_slot = slot_of_rows(PART, work_index)
    consumer_wait(memory.q, q_slot)

    for FULL in gl.static_range(2):
        if FORWARD_HAS_FULL if FULL else FORWARD_HAS_PARTIAL:
            begin = 0 if FULL else begin_partial
            kv_tile = tile_at(begin, work, not FULL)
            for step in range(begin, own_full if FULL else end_partial):
                before = tiles_before + visits.partial if FULL else tiles_before
                state = attend(
                    PART, before + step, kv_tile, state, rows, factors, speed, memory, work,
                    not FULL,
                )
                kv_tile = tile_at(step + 1, work, not FULL)

    if SKIPS:
        left = gl.where(own_full > 0, tiles, end_partial)
        skip_tiles(tiles_before + left, tiles_before + tiles, k, v)
    if PERSISTENT and OWN_OUTPUT:
        # The next work tile's rows of q may come.
        consumer_release(memory.q, q_slot)
    total, sum_tangent = whole(state.row_sum), whole(state.row_sum_tangent)
    common = whole(state.rounded)
    lse, inverse = normalise(total, state.row_max, rows, factors, work)
    row = (head.b * sizes.heads + head.h).to(gl.int64) * sizes.q_len
    store_lse(results.lse, row, lse, numbers, sizes)
    gl.store(results.lse_tangent + row + numbers, sum_tangent * inverse, mask=numbers < sizes.q_len)
    store_outputs(PART, state, inverse, common, first, q_slot, results, memory, head)
    return tiles_before + visits.partial + visits.full


@gluon.jit
def whole(quarters):
    """Rows' sums from four each."""
    return gl.convert_layout(gl.sum(quarters, 1), gl.SliceLayout(1, SCORES))


@gluon.jit
def store_outputs(
    PART: gl.constexpr, state, inverse, common, first, q_slot, results, memory, head
):
    """Store a consumer's rows of the output and of its tangent, from row ``first`` on.

    ``inverse`` is the factor of sums by weights, ``common`` the sum of these weights' tangents.
    """
    if OWN_OUTPUT:
        place = memory.out.index(PART)
        if PERSISTENT:
            # The work tile before has been read from there.
            tma_wait(0)
    else:
        # The rows of q have been read for the last time.
        place = memory.q.data.index(PART)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT))[:, None]
    out = state.acc * inverse
    place.reshape([ROWS, DV]).store(out.to(HALF))
    fence_async_shared()
    tma_store(results.out, [head.b, head.h, first, 0], place)
    # Of the tangents of weights, the sum of what they were rounded to cancels better.
    common = gl.convert_layout(common, gl.SliceLayout(1, OUTPUT))[:, None] * inverse
    out_tangent = state.acc_tangent * inverse - common * out
    tma_wait(0)
    place.reshape([ROWS, DV]).store(out_tangent.to(HALF))
    fence_async_shared()
    tma_store(results.out_tangent, [head.b, head.h, first, 0], place)
    if not (PERSISTENT and OWN_OUTPUT):
        tma_wait(0)
    if PERSISTENT and not OWN_OUTPUT:
        consumer_release(memory.q, q_slot)
