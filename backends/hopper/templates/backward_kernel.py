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
        work_tiles = tl.cdiv(sizes.kv_len, BLOCK_N) * sizes.batch * sizes.kv_heads
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
        announce_work(work_index, work_tile, 0, 0, 0, memory.fields)
    else:
        load_work(work_tile, 0, 0, memory, call)


@gluon.jit
def consume(PART: gl.constexpr, results, memory, call):
    """Part ``PART`` of the gradients of all work tiles of the program."""
    if PERSISTENT:
        sizes = call.sizes
        work_tiles = tl.cdiv(sizes.kv_len, BLOCK_N) * sizes.batch * sizes.kv_heads
        work_index, tiles_before = 0, 0
        fields = memory.fields
        mbarrier.wait(fields.full, 0)
        work_tile = read_field(fields.data, 0)
        while work_tile < work_tiles:
            tiles_before = consume_work(
                work_tile, work_index, tiles_before, PART, results, memory, call
            )
            work_index += 1
            mbarrier.wait(fields.full, work_index & 1)
            work_tile = read_field(fields.data, 0)
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
    q_s = gl.allocate_shared_memory(HALF, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(HALF, [STAGES, 1, 1, BLOCK_M, DV], do_desc.layout)
    k_s = gl.allocate_shared_memory(HALF, [1, 1, 1, BLOCK_N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(HALF, [1, 1, 1, BLOCK_N, DV], v_desc.layout)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_s = gl.allocate_shared_memory(HALF, [1 if ABOVE_128 else 2, BLOCK_N, BLOCK_M], SHARED)
    p_slope, fields, kept, bias, lines, k_empty, ds_full = None, None, None, None, None, None, None
    turns = None
    if ABOVE_128:
        # Rows of eight lie in as many banks.
        ROTATED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        p_slope = gl.allocate_shared_memory(gl.float32, [BLOCK_N, BLOCK_M], ROTATED)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], delta_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    do_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    mbarrier.init(k_full, count=1)
    mbarrier.init(v_full, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=1)
        mbarrier.init(do_full.index(stage), count=1)
        mbarrier.init(q_empty.index(stage), count=2 * (128 if RELEASE_PER_THREAD else 1))
        mbarrier.init(do_empty.index(stage), count=2 * (128 if RELEASE_PER_THREAD else 1))
    if HAS_DROPOUT:
        BYTES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        bits = gl.allocate_shared_memory(gl.int8, [STAGES * 2, 128, BLOCK_M // 16], BYTES)
        kept_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        for stage in gl.static_range(STAGES):
            mbarrier.init(kept_full.index(stage), count=1)
        kept = Ring(None, bits, kept_full, None, None)
    if PERSISTENT:
        FIELDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        numbers = gl.allocate_shared_memory(gl.int32, [16], FIELDS)
        k_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        fields_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        fields_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(k_empty, count=2)
        mbarrier.init(fields_full, count=1)
        mbarrier.init(fields_empty, count=2)
        fields = Ring(None, numbers, fields_full, fields_empty, None)
    if TAKES_TURNS:
        NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        taken = gl.allocate_shared_memory(gl.int32, [2, 16], NUMBERS)
        taken_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        for place in gl.static_range(2):
            mbarrier.init(taken_full.index(place), count=1)
        turns = Ring(None, taken, taken_full, None, None)
    if ADDS_DIAGONALS:
        LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        lines = gl.allocate_shared_memory(gl.float32, [2, 2, 128], LINES)
        ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
        for place in gl.static_range(2):
            mbarrier.init(ds_full.index(place), count=1)
    if HAS_BIAS:
        data, full, empty = bias_memory(bias_descs)
        bias = Ring(bias_descs, data, full, empty, None)
    memory = BackwardMemory(
        Ring(q_desc, q_s, q_full, q_empty, None),
        Ring(k_desc, k_s, k_full, k_empty, None),
        Ring(v_desc, v_s, v_full, k_empty, None),
        Ring(do_desc, do_s, do_full, do_empty, None),
        Ring(lse_desc, lse_s, q_full, q_empty, None),
        Ring(delta_desc, delta_s, do_full, do_empty, None),
        Ring(results.ds, ds_s, ds_full, None, None),
        shifts, p_slope, fields, kept, bias, lines, turns,
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
    kv_heads, kv_len, HEAD_DIM), its rows ``rows_dk*`` apart, and DV_OUT likewise. Where a factor or
    columns of the score have gradients: FACTOR_SUMS (batch, heads, tiles, 2) and COLUMN_SUMS
    (batch, heads, kv_len), fp32. Where work tiles take turns: TURNS (batch, heads, query tiles),
    int32, 0 before a launch. Where results are checked: CHECKS (2, batch, kv_heads, kv_len), fp32,
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
