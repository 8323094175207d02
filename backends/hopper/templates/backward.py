"""Backward kernel for Hopper: dQ, dK and dV in one pass over key-value tiles.

A producer warpgroup loads; two consumer warpgroups own half of the keys each. They share dS through
shared memory, so that each of them makes half of dQ, which it adds to fp32 sums in global memory,
straight from registers (``library.add_to_sums``). Follows ``backward_shared`` in one module.
"""
# ruff: noqa: F821

#: begin


KEYS = tl.constexpr(BLOCK_N // 2)
# Each warpgroup makes half of dQ: half of its columns, or of more than 64 rows half of these.
DQ_WIDTH = tl.constexpr(D // 2 if BLOCK_M == 64 else D)
# Of the second half of the columns, those that are all zeros make none of dQ.
SHORT_WIDTH = tl.constexpr(
    DQ_WIDTH if D < 128 or HEAD_DIM > 96 else 16 if HEAD_DIM <= 80 else 32
)
DK_ROWS = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16]))
DV_ROWS = tl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16]))
DS_OPERAND = tl.constexpr(gl.DotOperandLayout(0, DK_ROWS, 2))
P_OPERAND = tl.constexpr(gl.DotOperandLayout(0, DV_ROWS, 2))
# Loops over tiles that need the mask's code and over the others, in this order or the reverse.
LOOPS = tl.constexpr(2 if KV_PASS_HAS_FULL and PEELED else 1)
FIRST_LOOP = tl.constexpr(LOOPS - 1 if FULL_FIRST else 0)
LOOP_STEP = tl.constexpr(-1 if FULL_FIRST else 1)


