"""Backward kernel for Hopper: dQ, dK and dV in one pass over key-value tiles.

A producer warpgroup loads; two consumer warpgroups own half of the keys each. They share dS through
shared memory, so that each of them makes half of dQ, which it adds to fp32 sums in global memory,
straight from registers (``library.add_to_sums``). Follows ``backward_shared`` in one module.
"""
# ruff: noqa: F821

#: begin


@gluon.jit
def add_query_tile(
    PART: gl.constexpr, count, q_tile_index, dk, dv, column_sums, zeros, no_dq, kv_parts, columns,
    column2, kv, origin, ragged, SUMS, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s, q_full, do_full,
    q_empty, do_empty, scale, head, sizes, q_origin, padded, PARTIAL: gl.constexpr,
    SCORES: gl.constexpr, WEIGHTS: gl.constexpr, SLOPES: gl.constexpr,
    #: taking
    #: diagonal_consumer
    given,
    #: pair_reader_parameters
    #: storing
):
    """Add one query tile's part to dK (before the scale), dV and dQ, and to the keys' sums of dS.

    Tiles are (keys, queries).
    """
    KEYS: gl.constexpr = BLOCK_N // 2
    # Each warpgroup makes half of dQ: half of its columns, or of more than 64 rows half of these.
    WIDTH: gl.constexpr = D // 2
    stage, phase = slot_of(count, STAGES)
    first = q_tile_index * BLOCK_M
    # An index that no compiler knows to be zero. It would compute the products' descriptors before the
    # loop, 64 bits for every 16 columns of k and of v, and spill them; then each step waits for
    # their reload behind the sums of dQ.
    only = count >> 31
    k_tile = k_s.index(only).reshape([BLOCK_N, D])
    q = q_s.index(stage).reshape([BLOCK_M, D])
    do = do_s.index(stage).reshape([BLOCK_M, DV])
    mbarrier.wait(q_full.index(stage), phase)
    scoring = warpgroup_mma(
        k_tile.slice(PART * KEYS, KEYS, dim=0), q.permute((1, 0)), zeros, use_acc=False,
        is_async=True,
    )
    mbarrier.wait(do_full.index(stage), phase)
    v_part = v_s.index(only).reshape([BLOCK_N, DV]).slice(PART * KEYS, KEYS, dim=0)
    weighing = warpgroup_mma(v_part, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    q_parts = parts_of_queries(first, head, sizes, q_origin, given)
    score = warpgroup_mma_wait(1, deps=[scoring])
    lse2 = lse_s.index(stage).load(gl.SliceLayout(0, SCORES))
    if SIGNED_WEIGHTS:
        # Weights times the factor of those that are kept, f; then dS = f P * (dP - delta / f).
        lse2 = lse2 - factor2
    #: read_pairs
    weight, steep, derivative = weights_of_tile(
        score, q_parts, kv_parts, lse2, columns, column2, first, kv, scale, origin, ragged, head,
        sizes, q_origin, PARTIAL, SCORES, given,
        #: pair_parts
    )
    #: leave_pairs
    delta = delta_s.index(stage).load(gl.SliceLayout(0, SCORES))
    if SIGNED_WEIGHTS:
        delta = delta * inverse
    if HAS_DROPOUT:
        bits = take_kept(PART, count, kept_s, kept_full, 2, BLOCK_M)
    if HAS_DROPOUT and OWN_WEIGHTS:
        weight = keep(weight * keep_factor, bits)
        steep = keep(steep * keep_factor, bits)
    if SIGNED_WEIGHTS:
        # Signs say what is dropped: answers in registers of their own would not fit.
        weight = keep(weight, bits, True)
        weight_half = halves_of_kept(weight, HALF, WEIGHTS)
        if PARTIAL and HAS_DERIVATIVE:
            # A dead pair's derivative may be infinite.
            derivative = gl.where(weight == 0.0, 0.0, derivative)
    else:
        weight_half = gl.convert_layout(weight.to(HALF), WEIGHTS)
    if HAS_DERIVATIVE and not SIGNED_WEIGHTS:
        slope = steep
        steep = slope * derivative
        if PARTIAL:
            # A dead pair's derivative may be infinite.
            steep = gl.where(slope == 0.0, 0.0, steep)
    if PAIRWISE_DERIVATIVE:
        # One value instead of two, while dP is computed.
        finish(derivative if SIGNED_WEIGHTS else steep, sizes.q_len >> 31)
    dweight = warpgroup_mma_wait(0, deps=[weighing])
    if SIGNED_WEIGHTS:
        slope = gl.maximum(weight, 0.0) * dweight - gl.abs(weight) * delta[None, :]
        if LEARNS_COLUMN:
            column_sums += eighths_of_sums(slope)
        if HAS_DERIVATIVE:
            slope = slope * derivative
    elif LEARNS_COLUMN:
        # The derivative does not vary within a head.
        dscore = weight * (dweight - delta[None, :])
        slope = dscore * derivative
        column_sums += eighths_of_sums(dscore)
    else:
        slope = gradient_of_score(steep, dweight, delta)
    slope_half = slope.to(HALF)
    shared = ds_s.index(count & 1)
    shared.slice(PART * KEYS, KEYS, dim=0).store(slope_half)
    slope_operand = gl.convert_layout(slope_half, SLOPES)
    # dV comes after dS: issuing it earlier spills registers.
    adding_v = warpgroup_mma(weight_half, do, dv, is_async=True)
    fence_async_shared()
    #: slopes_are_stored
    meet()
    #: store_slopes
    # dQ comes before dK, so that it is added up while dK is computed.
    if BLOCK_M == 64:
        slopes, keys = shared, k_tile.slice(PART * WIDTH, WIDTH, dim=1)
    else:
        slopes, keys = shared.slice(PART * 64, 64, dim=1), k_tile
    making_q = warpgroup_mma(slopes.permute((1, 0)), keys, no_dq, use_acc=False, is_async=True)
    dv = warpgroup_mma_wait(1, deps=[adding_v])
    leave(do_empty.index(stage), LEAVE_EACH)
    #: let_add
    adding_k = warpgroup_mma(slope_operand, q, dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[making_q])
    head_row = (head.b * sizes.heads + head.h).to(gl.int64) * padded
    if BLOCK_M == 64:
        own = (head_row + first) * D
    else:
        # This address needs fewer registers, and other values would be spilled for them. With tiles
        # of 64 rows it is the slower one. See M9 in docs/measured.md.
        own = head_row * D + gl.to_tensor(q_tile_index).to(gl.int64) * (BLOCK_M * D)
    add_to_sums(SUMS + own + PART * (BLOCK_M * D // 2), dq)
    dk = warpgroup_mma_wait(0, deps=[adding_k])
    leave(q_empty.index(stage), LEAVE_EACH)
    return dk, dv, column_sums


@gluon.jit
def consume_item(
    item, turn, done, PART: gl.constexpr, SUMS, results, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s,
    k_full, v_full, q_full, do_full,
    q_empty, do_empty, scale, sizes, origins, padded, together,
    #: learned
    #: kept
    #: diagonal_consumer
    #: again
    #: pair_consumer
    #: slopes_desc
    given,
):
    """dK and dV of the tile's keys number ``PART``, and half the columns of dQ.

    Returns the program's number of query tiles so far, ``done`` of which were before this item.
    """
    KEYS: gl.constexpr = BLOCK_N // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DK_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DV_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    DQ_WIDTH: gl.constexpr = D // 2 if BLOCK_M == 64 else D
    DQ_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_WIDTH, 16])
    SLOPES: gl.constexpr = gl.DotOperandLayout(0, DK_ROWS, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, DV_ROWS, 2)
    if PERSISTENT:
        tile, b, hkv = word(item_s, 1), word(item_s, 2), word(item_s, 3)
        mbarrier.arrive(item_empty, count=1)
    else:
        tile, b, hkv = place_of_kv_item(item, sizes, together)
    shift = shift_of(origins, Q_KIND, KV_KIND)
    own = tile * BLOCK_N + PART * KEYS
    columns = own + gl.arange(0, KEYS, layout=gl.SliceLayout(1, SCORES))
    places = positions(columns, sizes.kv_len, origins.kv, KV_KIND)
    kv = places[:, None]
    origin = tile * BLOCK_N + shift.kv
    ragged = (tile + 1) * BLOCK_N > sizes.kv_len
    dk = gl.zeros([KEYS, D], gl.float32, layout=DK_ROWS)
    dv = gl.zeros([KEYS, DV], gl.float32, layout=DV_ROWS)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, layout=SCORES)
    no_dq = gl.zeros([64, DQ_WIDTH], gl.float32, layout=DQ_ROWS)
    mbarrier.wait(k_full, turn & 1)
    mbarrier.wait(v_full, turn & 1)
    group = sizes.heads // sizes.kv_heads
    count = done
    before = 0.0
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
        if HAS_DROPOUT:
            chance = drop_probability(head, sizes, given)
            keep_factor = factor_of_kept(chance)
            factor2, inverse = gl.log2(keep_factor), 1.0 / keep_factor
        column_sums = eighths_of_sums(zeros)
        for step in range(0, masked):
            q_tile_index = q_tile_of(step, visits, tile, head, sizes, shift, True, given)
            dk, dv, column_sums = add_query_tile(
                PART, count, q_tile_index, dk, dv, column_sums, zeros, no_dq, kv_parts, columns,
                column2, kv, origin, ragged, SUMS, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s,
                q_full, do_full, q_empty, do_empty, factored, head, sizes, origins.q, padded, True,
                SCORES, WEIGHTS, SLOPES,
                #: taking
                #: diagonal_consumer
                given,
                #: pair_reader
                #: storing
            )
            count += 1
        if KV_PASS_HAS_FULL and PEELED:
            for step in range(masked, visits.partial + visits.full):
                q_tile_index = q_tile_of(step, visits, tile, head, sizes, shift, False, given)
                dk, dv, column_sums = add_query_tile(
                    PART, count, q_tile_index, dk, dv, column_sums, zeros, no_dq, kv_parts, columns,
                    column2, kv, origin, ragged, SUMS, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s,
                    q_full, do_full, q_empty, do_empty, factored, head, sizes, origins.q, padded,
                    False, SCORES, WEIGHTS, SLOPES,
                    #: taking
                    #: diagonal_consumer
                    given,
                    #: pair_reader
                    #: storing
                )
                count += 1
        number = (head.b * sizes.heads + head.h).to(gl.int64)
        if LEARNS_COLUMN:
            whole = gl.convert_layout(gl.sum(column_sums, 1), gl.SliceLayout(1, SCORES))
            gl.store(COLUMN_SUMS + number * sizes.kv_len + columns, whole, mask=columns < sizes.kv_len)
        if LEARNS_FACTOR:
            keys = k_s.index(0).reshape([BLOCK_N, D]).slice(PART * KEYS, KEYS, dim=0).load(DK_ROWS)
            product = gl.sum(gl.sum(keys.to(gl.float32) * dk, 1), 0)
            place = number * tl.cdiv(sizes.kv_len, BLOCK_N) + tile
            # dK is a sum over the heads so far.
            gl.store(FACTOR_SUMS + place * 2 + PART, product - before)
            before = product
    if PERSISTENT:
        # The next item's keys may come.
        mbarrier.arrive(kv_empty, count=1)
    #: slopes_are_stored
    #: dk_rows
    dk_out = Tensor(results.dk, results.dk_b, results.dk_h, results.dk_n)
    store_rows(dk_out, dk_rows, own, b, hkv, sizes.kv_len, HEAD_DIM)
    if HAS_COMMON:
        dv = dv * factor_of_weights(Head(b, 0, hkv), sizes, given)
    #: dv_rows
    dv_out = Tensor(results.dv, results.dv_b, results.dv_h, results.dv_n)
    store_rows(dv_out, dv_rows, own, b, hkv, sizes.kv_len, VALUE_DIM)
    return count
