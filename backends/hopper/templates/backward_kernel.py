"""The last part of a backward kernel: which work tiles a program takes, its memory, its entry.

A program that has several takes them while the grid lasts: the producer loads the next work tile's
tiles while the consumers store the gradients of the one before. Where a mask makes work tiles differ
in length, whoever is free draws the next number, as hardware hands out programs.

Follows ``backward_shared``, then ``backward`` or ``backward_wide``, in one module.
"""
# ruff: noqa: F821

#: begin


@gluon.jit
def draw_in_turn(work_tiles, call):
    """The next work tile of all, in their order; ``work_tiles`` or more where none is left."""
    drawn = gl.atomic_add(call.counter, 1, sem="relaxed")
    if drawn == work_tiles + gl.num_programs(0) - 1:
        # Each program draws once in vain.
        gl.store(call.counter, 0)
    return drawn


@gluon.jit
def produce(memory, call):
    """Load the tiles of all work tiles of the program."""
    work_tile = gl.program_id(0)
    if PERSISTENT:
        sizes = call.sizes
        work_tiles = number_of_work_tiles(sizes)
        work_index, tiles_before = 0, 0
        if TAKES_TURNS:
            clear_turns(memory.turns)
            # Nobody may have a work tile before all those that it waits for are taken. Programs may
            # start in any order, and some of them when others have ended.
            work_tile = draw_in_turn(work_tiles, call)
        while work_tile < work_tiles:
            tiles_before = load_work(work_tile, work_index, tiles_before, memory, call)
            if TAKES_TURNS:
                work_tile = draw_in_turn(work_tiles, call)
            elif DRAWN:
                drawn = gl.atomic_add(call.counter, 1, sem="relaxed")
                work_tile = gl.num_programs(0) + drawn
                if drawn == work_tiles - 1:
                    # Each program draws until nothing is left: together, ``work_tiles`` times.
                    gl.store(call.counter, 0)
            else:
                work_tile += gl.num_programs(0)
            work_index += 1
        if TAKES_TURNS:
            finish_turns(tiles_before, memory, call.given)
        acquire_item(memory.items, work_index)
        announce_item(KeyItem(work_tile, 0, 0, 0), memory.items)
    else:
        load_work(work_tile, 0, 0, memory, call)


@gluon.jit
def consume(PART: gl.constexpr, results, memory, call):
    """Part ``PART`` of the gradients of all work tiles of the program."""
    if PERSISTENT:
        sizes = call.sizes
        work_tiles = number_of_work_tiles(sizes)
        work_index, tiles_before = 0, 0
        items = memory.items
        await_item(items, work_index)
        work_tile = key_item(items).work_tile
        while work_tile < work_tiles:
            tiles_before = consume_work(
                work_tile, work_index, tiles_before, PART, results, memory, call
            )
            work_index += 1
            await_item(items, work_index)
            work_tile = key_item(items).work_tile
    else:
        consume_work(gl.program_id(0), 0, 0, PART, results, memory, call)


