"""The last part of the forward kernel for Hopper: which items a program takes, and its barriers.

A program that has several takes them while the grid lasts: the producer loads the next item's tiles
while the consumers finish the one before, and tells them what the item is. Where a mask makes items
differ in length, whoever is free draws the next number, as hardware hands out programs.

ANCHORED items follow a row's maximum through PARTIAL tiles and one FULL one; weights of the others are
relative to that, or to 0 if it is less. Where they turn out to be too large or too small, an item has
another turn, in which it follows the maximum to the end.
"""
# ruff: noqa: F821

#: begin
@gluon.jit
def draw(
    took,
    #: counter
):
    """A number for the next item if ``took`` is 1. It comes while tiles are loaded."""
    drawn = 0
    if DRAWN:
        drawn = gl.atomic_add(COUNTER, took, sem="relaxed")
    return drawn


@gluon.jit
def next_item(
    item, took, drawn, items,
    #: counter
):
    """What the program is to do after ``item``, or that itself where ``took`` is 0."""
    if DRAWN:
        found = gl.where(took != 0, gl.num_programs(0) + drawn, item)
        if (took != 0) & (drawn == items - 1):
            # Each program draws until nothing is left: together, ``items`` times.
            gl.store(COUNTER, 0)
    else:
        found = item + took * gl.num_programs(0)
    return found


@gluon.jit
def load_in_turns(
    item, items, q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,
    sizes, origins, together,
    #: counter
    #: kept
    #: again
    #: also_loaded
    given,
):
    """Load the tiles of all items, and again of those that were lost; returns how many turns.

    The consumers tell whether an item was lost when they begin the next item. After the last item
    that may be lost, the next item is empty.
    """
    own, took, fast, older, last = item, 1, 1, -1, -1
    turn, done = 0, 0
    while own < items:
        drawn = draw(
            took,
            #: counter
        )
        if own >= 0:
            done = load_item(
                own, fast, turn, done, q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, k_full,
                k_empty, v_full, v_empty, sizes, origins, together,
                #: kept
                #: again
                #: also_loaded
                given,
            )
        else:
            announce_item(
                turn, own, 0, Head(0, 0, 0), Visits(0, 0, 0, 0), 0, 0, item_s, item_full, item_empty
            )
            for part in gl.static_range(CONSUMERS):
                mbarrier.wait(q_empty.index(part), (turn & 1) ^ 1)
                mbarrier.arrive(q_full.index(part), count=1)
        item = next_item(
            item, took, drawn, items,
            #: counter
        )
        turn += 1
        older = last
        last = gl.where(fast != 0, own, -1)
        mbarrier.wait(item_empty, (turn & 1) ^ 1)
        lost = word(lost_s.index((turn & 1) * CONSUMERS), 0)
        for part in gl.static_range(1, CONSUMERS):
            lost = lost | word(lost_s.index((turn & 1) * CONSUMERS + part), 0)
        lost = gl.where(older >= 0, lost, 0)
        pause = (item >= items) & (last >= 0)
        own = gl.where(lost != 0, older, gl.where(pause, -1, item))
        took = gl.where(pause, 0, 1 - lost)
        fast = 1 - lost
    return turn


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, sizes, origins,
    together,
    #: counter
    #: kept
    #: again
    #: also_loaded
    given,
):
    """Load the tiles of all items of the program."""
    item = gl.program_id(0)
    if PERSISTENT:
        items = tl.cdiv(sizes.q_len, BLOCK_M) * sizes.batch * sizes.heads
        if ANCHORED:
            turn = load_in_turns(
                item, items, q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, k_full, k_empty, v_full,
                v_empty, sizes, origins, together,
                #: counter
                #: kept
                #: again
                #: also_loaded
                given,
            )
        else:
            turn, done = 0, 0
            while item < items:
                drawn = draw(
                    1,
                    #: counter
                )
                done = load_item(
                    item, 0, turn, done, q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, k_full,
                    k_empty, v_full, v_empty, sizes, origins, together,
                    #: kept
                    #: again
                    #: also_loaded
                    given,
                )
                item = next_item(
                    item, 1, drawn, items,
                    #: counter
                )
                turn += 1
        announce_item(
            turn, items, 0, Head(0, 0, 0), Visits(0, 0, 0, 0), 0, 0, item_s, item_full, item_empty
        )
    else:
        load_item(
            item, 0, 0, 0, q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, k_full, k_empty, v_full,
            v_empty, sizes, origins, together,
            #: kept
            #: again
            #: also_loaded
            given,
        )


@gluon.jit
def consume(
    PART: gl.constexpr, o_desc, LSE, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty, scale,
    sizes, origins, together,
    #: output
    #: kept
    #: again
    #: also_read
    given,
):
    """Attention of rows number ``PART`` of the query tiles of all items of the program."""
    if PERSISTENT:
        items = tl.cdiv(sizes.q_len, BLOCK_M) * sizes.batch * sizes.heads
        turn, done = 0, 0
        mbarrier.wait(item_full, 0)
        item = word(item_s, 0)
        while item < items:
            if not ANCHORED or item >= 0:
                done = consume_item(
                    item, turn, done, PART, o_desc, LSE, q_s, k_s, v_s, q_full, k_full, k_empty,
                    v_full, v_empty, scale, sizes, origins, together,
                    #: output
                    #: kept
                    #: again
                    #: also_read
                    given,
                )
            else:
                mbarrier.wait(q_full.index(PART), turn & 1)
                mbarrier.arrive(item_empty, count=1)
                mbarrier.arrive(q_empty.index(PART), count=1)
            turn += 1
            mbarrier.wait(item_full, turn & 1)
            item = word(item_s, 0)
        # Shared memory is the program's until the last rows have been read from there.
        tma_wait(0)
    else:
        consume_item(
            gl.program_id(0), 0, 0, PART, o_desc, LSE, q_s, k_s, v_s, q_full, k_full, k_empty,
            v_full, v_empty, scale, sizes, origins, together,
            #: output
            #: kept
            #: again
            #: also_read
            given,
        )


@gluon.jit
def attention_forward(
    q_desc, k_desc, v_desc, o_desc, LSE,
    #: also_given
    #: counter
    scale, batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, together,
    #: given
):
    """LSE (batch, heads, q_len) is contiguous fp32.

    An item is one query tile of one head. A program has one, or where PERSISTENT one after the
    other, until all are taken. COUNTER (1) is int32: items taken after each program's first; 0
    before a launch, and after.
    Descriptors are of (batch, heads, length, head dim): blocks of one head's rows.
    """
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    origins = Origins(q_origin, kv_origin)
    given = Given(
        #: given
    )
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    q_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, 1, ROWS, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, DV], v_desc.layout)
    if OWN_OUTPUT:
        o_s = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS, 1, 1, ROWS, DV], o_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for part in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(part), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    if PERSISTENT:
        q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], BARRIER)
        for part in gl.static_range(CONSUMERS):
            mbarrier.init(q_empty.index(part), count=1)
        WORDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        item_s = gl.allocate_shared_memory(gl.int32, [16], WORDS)
        item_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        item_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(item_full, count=1)
        mbarrier.init(item_empty, count=CONSUMERS)
    if HAS_DROPOUT:
        BITS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        kept_s = gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS, 128, 2], BITS)
        kept_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        for stage in gl.static_range(STAGES):
            mbarrier.init(kept_full.index(stage), count=1)
    if ANCHORED:
        lost_s = gl.allocate_shared_memory(gl.int32, [2 * CONSUMERS, 16], WORDS)
    #: more_memory
    #: partitions
