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
    PART: gl.constexpr, count, kv_tile, acc, weight, sums, peak, floor, anchored, q, q_parts,
    q_part, zeros, k_s, v_s, k_full, k_empty, v_full, v_empty, factor, steepness, scale, origin,
    head, sizes, kv_origin, PARTIAL: gl.constexpr, FIXED: gl.constexpr, SCORES: gl.constexpr,
    OUTPUT: gl.constexpr, WEIGHTS: gl.constexpr,
    #: kept
    given,
    #: pair_reader_parameters
):
    """Scores and weights of tile number ``count``, while those of the one before weigh v."""
    stage, phase = slot_of(count, STAGES)
    before, phase_before = slot_of(count - 1, STAGES)
    if EARLY and not HAS_DROPOUT:
        # Before the first product starts: what defines registers between two serialises them.
        operand = unpack(weight, sizes.q_len >> 31, HALF, WEIGHTS)
    mbarrier.wait(k_full.index(stage), phase)
    k = k_s.index(stage).reshape([BLOCK_N, D])
    scoring = multiply(q_part, k, zeros, HEAD_DIM)
    mbarrier.wait(v_full.index(before), phase_before)
    v = v_s.index(before).reshape([BLOCK_N, DV])
    if HAS_DROPOUT:
        # Keep this after the wait for v. Before it, ptxas puts these instructions between the parts
        # of the product of scores instead of overlapping them with it.
        kept = take_kept(PART, count - 1, kept_s, kept_full, CONSUMERS, BLOCK_N)
        weight = keep_packed(weight, kept)
    if HAS_DROPOUT or not EARLY:
        operand = halves(weight, HALF, WEIGHTS)
    adding = warpgroup_mma(operand, v, acc, is_async=True)
    kv_parts = parts_of_keys(kv_tile, head, sizes, kv_origin, given)
    score = warpgroup_mma_wait(1, deps=[scoring])
    mbarrier.arrive(k_empty.index(stage), count=1)
    #: read_pairs
    score, reached = final_scores(
        score, q, q_parts, kv_parts, kv_tile, peak, factor, steepness, scale, origin, head, sizes,
        kv_origin, PARTIAL, FIXED, SCORES, given,
        #: pair_parts
    )
    #: leave_pairs
    exact, own, decay, peak = soften(score, reached, peak, floor, anchored, factor, PARTIAL, FIXED)
    if EARLY:
        weight = pack(exact, HALF)
    if OWN_WEIGHTS:
        sums = own
    elif BOUNDED or FIXED:
        sums = sums + own
    else:
        sums = sums * gl.convert_layout(decay, gl.SliceLayout(1, own.type.layout))[:, None] + own
    if EARLY and OWN_WEIGHTS:
        # Nobody asks for sums of these.
        finish(weight, sizes.q_len >> 31)
    else:
        finish(sums, sizes.q_len >> 31)
    acc = warpgroup_mma_wait(0, deps=[adding])
    mbarrier.arrive(v_empty.index(before), count=1)
    if not EARLY:
        weight = pack(exact, HALF)
    if not (OWN_WEIGHTS or BOUNDED or FIXED):
        factors = gl.convert_layout(decay, gl.SliceLayout(1, OUTPUT))
        acc = scaled(acc, factors) if LAZY else acc * factors[:, None]
    return acc, weight, sums, peak


