"""Backward kernel for Hopper, for head dims above 128: dQ, dK and dV in one pass.

A program has 64 keys: dV takes half the registers of one consumer warpgroup, and dK of the other.
The first makes the weights and dV, the second dP, dS and dK, and each half of the columns of dQ.
Follows ``backward_shared`` in one module.

Whatever one consumer wrote, the other reads after a named barrier, which both pass once for each
query tile. For a tile,

1. the first stores P times the score's derivative in ``p_slope`` and signals that, without waiting;
   the second waits for that, and stores dS in ``ds``;
2. both meet, and make dQ from ``ds``.

So one buffer of each is enough. The first writes ``p_slope`` for the next tile after they met, when
the second has read it. The second writes ``ds`` for the next tile once the first has announced
that tile's weights, before which it waited for its half of this tile's dQ.

After the last tile, or without any, both meet once more: nobody reads k and v any longer, and dK
and dV take their places on the way out.
"""
# ruff: noqa: F821

#: begin


# Of the last columns of keys, those that are all zeros make none of dQ.
SHORT_WIDTH = tl.constexpr(64 if D == 256 and HEAD_DIM <= 192 else D // 2)


@gluon.jit
def add_query_tile(
    PART: gl.constexpr, tile_index, q_index, total, keys, results, memory, work, padded,
    PARTIAL: gl.constexpr, OPERAND: gl.constexpr,
):
    """Add one query tile's part to dQ, and to ``total``: dV, or dK before the scale.

    Tiles are (keys, queries).
    """
    head, sizes = work.scope.head, work.scope.sizes
    slot = slot_of(tile_index, STAGES)
    first = q_index * BLOCK_M
    # An index that no compiler knows to be zero: see ``backward``.
    only = tile_index >> 31
    k_tile = memory.k.data.index(only).reshape([BLOCK_N, D])
    q_tile = memory.q.data.index(slot.stage).reshape([BLOCK_M, D])
    do_tile = memory.do.data.index(slot.stage).reshape([BLOCK_M, DV])
    shared = memory.ds.data.index(only)
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=SCORES)
    if PART == 0:
        shift = place_of_shifts(memory.shifts, head, first, sizes, padded)
        consumer_wait(memory.q, slot)
        scoring = multiply(k_tile, q_tile, zeros, HEAD_DIM)
        rest = memory.lse.data.index(slot.stage).load(gl.SliceLayout(0, SCORES))
        q_parts = parts_of_queries(first, work)
        score = warpgroup_mma_wait(0, deps=[scoring])
        consumer_release(memory.q, slot)
        pair_parts = read_bias(PART, tile_index, PARTIAL, memory.bias) if HAS_BIAS else None
        parts = Parts(q_parts, keys.parts, pair_parts, keys.first)
        p, p_slope, derivative = weights_of_tile(
            score, first, parts, LogSum(shift, rest), keys, work, PARTIAL
        )
        if HAS_BIAS:
            consumer_release(memory.bias, slot_of_bias(PART, tile_index))
        operand = gl.convert_layout(p.to(HALF), OPERAND)
        if HAS_DERIVATIVE:
            by_final = p_slope
            p_slope = by_final * derivative
            if PARTIAL:
                # A dead pair's derivative may be infinite.
                p_slope = gl.where(by_final == 0.0, 0.0, p_slope)
        memory.p_slope.store(p_slope)
        signal_p()
        # dV runs while the other warpgroup computes dS.
        consumer_wait(memory.do, slot)
        adding = warpgroup_mma(operand, do_tile, total, is_async=True)
    else:
        consumer_wait(memory.do, slot)
        v_tile = memory.v.data.index(only).reshape([BLOCK_N, DV])
        weighing = multiply(v_tile, do_tile, zeros, VALUE_DIM)
        delta = memory.delta.data.index(slot.stage).load(gl.SliceLayout(0, SCORES))
        dp = warpgroup_mma_wait(0, deps=[weighing])
        consumer_release(memory.do, slot)
        wait_for_p()
        ds = gradient_of_score(memory.p_slope.load(SCORES), dp, delta)
        ds_half = ds.to(HALF)
        shared.store(ds_half)
        operand = gl.convert_layout(ds_half, OPERAND)
        fence_async_shared()
        consumer_wait(memory.q, slot)
    sync_consumers()
    DQ_WIDTH: gl.constexpr = SHORT_WIDTH if PART == 1 else D // 2
    DQ_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_WIDTH, 16])
    no_dq = gl.zeros([64, DQ_WIDTH], gl.float32, layout=DQ_ROWS)
    making_q = warpgroup_mma(
        shared.permute((1, 0)), k_tile.slice(PART * (D // 2), DQ_WIDTH, dim=1), no_dq,
        use_acc=False, is_async=True,
    )
    if PART == 0:
        total = warpgroup_mma_wait(1, deps=[adding])
        consumer_release(memory.do, slot)
        dq = warpgroup_mma_wait(0, deps=[making_q])
    else:
        # dQ comes before dK, so that it is added up while dK is computed.
        adding = warpgroup_mma(operand, q_tile, total, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[making_q])
    row = (head.b * sizes.heads + head.h).to(gl.int64) * padded + first
    add_to_sums(results.dq_sums + row * D + PART * (BLOCK_M * D // 2), dq)
    if PART == 1:
        total = warpgroup_mma_wait(0, deps=[adding])
        consumer_release(memory.q, slot)
    return total


@gluon.jit
def consume_work(
    work_tile, work_index, tiles_before, PART: gl.constexpr, results, memory, call
):
    """The tile's dV (part 0) or dK (part 1), and half the columns of dQ.

    Returns the number of query tiles. Its programs have one work tile each, since the way out takes
    the place of k and v: ``work_index`` and ``tiles_before`` are 0.
    """
    OWN_WIDTH: gl.constexpr = DV if PART == 0 else D
    OWN_ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OWN_WIDTH, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OWN_ROWS, 2)
    sizes, given = call.sizes, call.given
    tile, b, own_head = place_of_work(work_tile, call)
    hkv, first_head, members = heads_of_work(own_head, sizes)
    shift = shift_of(call.origins, Q_KIND, KV_KIND)
    own = tile * BLOCK_N
    numbers, places = keys_of_tile(own, BLOCK_N, sizes, call.origins)
    kv = places[:, None]
    origin = own + shift.kv
    ragged = own + BLOCK_N > sizes.kv_len
    total = gl.zeros([BLOCK_N, OWN_WIDTH], gl.float32, layout=OWN_ROWS)
    consumer_wait(memory.k, slot_of(work_index, 1))
    consumer_wait(memory.v, slot_of(work_index, 1))
    tile_index = tiles_before
    for member in range(0, members):
        scope = Scope(Head(b, first_head + member, hkv), sizes, given)
        visits, masked = count_tiles(tile, shift, scope)
        work = Work(tile, scope, visits, None, None, call.origins, shift)
        keys = keys_of_head(own, numbers, places, kv, origin, ragged, call.scale, work)
        for FULL in gl.static_range(2 if KV_PASS_HAS_FULL and PEELED else 1):
            end = visits.partial + visits.full if FULL else masked
            for step in range(masked if FULL else 0, end):
                total = add_query_tile(
                    PART, tile_index, q_tile_at(step, work, not FULL), total, keys, results, memory,
                    work, call.padded, not FULL, OPERAND,
                )
                tile_index += 1
    sync_consumers()
    out = results.keys
    if PART == 0:
        v_tile = memory.v.data.index(0).reshape([BLOCK_N, DV])
        if HAS_COMMON:
            total = total * factor_of_weights(Scope(Head(b, 0, hkv), sizes, given))
        rows = rows_to_store(total, v_tile)
        dv_out = Tensor(out.dv, out.dv_b, out.dv_h, out.dv_n)
        store_rows(1, dv_out, rows, own, b, own_head, call, VALUE_DIM)
    else:
        k_tile = memory.k.data.index(0).reshape([BLOCK_N, D])
        rows = rows_to_store(total * call.scale, k_tile)
        dk_out = Tensor(out.dk, out.dk_b, out.dk_h, out.dk_n)
        store_rows(0, dk_out, rows, own, b, own_head, call, HEAD_DIM)
    return tile_index


@gluon.jit
def rows_to_store(rows, place):
    """Rows of dK or of dV as threads store them.

    Halves go through shared memory, so that each thread stores 16 bytes. Rows in fp32 would take
    twice the memory there: each thread stores what it holds, 8 bytes at a time.
    """
    if not FP32_ROWS:
        STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        place.store(rows.to(HALF))
        rows = place.load(STORED)
    return rows
