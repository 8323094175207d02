"""The last part of a backward kernel: which items a program takes, and what its warpgroups share.

A program that has several takes them while the grid lasts: the producer loads the next item's tiles
while the consumers store the gradients of the one before. Where a mask makes items differ in
length, whoever is free draws the next number, as hardware hands out programs.

Follows ``backward_shared``, then ``backward`` or ``backward_wide``, in one module.
"""
# ruff: noqa: F821

#: begin


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_s, k_s, v_s, do_s, lse_s, delta_s,
    k_full, v_full, q_full, do_full, q_empty, do_empty, sizes, origins, padded, together,
    #: counter
    #: kept
    #: diagonal_producer
    #: again
    #: pair_producer
    given,
):
    """Load the tiles of all items of the program."""
    item = gl.program_id(0)
    if PERSISTENT:
        items = tl.cdiv(sizes.kv_len, BLOCK_N) * sizes.batch * sizes.kv_heads
        turn, done = 0, 0
        while item < items:
            done = load_item(
                item, turn, done, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_s, k_s,
                v_s, do_s, lse_s, delta_s, k_full, v_full, q_full, do_full, q_empty, do_empty,
                sizes, origins, padded, together,
                #: kept
                #: diagonal_producer
                #: again
                #: pair_producer
                given,
            )
            if DRAWN:
                drawn = gl.atomic_add(COUNTER, 1, sem="relaxed")
                item = gl.num_programs(0) + drawn
                if drawn == items - 1:
                    # Each program draws until nothing is left: together, ``items`` times.
                    gl.store(COUNTER, 0)
            else:
                item += gl.num_programs(0)
            turn += 1
        announce_item(turn, item, 0, 0, 0, item_s, item_full, item_empty)
    else:
        load_item(
            item, 0, 0, q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, q_s, k_s, v_s, do_s,
            lse_s, delta_s, k_full, v_full, q_full, do_full, q_empty, do_empty, sizes, origins,
            padded, together,
            #: kept
            #: diagonal_producer
            #: again
            #: pair_producer
            given,
        )


@gluon.jit
def consume(
    PART: gl.constexpr, SUMS, results, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s,
    #: steep
    k_full, v_full, q_full, do_full, q_empty, do_empty, scale, sizes, origins, padded, together,
    #: learned
    #: kept
    #: diagonal_consumer
    #: again
    #: pair_consumer
    #: slopes_desc
    given,
):
    """Part ``PART`` of the gradients of all items of the program."""
    if PERSISTENT:
        items = tl.cdiv(sizes.kv_len, BLOCK_N) * sizes.batch * sizes.kv_heads
        turn, done = 0, 0
        mbarrier.wait(item_full, 0)
        item = word(item_s, 0)
        while item < items:
            done = consume_item(
                item, turn, done, PART, SUMS, results, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s,
                #: steep
                k_full, v_full, q_full, do_full, q_empty, do_empty, scale, sizes, origins, padded,
                together,
                #: learned
                #: kept
                #: diagonal_consumer
                #: again
                #: pair_consumer
                #: slopes_desc
                given,
            )
            turn += 1
            mbarrier.wait(item_full, turn & 1)
            item = word(item_s, 0)
    else:
        consume_item(
            gl.program_id(0), 0, 0, PART, SUMS, results, q_s, k_s, v_s, do_s, lse_s, delta_s, ds_s,
            #: steep
            k_full, v_full, q_full, do_full, q_empty, do_empty, scale, sizes, origins, padded,
            together,
            #: learned
            #: kept
            #: diagonal_consumer
            #: again
            #: pair_consumer
            #: slopes_desc
            given,
        )


@gluon.jit
def attention_backward_kv(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, SUMS, DK, DV_OUT,
    #: pair_descs
    #: slopes_desc
    #: counter
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, padded, rows_dkb, rows_dkh,
    rows_dkn, rows_dvb, rows_dvh, rows_dvn, together,
    #: learned
    #: distance_sums
    #: given
):
    """An item is one key-value tile of one kv head, summed over its group of query heads.

    A program has one, or where PERSISTENT one after the other, until all are taken. COUNTER (1) is
    int32: items taken after each program's first; 0 before a launch, and after.
    Descriptors are of (batch, heads, length, head dim), dQ in fp32 and before the scale; those of
    the row statistics are of (batch * heads * padded,), see ``statistics_rows``. DK is (batch,
    kv_heads, kv_len, HEAD_DIM), its rows ``rows_dk*`` apart, and DV_OUT likewise. Where a factor or
    columns of the score learn: FACTOR_SUMS (batch, heads, tiles, 2) and COLUMN_SUMS (batch, heads, kv_len), fp32.
    """
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    origins = Origins(q_origin, kv_origin)
    results = KeyGradients(
        DK, DV_OUT, rows_dkb, rows_dkh, rows_dkn, rows_dvb, rows_dvh, rows_dvn
    )
    given = Given(
        #: given
    )
    q_s = gl.allocate_shared_memory(HALF, [STAGES, 1, 1, BLOCK_M, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(HALF, [STAGES, 1, 1, BLOCK_M, DV], do_desc.layout)
    k_s = gl.allocate_shared_memory(HALF, [1, 1, 1, BLOCK_N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(HALF, [1, 1, 1, BLOCK_N, DV], v_desc.layout)
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_s = gl.allocate_shared_memory(HALF, [1 if WIDE else 2, BLOCK_N, BLOCK_M], SHARED)
    if WIDE:
        # Rows of eight lie in as many banks.
        ROTATED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
        steep_s = gl.allocate_shared_memory(gl.float32, [BLOCK_N, BLOCK_M], ROTATED)
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
        mbarrier.init(q_empty.index(stage), count=2 * (128 if LEAVE_EACH else 1))
        mbarrier.init(do_empty.index(stage), count=2 * (128 if LEAVE_EACH else 1))
    if HAS_DROPOUT:
        BYTES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        kept_s = gl.allocate_shared_memory(gl.int8, [STAGES * 2, 128, BLOCK_M // 16], BYTES)
        kept_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        for stage in gl.static_range(STAGES):
            mbarrier.init(kept_full.index(stage), count=1)
    if PERSISTENT:
        item_s = gl.allocate_shared_memory(gl.int32, [16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        kv_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        item_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        item_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(kv_empty, count=2)
        mbarrier.init(item_full, count=1)
        mbarrier.init(item_empty, count=2)
    #: diagonal_memory
    #: pair_memory
    #: partitions
