"""Forward kernel for Hopper: a producer warpgroup and two or three consumer warpgroups.

The producer loads q, k and v tiles with the tensor memory accelerator (``forward_produce.py``); each
consumer computes the online softmax for its own rows of the query tile. While the softmax of one
tile runs, the matrix product of the tile before it does; or, where tiles come by halves
(``forward_halves.py``), products of the same tile's halves.

Algorithm: J. Shah et al., FlashAttention-3 (arXiv 2407.08608), sections 3.1 and 3.2. Exponentials
are base 2.
"""
# ruff: noqa: F821

#: begin
@gluon.jit
def attend(
    PART: gl.constexpr, tile_index, kv_tile, softmax, rule, rows, factors, memory, work,
    PARTIAL: gl.constexpr, FIXED: gl.constexpr,
):
    """Scores and weights of one tile, while those of the one before weigh v."""
    k, v = memory.k, memory.v
    q_len = work.scope.sizes.q_len
    slot, before = slot_of(tile_index, STAGES), slot_of(tile_index - 1, STAGES)
    p = softmax.p
    if EARLY and not HAS_DROPOUT:
        # Before the first product starts: what defines registers between two serialises them.
        operand = unpack(p, q_len >> 31, HALF, WEIGHTS)
    consumer_wait(k, slot)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    k_tile = column_blocks(k.data, slot.stage, KEY_BLOCKS, D)
    scoring = multiply_blocks(rows.tile, k_tile, zeros, HEAD_DIM)
    consumer_wait(v, before)
    v_tile = v.data.index(before.stage).reshape([BLOCK_N, DV])
    if HAS_DROPOUT:
        # Keep this after the wait for v. Before it, ptxas puts these instructions between the parts
        # of the product of scores instead of overlapping them with it.
        p = keep_packed(p, take_kept(PART, tile_index - 1, memory.kept, CONSUMERS, BLOCK_N))
    if HAS_DROPOUT or not EARLY:
        operand = halves(p, HALF, WEIGHTS)
    adding = warpgroup_mma(operand, v_tile, softmax.acc, is_async=True)
    kv_parts = parts_of_keys(kv_tile, work)
    score = warpgroup_mma_wait(1, deps=[scoring])
    consumer_release(k, slot)
    pair_parts = read_bias(PART, tile_index, PARTIAL, memory.bias) if HAS_BIAS else None
    columns = Columns(kv_tile, kv_parts, pair_parts)
    row_max = softmax.row_max
    score, any_live = final_scores(score, rows, columns, row_max, factors, work, PARTIAL, FIXED)
    if HAS_BIAS:
        consumer_release(memory.bias, slot_of_bias(PART, tile_index))
    exact, own, decay, row_max = soften(
        score, any_live, row_max, rule, factor_of_final(factors), PARTIAL, FIXED
    )
    if EARLY:
        p = pack(exact, HALF)
    if OWN_WEIGHTS:
        row_sum = own
    elif BOUNDED or FIXED:
        row_sum = softmax.row_sum + own
    else:
        decays = gl.convert_layout(decay, gl.SliceLayout(1, own.type.layout))[:, None]
        row_sum = softmax.row_sum * decays + own
    if EARLY and OWN_WEIGHTS:
        # Nobody asks for sums of these.
        pin_before_wait(p, q_len >> 31)
    else:
        pin_before_wait(row_sum, q_len >> 31)
    acc = warpgroup_mma_wait(0, deps=[adding])
    consumer_release(v, before)
    if not EARLY:
        p = pack(exact, HALF)
    if not (OWN_WEIGHTS or BOUNDED or FIXED):
        acc = rescale(acc, decay)
    return RunningSoftmax(acc, row_max, row_sum, p)


@gluon.jit
def attend_tiles(
    PART: gl.constexpr, begin, end, tiles_before, softmax, rule, rows, factors, memory, work,
    PARTIAL: gl.constexpr, FIXED: gl.constexpr,
):
    """The running softmax with PARTIAL or FULL tiles ``begin`` to ``end - 1``.

    FIXED: relative to a maximum that stays.
    """
    kv_tile = tile_at(begin, work, PARTIAL)
    for step in range(begin, end):
        before = tiles_before if PARTIAL else tiles_before + work.visits.partial
        softmax = attend(
            PART, before + step, kv_tile, softmax, rule, rows, factors, memory, work, PARTIAL, FIXED
        )
        kv_tile = tile_at(step + 1, work, PARTIAL)
    return softmax


