"""Backward kernel for Hopper, for head dims above 128: dQ, dK and dV in one pass.

A program has 64 keys: dV takes half the registers of one consumer warpgroup, and dK of the other.
The first makes the weights and dV, the second dP, dS and dK, and each half of the columns of dQ.
Follows ``backward_shared`` in one module.

Whatever one consumer wrote, the other reads after a named barrier, which both pass once for each
query tile. For a tile,

1. the first stores P times the score's derivative in ``steep_s`` and announces it, without waiting;
   the second waits for that, and stores dS in ``ds_s``;
2. both meet, and make dQ from ``ds_s``.

So one buffer of each is enough. The first writes ``steep_s`` for the next tile after they met, when
the second has read it. The second writes ``ds_s`` for the next tile once the first has announced
that tile's weights, before which it waited for its half of this tile's dQ.

After the last tile, or without any, both meet once more: nobody reads k and v any longer, and dK
and dV take their places on the way out.
"""
# ruff: noqa: F821

#: begin


@gluon.jit
def add_query_tile(
    PART: gl.constexpr, count, q_tile_index, total, zeros, no_dq, kv_parts, columns, column2, kv,
    origin, ragged, SUMS, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, steep_s, q_full, do_full,
    q_empty, do_empty, scale, head, sizes, q_origin, padded, PARTIAL: gl.constexpr,
    SCORES: gl.constexpr, OPERAND: gl.constexpr, given,
    #: pair_reader_parameters
):
    """Add one query tile's part to dQ, and to ``total``: dV, or dK before the scale.

    Tiles are (keys, queries).
    """
    stage, phase = slot_of(count, STAGES)
    first = q_tile_index * BLOCK_M
    # An index that no compiler knows to be zero: see ``backward``.
    only = count >> 31
    k_tile = k_s.index(only).reshape([BLOCK_N, D])
    q = q_s.index(stage).reshape([BLOCK_M, D])
    do = do_s.index(stage).reshape([BLOCK_M, DV])
    slopes = ds_s.index(only)
    if PART == 0:
        mbarrier.wait(q_full.index(stage), phase)
        scoring = multiply(k_tile, q, zeros, HEAD_DIM)
        lse2 = lse_s.index(stage).load(gl.SliceLayout(0, SCORES))
        q_parts = parts_of_queries(first, head, sizes, q_origin, given)
        score = warpgroup_mma_wait(0, deps=[scoring])
        mbarrier.arrive(q_empty.index(stage), count=1)
        #: read_pairs
        weight, steep, derivative = weights_of_tile(
            score, q_parts, kv_parts, lse2, columns, column2, first, kv, scale, origin, ragged,
            head, sizes, q_origin, PARTIAL, SCORES, given,
            #: pair_parts
        )
        #: leave_pairs
        operand = gl.convert_layout(weight.to(HALF), OPERAND)
        if HAS_DERIVATIVE:
            slope = steep
            steep = slope * derivative
            if PARTIAL:
                # A dead pair's derivative may be infinite.
                steep = gl.where(slope == 0.0, 0.0, steep)
        steep_s.store(steep)
        announce()
        # dV runs while the other warpgroup computes dS.
        mbarrier.wait(do_full.index(stage), phase)
        adding = warpgroup_mma(operand, do, total, is_async=True)
    else:
        mbarrier.wait(do_full.index(stage), phase)
        v_tile = v_s.index(only).reshape([BLOCK_N, DV])
        weighing = multiply(v_tile, do, zeros, VALUE_DIM)
        delta = delta_s.index(stage).load(gl.SliceLayout(0, SCORES))
        dweight = warpgroup_mma_wait(0, deps=[weighing])
        mbarrier.arrive(do_empty.index(stage), count=1)
        await_announced()
        slope = gradient_of_score(steep_s.load(SCORES), dweight, delta)
        slope_half = slope.to(HALF)
        slopes.store(slope_half)
        operand = gl.convert_layout(slope_half, OPERAND)
        fence_async_shared()
        mbarrier.wait(q_full.index(stage), phase)
    meet()
    making_q = warpgroup_mma(
        slopes.permute((1, 0)), k_tile.slice(PART * (D // 2), no_dq.shape[1], dim=1), no_dq,
        use_acc=False, is_async=True,
    )
    if PART == 0:
        total = warpgroup_mma_wait(1, deps=[adding])
        mbarrier.arrive(do_empty.index(stage), count=1)
        dq = warpgroup_mma_wait(0, deps=[making_q])
    else:
        # dQ comes before dK, so that it is added up while dK is computed.
        adding = warpgroup_mma(operand, q, total, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[making_q])
    row = (head.b * sizes.heads + head.h).to(gl.int64) * padded + first
    add_to_sums(SUMS + row * D + PART * (BLOCK_M * D // 2), dq)
    if PART == 1:
        total = warpgroup_mma_wait(0, deps=[adding])
        mbarrier.arrive(q_empty.index(stage), count=1)
    return total


@gluon.jit
def consume_item(
    item, turn, done, PART: gl.constexpr, SUMS, results, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s,
    steep_s, k_full, v_full, q_full,
    do_full, q_empty, do_empty, scale, sizes, origins, padded, together,
    #: learned
    #: kept
    #: again
    #: pair_consumer
    #: slopes_desc
    given,
):
    """The tile's dV (part 0) or dK (part 1), and half the columns of dQ.

    Returns the number of query tiles. Its programs have one item each, since the way out takes the
    place of k and v: ``turn`` and ``done`` are 0.
    """
    OWN_WIDTH: gl.constexpr = DV if PART == 0 else D
    # Of the last columns of keys, those that are all zeros make none of dQ.
    DQ_WIDTH: gl.constexpr = 64 if PART == 1 and D == 256 and HEAD_DIM <= 192 else D // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OWN_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN_WIDTH, 16])
    DQ_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_WIDTH, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OWN_ROWS, 2)
    tile, b, hkv = place_of_kv_item(item, sizes, together)
    shift = shift_of(origins, Q_KIND, KV_KIND)
    own = tile * BLOCK_N
    columns = own + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, SCORES))
    places = positions(columns, sizes.kv_len, origins.kv, KV_KIND)
    kv = places[:, None]
    origin = own + shift.kv
    ragged = own + BLOCK_N > sizes.kv_len
    total = gl.zeros([BLOCK_N, OWN_WIDTH], gl.float32, layout=OWN_ROWS)
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=SCORES)
    no_dq = gl.zeros([64, DQ_WIDTH], gl.float32, layout=DQ_ROWS)
    mbarrier.wait(k_full, turn)
    mbarrier.wait(v_full, turn)
    group = sizes.heads // sizes.kv_heads
    count = done
    for member in range(0, group):
        head = Head(b, hkv * group + member, hkv)
        visits, masked = count_tiles(tile, head, sizes, shift, given)
        kv_parts = kv_parts_of_pairs(head, places, sizes, given)
        column2 = LOG2E * column_of_score(
            head, places, (places - origin).to(gl.float32), kv_parts, sizes, given,
        )
        factored = scale
        if HAS_FACTOR:
            factored = scale * factor_of_score(head, sizes, given)
        for step in range(0, masked):
            q_tile_index = q_tile_of(step, visits, tile, head, sizes, shift, True, given)
            total = add_query_tile(
                PART, count, q_tile_index, total, zeros, no_dq, kv_parts, columns, column2, kv,
                origin, ragged, SUMS, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, steep_s, q_full,
                do_full, q_empty, do_empty, factored, head, sizes, origins.q, padded, True, SCORES,
                OPERAND, given,
                #: pair_reader
            )
            count += 1
        if KV_PASS_HAS_FULL and PEELED:
            for step in range(masked, visits.partial + visits.full):
                q_tile_index = q_tile_of(step, visits, tile, head, sizes, shift, False, given)
                total = add_query_tile(
                    PART, count, q_tile_index, total, zeros, no_dq, kv_parts, columns, column2, kv,
                    origin, ragged, SUMS, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, steep_s,
                    q_full, do_full, q_empty, do_empty, factored, head, sizes, origins.q, padded,
                    False, SCORES, OPERAND, given,
                    #: pair_reader
                )
                count += 1
    meet()
    #: rows_layout
    if PART == 0:
        v_tile = v_s.index(0).reshape([BLOCK_N, DV])
        if HAS_COMMON:
            total = total * factor_of_weights(Head(b, 0, hkv), sizes, given)
        dv_out = Tensor(results.dv, results.dv_b, results.dv_h, results.dv_n)
        #: store_dv
    else:
        k_tile = k_s.index(0).reshape([BLOCK_N, D])
        dk_out = Tensor(results.dk, results.dk_b, results.dk_h, results.dk_n)
        #: store_dk
    return count