@gluon.jit
def run_backward(operands, statistics, bias_descs, results, call):
    """Set the program's warpgroups to work on its shared memory.

    ``operands`` are descriptors of q, k, v and dO, ``statistics`` of the rests of lse and of delta,
    and where its shifts lie; ``bias_descs`` those of what pairs look up, or None.
    """
    q_desc, k_desc, v_desc, do_desc = operands
    lse_desc, delta_desc, shifts = statistics
    q_s, do_s = allocate_tiles(q_desc, STAGES), allocate_tiles(do_desc, STAGES)
    k_s, v_s = allocate_tiles(k_desc, 1), allocate_tiles(v_desc, 1)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_s = gl.allocate_shared_memory(HALF, [1 if ABOVE_128 else 2, BLOCK_N, BLOCK_M], SHARED)
    p_slope, items, kept, turns, bias = None, None, None, None, None
    lines, k_empty, ds_full = None, None, None
    if ABOVE_128:
        # Rows of eight lie in as many banks.
        ROTATED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        p_slope = gl.allocate_shared_memory(gl.float32, [BLOCK_N, BLOCK_M], ROTATED)
    lse_s, delta_s = allocate_tiles(lse_desc, STAGES), allocate_tiles(delta_desc, STAGES)
    k_full, v_full = new_barrier(1), new_barrier(1)
    q_full, do_full = allocate_barriers(STAGES), allocate_barriers(STAGES)
    q_empty, do_empty = allocate_barriers(STAGES), allocate_barriers(STAGES)
    for stage in gl.static_range(STAGES):
        init_barrier(q_full, stage, 1)
        init_barrier(do_full, stage, 1)
        init_barrier(q_empty, stage, 2 * (128 if RELEASE_PER_THREAD else 1))
        init_barrier(do_empty, stage, 2 * (128 if RELEASE_PER_THREAD else 1))
    if HAS_DROPOUT:
        BYTES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        bits = gl.allocate_shared_memory(gl.int8, [STAGES * 2, 128, BLOCK_M // 16], BYTES)
        kept = Channel(None, bits, new_barriers(STAGES, 1), None, None)
    if PERSISTENT:
        k_empty = new_barrier(2)
        item, item_full, item_empty = item_memory(2)
        items = Channel(None, item, item_full, item_empty, None)
    if TAKES_TURNS:
        NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        taken = gl.allocate_shared_memory(gl.int32, [2, 16], NUMBERS)
        turns = Channel(None, taken, new_barriers(2, 1), None, None)
    if ADDS_DIAGONALS:
        LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        lines = gl.allocate_shared_memory(gl.float32, [2, 2, 128], LINES)
        ds_full = new_barriers(2, 1)
    if HAS_BIAS:
        data, full, empty = bias_memory(bias_descs)
        bias = Channel(bias_descs, data, full, empty, None)
    memory = BackwardMemory(
        Channel(q_desc, q_s, q_full, q_empty, None),
        Channel(k_desc, k_s, k_full, k_empty, None),
        Channel(v_desc, v_s, v_full, k_empty, None),
        Channel(do_desc, do_s, do_full, do_empty, None),
        Tiles(lse_desc, lse_s),
        Tiles(delta_desc, delta_s),
        Channel(results.ds, ds_s, ds_full, None, None),
        shifts, p_slope, items, kept, bias, lines, turns,
    )
    gl.warp_specialize(
        [
            (produce, (memory, call)),
            (consume, (0, results, memory, call)),
            (consume, (1, results, memory, call)),
        ],
        [4, 4],
        [REGISTERS, REGISTERS],
    )


@gluon.jit
def attention_backward_kv(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, LSE_SHIFT, SUMS, DK, DV_OUT,
    #: arguments
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, padded, rows_dkb, rows_dkh,
    rows_dkn, rows_dvb, rows_dvh, rows_dvn, together,
    #: given
):
    """A work tile is one key-value tile of one kv head, summed over its group of query heads.

    A program has one, or where PERSISTENT one after the other, until all are taken. COUNTER (1) is
    int32: work tiles taken after each program's first; 0 before a launch, and after.
    Descriptors are of (batch, heads, length, head dim), dQ in fp32 and before the scale; those of
    the row statistics are of (batch * heads * padded,), see ``statistics_rows``. DK is (batch,
    kv_heads, kv_len, HEAD_DIM), its rows ``rows_dk*`` apart, and DV_OUT likewise: HEADS_APART of
    heads in place of kv heads. Where a factor or columns of the score have gradients: FACTOR_SUMS
    (batch, heads, tiles, 2) and COLUMN_SUMS (batch, heads, kv_len), fp32. Where work tiles take
    turns: TURNS (batch, heads, query tiles), int32, 0 before a launch. Where results are checked: CHECKS (2, batch, kv_heads, kv_len), fp32,
    of dK and dV.
    """
    given = Given(
        #: given
    )
    call = Call(
        scale, Sizes(batch, heads, kv_heads, q_len, kv_len), Origins(q_origin, kv_origin), padded,
        together, COUNTER if DRAWN else None, given,
    )
    ds_desc, stored_tiles, bias_descs = None, None, None
    if STORES_DS:
        ds_desc, stored_tiles = slopes_desc, STORED_TILES
    if HAS_BIAS:
        bias_descs = (pair0_desc, pair1_desc) if BIAS_TILES == 2 else (pair0_desc,)
    keys = KeyGradients(DK, DV_OUT, rows_dkb, rows_dkh, rows_dkn, rows_dvb, rows_dvh, rows_dvn)
    results = BackwardResults(SUMS, keys, ds_desc, stored_tiles)
    run_backward(
        (q_desc, k_desc, v_desc, do_desc), (lse_desc, delta_desc, LSE_SHIFT), bias_descs, results,
        call,
    )