@gluon.jit
def attend_first(
    PART: gl.constexpr, tile_index, slot, kv_tile, row_max, rule, rows, factors, memory, work
):
    """Maximum, sums and packed weights of the first tile, before which there are no weights.

    It may be a FULL one, and takes the mask's code as well.
    """
    k = memory.k
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    consumer_wait(k, slot)
    k_tile = column_blocks(k.data, slot.stage, KEY_BLOCKS, D)
    score = multiply_blocks(rows.tile, k_tile, zeros, HEAD_DIM)
    kv_parts = parts_of_keys(kv_tile, work)
    score = warpgroup_mma_wait(0, deps=[score])
    consumer_release(k, slot)
    pair_parts = read_bias(PART, tile_index, True, memory.bias) if HAS_BIAS else None
    columns = Columns(kv_tile, kv_parts, pair_parts)
    score, any_live = final_scores(score, rows, columns, row_max, factors, work, True, False)
    if HAS_BIAS:
        consumer_release(memory.bias, slot_of_bias(PART, tile_index))
    exact, row_sum, decay, row_max = soften(
        score, any_live, row_max, rule, factor_of_final(factors), True, False
    )
    return row_max, row_sum, pack(exact, HALF)


@gluon.jit
def rescale(acc, decay):
    """Sums relative to a new maximum."""
    factors = gl.convert_layout(decay, gl.SliceLayout(1, OUTPUT))
    return lazy_rescale(acc, factors) if LAZY else acc * factors[:, None]


@gluon.jit
def consume_work(
    work_tile, work_index, tiles_before, PART: gl.constexpr, results, memory, call
):
    """Attention of the query tile's rows number ``PART``; returns as :func:`load_work`."""
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
    origin = tile * BLOCK_M + shift.q
    factors = factors_of_scores(call.scale, work)
    if HAS_DROPOUT:
        chance = drop_probability(scope)
        keep_factor = factor_of_kept(chance)
    acc = gl.zeros([ROWS, DV], gl.float32, layout=OUTPUT)
    lowest = 0.0 if BOUNDED else float("-inf")
    row_max = gl.full([ROWS], lowest, gl.float32, layout=gl.SliceLayout(1, SCORES))
    q_slot = slot_of_rows(PART, work_index)
    q_tile = column_blocks(memory.q.data, q_slot.stage, KEY_BLOCKS, D)
    rows = Rows(numbers, places, q, q_parts, origin, q_tile)

    first_tile = tile_at(begin_partial, work, True)
    if FORWARD_HAS_FULL:
        full_tile = tile_at(0, work, False)
        first_tile = gl.where(begin_partial < visits.partial, first_tile, full_tile)
    uses_fixed_max = False
    begin = gl.where(begin_partial < visits.partial, 0, 1)
    end = own_full
    least_first = float("-inf")
    if FIXED_MAX:
        # The first keys of all often have the largest scores: their tile is one to follow. What is
        # added to the scores of padding is as good as -inf, and nothing to be relative to.
        uses_fixed_max = work.uses_fixed_max & (own_full > 1)
        end = gl.where(uses_fixed_max, 1, own_full)
        # Where nothing is PARTIAL, that tile is the first one.
        least_first = gl.where(uses_fixed_max & (begin == 1), 0.0, float("-inf"))
    if SKIPS:
        skip_tiles(tiles_before, tiles_before + begin_partial, k, v)
    tiles = visits.partial + visits.full
    tile_index = tiles_before + begin_partial
    slot = slot_of(tile_index, STAGES)
    consumer_wait(memory.q, q_slot)
    if SIGNED:
        if factors.factor < 0.0:
            ELEMENTS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            for block in gl.static_range(KEY_BLOCKS):
                q_tile[block].store(-q_tile[block].load(ELEMENTS))
            fence_async_shared()
        # Dead pairs' scores are infinite, and stay so; what is NaN stays too.
        size = gl.abs(factors.factor)
        size = gl.where(size < TINY, TINY, size)
        factors = Factors(factors.scale, gl.abs(factors.natural), size, factors.steepness)
    row_max, row_sum, p = attend_first(
        PART, tile_index, slot, first_tile, row_max, MaxRule(least_first, uses_fixed_max), rows,
        factors, memory, work,
    )
    softmax = RunningSoftmax(acc, row_max, row_sum, p)
    if QUERIES == 2:
        # By now its output has been read from there.
        leave_query(work_index - 1, PART, memory.q)

    follows = MaxRule(float("-inf"), uses_fixed_max)
    if FORWARD_REPEATS_PARTIAL:
        softmax = attend_tiles(
            PART, begin_partial + 1, end_partial, tiles_before, softmax, follows, rows, factors,
            memory, work, True, False,
        )
    if FORWARD_HAS_FULL:
        least_max = gl.where(uses_fixed_max, 0.0, float("-inf"))
        softmax = attend_tiles(
            PART, begin, end, tiles_before, softmax, MaxRule(least_max, uses_fixed_max), rows,
            factors, memory, work, False, False,
        )
    if HALVED:
        if uses_fixed_max:
            acc, row_sum = attend_by_halves(
                tiles_before + visits.partial + end, tiles_before + tiles, softmax,
                q_tile[0], factors, memory, sizes.q_len,
            )
            # Otherwise these would stay in registers for what comes behind all tiles.
            p = gl.full(softmax.p.shape, 0, gl.int32, layout=softmax.p.type.layout)
            softmax = RunningSoftmax(acc, softmax.row_max, row_sum, p)
    elif FIXED_MAX and FORWARD_HAS_FULL:
        softmax = attend_tiles(
            PART, end, own_full, tiles_before, softmax, follows, rows, factors, memory, work,
            False, True,
        )

    if PERSISTENT and OWN_OUTPUT:
        # The next work tile's rows of q may come.
        consumer_release(memory.q, q_slot)
    acc, row_max, row_sum, p = softmax
    last = tiles_before + tiles - 1
    if SKIPS:
        ended = gl.maximum(end_partial, begin_partial + 1)
        last = tiles_before + gl.where(own_full > 0, tiles, ended) - 1
    if HALVED:
        if not uses_fixed_max:
            acc = add_last(last, acc, p, v, sizes.q_len)
    else:
        last_slot = slot_of(last, STAGES)
        consumer_wait(v, last_slot)
        v_tile = v.data.index(last_slot.stage).reshape([BLOCK_N, DV])
        if HAS_DROPOUT:
            p = keep_packed(p, take_kept(PART, last, memory.kept, CONSUMERS, BLOCK_N))
        adding = warpgroup_mma(
            unpack(p, sizes.q_len >> 31, HALF, WEIGHTS), v_tile, acc, is_async=True
        )
    if not OWN_WEIGHTS:
        total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, SCORES))
        if FIXED_MAX:
            # NaN does not fit either.
            is_near = gl.abs(peaks_of(row_max, factor_of_final(factors))) <= FAR
            fits = is_near & (total >= LEAST_TOTAL) & (total <= MOST_TOTAL)
            fits = (numbers >= sizes.q_len) | fits
            lost = uses_fixed_max & (gl.min(fits.to(gl.int32), 0) == 0)
            place = memory.overflowed.index((work_index & 1) * CONSUMERS + PART)
            pack_fields((lost.to(gl.int32),), place)
        lse, inverse = normalise(total, row_max, rows, factors, work)
    else:
        lse = LogSum(row_max, gl.zeros_like(row_max))
    row = (head.b * sizes.heads + head.h).to(gl.int64) * sizes.q_len
    if not CHECKS_RESULTS:
        store_lse(results.lse, row, lse, numbers, sizes)
    if not HALVED:
        acc = warpgroup_mma_wait(0, deps=[adding])
        if PERSISTENT or SKIPS:
            consumer_release(v, last_slot)
    if SKIPS:
        skip_tiles(last + 1, tiles_before + tiles, k, v)
    if not OWN_WEIGHTS:
        if HAS_DROPOUT:
            inverse = inverse * keep_factor
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT))[:, None]
    elif HAS_DROPOUT:
        acc = acc * keep_factor
    if HAS_COMMON:
        acc = acc * factor_of_weights(scope)
    if CHECKS_RESULTS:
        # NaN, or 0 if all of the row is finite.
        check = gl.convert_layout(gl.sum(acc * 0.0, 1), gl.SliceLayout(1, SCORES))
        store_lse(results.lse, row, LogSum(lse.shift, lse.rest + check), numbers, sizes)
    store_output(PART, acc, first, q_slot, results.out, memory, work)
    return tiles_before + tiles