@gluon.jit
def add_query_tile(
    PART: gl.constexpr, tile_index, q_index, sums, keys, kept, results, memory, work, padded,
    PARTIAL: gl.constexpr,
):
    """Add one query tile's part to dK (before the scale), dV and dQ, and to the keys' sums of dS.

    Tiles are (keys, queries).
    """
    head, sizes = work.scope.head, work.scope.sizes
    dk, dv, column_sums = sums
    WIDTH: gl.constexpr = D // 2
    slot = slot_of(tile_index, STAGES)
    first = q_index * BLOCK_M
    # An index that no compiler knows to be zero. It would compute the products' descriptors before the
    # loop, 64 bits for every 16 columns of k and of v, and spill them; then each step waits for
    # their reload behind the sums of dQ.
    only = tile_index >> 31
    k_tile = memory.k.data.index(only).reshape([BLOCK_N, D])
    q_tile = memory.q.data.index(slot.stage).reshape([BLOCK_M, D])
    do_tile = memory.do.data.index(slot.stage).reshape([BLOCK_M, DV])
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, layout=SCORES)
    shift = place_of_shifts(memory.shifts, head, first, sizes, padded)
    consumer_wait(memory.q, slot)
    scoring = multiply(k_tile.slice(PART * KEYS, KEYS, dim=0), q_tile, zeros, HEAD_DIM)
    consumer_wait(memory.do, slot)
    v_part = memory.v.data.index(only).reshape([BLOCK_N, DV]).slice(PART * KEYS, KEYS, dim=0)
    weighing = multiply(v_part, do_tile, zeros, VALUE_DIM)
    q_parts = parts_of_queries(first, work)
    score = warpgroup_mma_wait(1, deps=[scoring])
    rest = memory.lse.data.index(slot.stage).load(gl.SliceLayout(0, SCORES))
    if SIGNED_WEIGHTS:
        # Weights times the factor of those that are kept, f; then dS = f P * (dP - delta / f).
        rest = rest - kept.log2
    pair_parts = read_bias(PART, tile_index, PARTIAL, memory.bias) if HAS_BIAS else None
    parts = Parts(q_parts, keys.parts, pair_parts, keys.first)
    p, p_slope, derivative = weights_of_tile(
        score, first, parts, LogSum(shift, rest), keys, work, PARTIAL
    )
    if HAS_BIAS:
        consumer_release(memory.bias, slot_of_bias(PART, tile_index))
    delta = memory.delta.data.index(slot.stage).load(gl.SliceLayout(0, SCORES))
    if SIGNED_WEIGHTS:
        delta = delta * kept.inverse
    if HAS_DROPOUT:
        bits = take_kept(PART, tile_index, memory.kept, 2, BLOCK_M)
    if HAS_DROPOUT and OWN_WEIGHTS:
        p = keep(p * kept.factor, bits)
        p_slope = keep(p_slope * kept.factor, bits)
    if SIGNED_WEIGHTS:
        # Signs say what is dropped: answers in registers of their own would not fit.
        p = keep(p, bits, True)
        p_half = halves_of_kept(p, HALF, P_OPERAND)
        if PARTIAL and HAS_DERIVATIVE:
            # A dead pair's derivative may be infinite.
            derivative = gl.where(p == 0.0, 0.0, derivative)
    else:
        p_half = gl.convert_layout(p.to(HALF), P_OPERAND)
    if HAS_DERIVATIVE and not SIGNED_WEIGHTS:
        p_slope = slope_by_raw_score(p_slope, derivative, PARTIAL)
    if PAIRWISE_DERIVATIVE:
        # One value instead of two, while dP is computed.
        pin_before_wait(derivative if SIGNED_WEIGHTS else p_slope, sizes.q_len >> 31)
    dp = warpgroup_mma_wait(0, deps=[weighing])
    if SIGNED_WEIGHTS:
        ds = gl.maximum(p, 0.0) * dp - gl.abs(p) * delta[None, :]
        if SPARES_DEAD:
            ds = gl.where(p == 0.0, 0.0, ds)
        if GRAD_OF_COLUMN:
            column_sums += partial_row_sums(ds)
        if HAS_DERIVATIVE:
            ds = ds * derivative
    elif GRAD_OF_COLUMN:
        # The derivative does not vary within a head.
        final_ds = p * (dp - delta[None, :])
        if SPARES_DEAD:
            final_ds = gl.where(p == 0.0, 0.0, final_ds)
        ds = final_ds * derivative
        column_sums += partial_row_sums(final_ds)
    else:
        ds = gradient_of_score(p_slope, dp, delta)
    ds_half = ds.to(HALF)
    shared = memory.ds.data.index(tile_index & 1)
    shared.slice(PART * KEYS, KEYS, dim=0).store(ds_half)
    ds_operand = gl.convert_layout(ds_half, DS_OPERAND)
    # dV comes after dS. Earlier is slower, and no other order is faster: see M49 in docs/dev/measured.md.
    adding_v = warpgroup_mma(p_half, do_tile, dv, is_async=True)
    fence_async_shared()
    if STORES_DS and PART == 0:
        tma_wait(0)
    sync_consumers()
    if STORES_DS:
        store_ds(PART, q_index, first, shared, keys, results, work)
    # dQ comes before dK, so that it is added up while dK is computed.
    OWN_WIDTH: gl.constexpr = SHORT_WIDTH if PART == 1 else DQ_WIDTH
    DQ_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN_WIDTH, 16])
    if BLOCK_M == 64:
        ds_part, k_part = shared, k_tile.slice(PART * WIDTH, OWN_WIDTH, dim=1)
    else:
        ds_part, k_part = shared.slice(PART * 64, 64, dim=1), k_tile
    no_dq = gl.zeros([64, OWN_WIDTH], gl.float32, layout=DQ_ROWS)
    making_q = warpgroup_mma(
        ds_part.permute((1, 0)), k_part, no_dq, use_acc=False, is_async=True
    )
    dv = warpgroup_mma_wait(1, deps=[adding_v])
    consumer_release_by(memory.do, slot, RELEASE_PER_THREAD)
    if ADDS_DIAGONALS and PART == 0:
        producer_commit(memory.ds, slot_of(tile_index, 2))
    adding_k = warpgroup_mma(ds_operand, q_tile, dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[making_q])
    head_row = (head.b * sizes.heads + head.h).to(gl.int64) * padded
    if BLOCK_M == 64:
        own = (head_row + first) * D
    else:
        # This address needs fewer registers, and other values would be spilled for them. With tiles
        # of 64 rows it is the slower one. See M9 in docs/dev/measured.md.
        own = head_row * D + gl.to_tensor(q_index).to(gl.int64) * (BLOCK_M * D)
    if TAKES_TURNS:
        consumer_wait(memory.turns, slot)
    add_to_sums(results.dq_sums + own + PART * (BLOCK_M * D // 2), dq)
    dk = warpgroup_mma_wait(0, deps=[adding_k])
    consumer_release_by(memory.q, slot, RELEASE_PER_THREAD)
    return KeySums(dk, dv, column_sums)


@gluon.jit
def add_query_tiles(
    PART: gl.constexpr, tile_index, begins, ends, sums, keys, kept, order, results, memory, work,
    padded,
):
    """Add parts of several query tiles: those that need the mask's code, and those that do not.

    ``begins`` and ``ends`` are the steps of both. Returns the program's number of query tiles so
    far, and the sums.
    """
    dk, dv, column_sums = sums
    for FULL in gl.static_range(FIRST_LOOP, LOOPS - 1 - FIRST_LOOP + LOOP_STEP, LOOP_STEP):
        for step in range(begins[FULL], ends[FULL]):
            place = step
            if TAKES_TURNS:
                place = place_in_turn(step, order[0], order[1], work.visits, FULL)
            dk, dv, column_sums = add_query_tile(
                PART, tile_index, q_tile_at(place, work, not FULL), KeySums(dk, dv, column_sums),
                keys, kept, results, memory, work, padded, not FULL,
            )
            tile_index += 1
    return tile_index, dk, dv, column_sums


@gluon.jit
def consume_work(
    work_tile, work_index, tiles_before, PART: gl.constexpr, results, memory, call
):
    """dK and dV of the tile's keys number ``PART``, and half the columns of dQ.

    Returns the program's number of query tiles so far, ``tiles_before`` of which were before this
    work tile.
    """
    sizes, given = call.sizes, call.given
    if PERSISTENT:
        _, tile, b, own_head = key_item(memory.items)
        release_item(memory.items)
    else:
        tile, b, own_head = place_of_work(work_tile, call)
    hkv, first_head, members = heads_of_work(own_head, sizes)
    shift = shift_of(call.origins, Q_KIND, KV_KIND)
    own = tile * BLOCK_N + PART * KEYS
    numbers, places = keys_of_tile(own, KEYS, sizes, call.origins)
    kv = places[:, None]
    origin = tile * BLOCK_N + shift.kv
    ragged = (tile + 1) * BLOCK_N > sizes.kv_len
    dk = gl.zeros([KEYS, D], gl.float32, layout=DK_ROWS)
    dv = gl.zeros([KEYS, DV], gl.float32, layout=DV_ROWS)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, layout=SCORES)
    slot = slot_of(work_index, 1)
    consumer_wait(memory.k, slot)
    consumer_wait(memory.v, slot)
    tile_index = tiles_before
    before = 0.0
    for member in range(0, members):
        head = Head(b, first_head + member, hkv)
        scope = Scope(head, sizes, given)
        visits, masked = count_tiles(tile, shift, scope)
        work = Work(tile, scope, visits, None, None, call.origins, shift)
        keys = keys_of_head(own, numbers, places, kv, origin, ragged, call.scale, work)
        kept = None
        if HAS_DROPOUT:
            chance = drop_probability(scope)
            keep_factor = factor_of_kept(chance)
            kept = Kept(keep_factor, gl.log2(keep_factor), 1.0 / keep_factor)
        column_sums = partial_row_sums(zeros)
        total = visits.partial + visits.full
        order = None
        if TAKES_TURNS:
            order = (tiles_ahead(masked, work), masked)
        if TWO_SIDED:
            # Tiles ahead and FULL ones, then the others: the same code twice.
            ahead, behind = order[0], order[0] + total - masked
            for side in range(0, 2):
                begins = (gl.where(side == 0, 0, behind), gl.where(side == 0, ahead, total))
                ends = (gl.where(side == 0, ahead, total), gl.where(side == 0, behind, total))
                tile_index, dk, dv, column_sums = add_query_tiles(
                    PART, tile_index, begins, ends, KeySums(dk, dv, column_sums), keys, kept,
                    order, results, memory, work, call.padded,
                )
        else:
            begins, ends = (0, masked), (masked, total)
            if TAKES_TURNS:
                begins, ends = (total - masked, 0), (total, total - masked)
            tile_index, dk, dv, column_sums = add_query_tiles(
                PART, tile_index, begins, ends, KeySums(dk, dv, column_sums), keys, kept, order,
                results, memory, work, call.padded,
            )
        number = (head.b * sizes.heads + head.h).to(gl.int64)
        if GRAD_OF_COLUMN:
            whole = gl.convert_layout(gl.sum(column_sums, 1), gl.SliceLayout(1, SCORES))
            gl.store(
                given.COLUMN_SUMS + number * sizes.kv_len + numbers, whole,
                mask=numbers < sizes.kv_len,
            )
        if GRAD_OF_FACTOR:
            k_part = memory.k.data.index(0).reshape([BLOCK_N, D]).slice(PART * KEYS, KEYS, dim=0)
            product = gl.sum(gl.sum(k_part.load(DK_ROWS).to(gl.float32) * dk, 1), 0)
            place = number * tl.cdiv(sizes.kv_len, BLOCK_N) + tile
            # dK is a sum over the heads so far.
            gl.store(given.FACTOR_SUMS + place * 2 + PART, product - before)
            before = product
    if PERSISTENT:
        # The next work tile's keys may come.
        consumer_release(memory.k, slot)
    if STORES_DS and PART == 0:
        tma_wait(0)
    out = results.keys
    dk_out = Tensor(out.dk, out.dk_b, out.dk_h, out.dk_n)
    store_rows(0, dk_out, rows_to_store(dk * call.scale), own, b, own_head, call, HEAD_DIM)
    if HAS_COMMON:
        dv = dv * factor_of_weights(Scope(Head(b, 0, hkv), sizes, given))
    dv_out = Tensor(out.dv, out.dv_b, out.dv_h, out.dv_n)
    store_rows(1, dv_out, rows_to_store(dv), own, b, own_head, call, VALUE_DIM)
    return tile_index


@gluon.jit
def slope_by_raw_score(p_slope, derivative, PARTIAL: gl.constexpr):
    """Weights' slopes by ``scale * (q . k)`` from those by the final score."""
    found = p_slope * derivative
    if PARTIAL:
        # A dead pair's derivative may be infinite.
        found = gl.where(p_slope == 0.0, 0.0, found)
    return found


@gluon.jit
def rows_to_store(rows):
    """Rows of dK or of dV as threads store them.

    Halves go through shared memory, so that each thread stores 16 bytes. Rows in fp32 would take
    twice the memory there: each thread stores what it holds, 8 bytes at a time.
    """
    if not FP32_ROWS:
        STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        rows = gl.convert_layout(rows.to(HALF), STORED)
    return rows