@gluon.jit
def consume_item(
    item, turn, done, PART: gl.constexpr, o_desc, LSE, q_s, k_s, v_s, q_full, k_full, k_empty,
    v_full, v_empty, scale, sizes, origins, together,
    #: output
    #: kept
    #: again
    #: also_read
    given,
):
    """Attention of the query tile's rows number ``PART``; returns as :func:`load_item`."""
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUTPUT, 2)
    shift = shift_of(origins, Q_KIND, KV_KIND)
    tile, head, visits, nothing, fast = take_item(
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
    scale, factor, steepness = factors_of_scores(scale, head, sizes, given)
    if HAS_DROPOUT:
        chance = drop_probability(head, sizes, given)
        keep_factor = factor_of_kept(chance)
    acc = gl.zeros([ROWS, DV], gl.float32, layout=OUTPUT)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    lowest = 0.0 if BOUNDED else float("-inf")
    peak = gl.full([ROWS], lowest, gl.float32, layout=gl.SliceLayout(1, SCORES))
    q_part = q_s.index(PART).reshape([ROWS, D])

    # The first tile has no weights before it. A FULL one may take the mask's code as well.
    first_tile = partial_tile(begin_partial, nothing, visits, tile, head, sizes, shift, given)
    if FORWARD_HAS_FULL:
        full_tile = forward_tile(0, visits, tile, head, sizes, shift, given, False)
        first_tile = gl.where(begin_partial < visits.partial, first_tile, full_tile)
    anchored = False
    begin = gl.where(begin_partial < visits.partial, 0, 1)
    end = own_full
    if ANCHORED:
        # The first keys of all often have the largest scores: their tile is one to follow. What is
        # added to the scores of padding is as good as -inf, and nothing to be relative to.
        anchored = fast & (begin + 1 < own_full)
        end = gl.where(anchored, begin + 1, own_full)
    if SKIPS:
        leave_tiles(done, done + begin_partial, k_full, k_empty, v_full, v_empty)
    tiles = visits.partial + visits.full
    count = done + begin_partial
    stage, phase = slot_of(count, STAGES)
    mbarrier.wait(q_full.index(PART), turn & 1)
    if SIGNED:
        if factor < 0.0:
            ELEMENTS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
            q_part.store(-q_part.load(ELEMENTS))
            fence_async_shared()
        # Dead pairs' scores are infinite, and stay so; what is NaN stays too.
        size = gl.abs(factor)
        factor = gl.where(size < TINY, TINY, size)
    mbarrier.wait(k_full.index(stage), phase)
    k = k_s.index(stage).reshape([BLOCK_N, D])
    score = multiply(q_part, k, zeros, HEAD_DIM)
    kv_parts = parts_of_keys(first_tile, head, sizes, origins.kv, given)
    score = warpgroup_mma_wait(0, deps=[score])
    mbarrier.arrive(k_empty.index(stage), count=1)
    #: read_first_pairs
    score, reached = final_scores(
        score, q, q_parts, kv_parts, first_tile, peak, factor, steepness, scale, origin, head,
        sizes, origins.kv, True, False, SCORES, given,
        #: pair_parts
    )
    #: leave_first_pairs
    exact, sums, decay, peak = soften(
        score, reached, peak, float("-inf"), anchored, factor, True, False,
    )
    weight = pack(exact, HALF)

    if FORWARD_HAS_PARTIAL:
        kv_tile = partial_tile(begin_partial + 1, nothing, visits, tile, head, sizes, shift, given)
        for step in range(begin_partial + 1, end_partial):
            acc, weight, sums, peak = attend(
                PART, done + step, kv_tile, acc, weight, sums, peak, float("-inf"), anchored, q,
                q_parts, q_part, zeros, k_s, v_s, k_full, k_empty, v_full, v_empty, factor,
                steepness, scale, origin, head, sizes, origins.kv, True, False, SCORES, OUTPUT,
                WEIGHTS,
                #: kept
                given,
                #: pair_reader
            )
            kv_tile = partial_tile(step + 1, nothing, visits, tile, head, sizes, shift, given)
    if FORWARD_HAS_FULL:
        floor = gl.where(anchored, 0.0, float("-inf"))
        for form in gl.static_range(2 if ANCHORED else 1):
            kv_tile = forward_tile(begin, visits, tile, head, sizes, shift, given, False)
            if HALVED and form == 1:
                if anchored:
                    acc, sums = attend_by_halves(
                        done + visits.partial + begin, done + tiles, acc, weight, sums, peak,
                        q_part,
                        k_s, v_s, k_full, k_empty, v_full, v_empty, factor, scale, sizes.q_len,
                        ROWS, WEIGHTS,
                    )
                    # Else these would stay in registers for what comes behind all tiles.
                    weight = gl.full(weight.shape, 0, gl.int32, layout=weight.type.layout)
            else:
                for step in range(begin, end):
                    acc, weight, sums, peak = attend(
                        PART, done + visits.partial + step, kv_tile, acc, weight, sums, peak, floor,
                        anchored, q, q_parts, q_part, zeros, k_s, v_s, k_full, k_empty, v_full,
                        v_empty, factor, steepness, scale, origin, head, sizes, origins.kv, False,
                        form == 1, SCORES, OUTPUT, WEIGHTS,
                        #: kept
                        given,
                        #: pair_reader
                    )
                    kv_tile = forward_tile(step + 1, visits, tile, head, sizes, shift, given, False)
            begin, end = end, own_full

    if PERSISTENT and OWN_OUTPUT:
        # The next item's rows of q may come.
        mbarrier.arrive(q_empty.index(PART), count=1)
    last = done + tiles - 1
    if SKIPS:
        ended = gl.maximum(end_partial, begin_partial + 1)
        last = done + gl.where(own_full > 0, tiles, ended) - 1
    if HALVED:
        if not anchored:
            acc = add_last(last, acc, weight, v_s, v_full, v_empty, sizes.q_len, WEIGHTS)
    else:
        last_stage, last_phase = slot_of(last, STAGES)
        mbarrier.wait(v_full.index(last_stage), last_phase)
        v = v_s.index(last_stage).reshape([BLOCK_N, DV])
        if HAS_DROPOUT:
            kept = take_kept(PART, last, kept_s, kept_full, CONSUMERS, BLOCK_N)
            weight = keep_packed(weight, kept)
        adding = warpgroup_mma(unpack(weight, sizes.q_len >> 31, HALF, WEIGHTS), v, acc, is_async=True)
    lse = peak
    if not OWN_WEIGHTS:
        total = gl.convert_layout(gl.sum(sums, 1), gl.SliceLayout(1, SCORES))
        if ANCHORED:
            # NaN does not fit either.
            fits = (rows >= sizes.q_len) | ((total >= LEAST_TOTAL) & (total <= MOST_TOTAL))
            lost = anchored & (gl.min(fits.to(gl.int32), 0) == 0)
            lost_s.index((turn & 1) * CONSUMERS + PART).store(words((lost.to(gl.int32),)))
        lse, inverse = normalise(total, peak, row_places, origin, q_parts, head, sizes, given)
    row = (head.b * sizes.heads + head.h).to(gl.int64) * sizes.q_len
    gl.store(LSE + row + rows, lse, mask=rows < sizes.q_len)
    if not HALVED:
        acc = warpgroup_mma_wait(0, deps=[adding])
        if PERSISTENT or SKIPS:
            mbarrier.arrive(v_empty.index(last_stage), count=1)
    if SKIPS:
        leave_tiles(last + 1, done + tiles, k_full, k_empty, v_full, v_empty)
    if not OWN_WEIGHTS:
        if HAS_DROPOUT:
            inverse = inverse * keep_factor
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, OUTPUT))[:, None]
    elif HAS_DROPOUT:
        acc = acc * keep_factor
    if HAS_COMMON:
        acc = acc * factor_of_weights(head, sizes, given)
    if OWN_OUTPUT:
        part_s = o_s.index(PART)
        if PERSISTENT:
            # The item before has been read from there.
            tma_wait(0)
    else:
        # The rows of q have been read for the last time, and make room for those of the output.
        part_s = q_s.index(PART)
    part_s.reshape([ROWS, DV]).store(acc.to(HALF))
    fence_async_shared()
    if ANCHORED:
        if not fast:
            # What was lost is not to be written after what takes its place.
            await_written()
    tma_store(o_desc, [head.b, head.h, first, 0], part_s)
    if not (PERSISTENT and OWN_OUTPUT):
        tma_wait(0)
    if PERSISTENT and not OWN_OUTPUT:
        mbarrier.arrive(q_empty.index(PART), count=1)
    return done + tiles