@gluon.jit
def place_of_output(data, desc, stage):
    """Place of a consumer's rows of the output among those of q, which may be wider."""
    if KEY_BLOCKS == 1:
        found = data.index(stage)
    else:
        # Two blocks of each consumer's three. The consumer's number is even, or the last one.
        gl.static_assert(CONSUMERS * KEY_BLOCKS * 64 % DV == 0)
        NUMBER: gl.constexpr = CONSUMERS * KEY_BLOCKS * 64 // DV
        tiles = view_memory(data, desc.dtype, [NUMBER] + desc.block_type.shape, desc.layout)  # noqa: RUF005
        found = tiles.index(stage * (NUMBER - 1))
    return found


@gluon.jit
def store_output(PART: gl.constexpr, acc, first, q_slot, desc, memory, work):
    """Store a consumer's rows of the output, from row ``first`` on."""
    if OWN_OUTPUT:
        part = memory.out.index(PART)
        if PERSISTENT:
            # The work tile before has been read from there.
            tma_wait(0)
    else:
        # The rows of q have been read for the last time, and make room for those of the output.
        part = place_of_output(memory.q.data, desc, q_slot.stage)
    part.reshape([ROWS, DV]).store(acc.to(HALF))
    fence_async_shared()
    if FIXED_MAX:
        if not work.uses_fixed_max:
            # What was lost is not to be written after what takes its place.
            await_written()
    head = work.scope.head
    tma_store(desc, [head.b, head.h, first, 0], part)
    if QUERIES == 1:
        if not (PERSISTENT and OWN_OUTPUT):
            tma_wait(0)
        if PERSISTENT and not OWN_OUTPUT:
            consumer_release(memory.q, q_slot)
