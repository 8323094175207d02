"""What the warpgroups of a forward do for Hopper: which work tiles a program takes, its memory.

A program that has several takes them while the grid lasts: the producer loads the next work tile's
tiles while the consumers finish the one before, and tells them what the work tile is. Where a mask
makes work tiles differ in length, whoever is free draws the next number, as hardware hands out
programs.

FIXED_MAX: work tiles follow a row's maximum through PARTIAL tiles and one FULL one; weights of the
others are relative to that, or to 0 if it is less. Where they turn out to be too large or too small,
a work tile has another turn, in which it follows the maximum to the end.
"""
# ruff: noqa: F821

#: begin
@gluon.jit
def draw_next(takes, call):
    """A number for the next work tile if ``takes`` is 1. It comes while tiles are loaded."""
    drawn = 0
    if DRAWN:
        drawn = gl.atomic_add(call.counter, takes, sem="relaxed")
    return drawn


@gluon.jit
def next_work(work_tile, takes, drawn, work_tiles, call):
    """What the program is to do after ``work_tile``, or that itself where ``takes`` is 0."""
    if DRAWN:
        found = gl.where(takes != 0, gl.num_programs(0) + drawn, work_tile)
        if (takes != 0) & (drawn == work_tiles - 1):
            # Each program draws until nothing is left: together, ``work_tiles`` times.
            gl.store(call.counter, 0)
    else:
        found = work_tile + takes * gl.num_programs(0)
    return found


@gluon.jit
def load_in_turns(work_tile, work_tiles, memory, call):
    """Load the tiles of all work tiles, and again of those that were lost; returns how many turns.

    The consumers tell whether a work tile was lost when they begin the next one. After the last one
    that may be lost, the next one is empty.
    """
    own, takes, fixed, older, last = work_tile, 1, 1, -1, -1
    work_index, tiles_before = 0, 0
    while own < work_tiles:
        drawn = draw_next(takes, call)
        if own >= 0:
            tiles_before = load_work(own, fixed, work_index, tiles_before, memory, call)
        else:
            announce_nothing(work_index, own, memory.fields)
            slot, phase = slot_of(work_index, QUERIES)
            for part in gl.static_range(CONSUMERS):
                mbarrier.wait(memory.q.empty.index(slot * CONSUMERS + part), phase ^ 1)
                mbarrier.arrive(memory.q.full.index(slot * CONSUMERS + part), count=1)
        work_tile = next_work(work_tile, takes, drawn, work_tiles, call)
        work_index += 1
        older = last
        last = gl.where(fixed != 0, own, -1)
        mbarrier.wait(memory.fields.empty, (work_index & 1) ^ 1)
        lost = read_field(memory.overflowed.index((work_index & 1) * CONSUMERS), 0)
        for part in gl.static_range(1, CONSUMERS):
            lost = lost | read_field(
                memory.overflowed.index((work_index & 1) * CONSUMERS + part), 0
            )
        lost = gl.where(older >= 0, lost, 0)
        pause = (work_tile >= work_tiles) & (last >= 0)
        own = gl.where(lost != 0, older, gl.where(pause, -1, work_tile))
        takes = gl.where(pause, 0, 1 - lost)
        fixed = 1 - lost
    return work_index


@gluon.jit
def produce(memory, call):
    """Load the tiles of all work tiles of the program."""
    work_tile = gl.program_id(0)
    if PERSISTENT:
        sizes = call.sizes
        work_tiles = tl.cdiv(sizes.q_len, BLOCK_M) * sizes.batch * sizes.heads
        if FIXED_MAX:
            work_index = load_in_turns(work_tile, work_tiles, memory, call)
        else:
            work_index, tiles_before = 0, 0
            while work_tile < work_tiles:
                drawn = draw_next(1, call)
                tiles_before = load_work(work_tile, 0, work_index, tiles_before, memory, call)
                work_tile = next_work(work_tile, 1, drawn, work_tiles, call)
                work_index += 1
        announce_nothing(work_index, work_tiles, memory.fields)
    else:
        load_work(work_tile, 0, 0, 0, memory, call)


@gluon.jit
def consume(PART: gl.constexpr, results, memory, call):
    """Attention of rows number ``PART`` of the query tiles of all work tiles of the program."""
    if PERSISTENT:
        sizes = call.sizes
        work_tiles = tl.cdiv(sizes.q_len, BLOCK_M) * sizes.batch * sizes.heads
        work_index, tiles_before = 0, 0
        fields = memory.fields
        mbarrier.wait(fields.full, 0)
        work_tile = read_field(fields.data, 0)
        while work_tile < work_tiles:
            if not FIXED_MAX or work_tile >= 0:
                tiles_before = consume_work(
                    work_tile, work_index, tiles_before, PART, results, memory, call
                )
            else:
                slot, phase = slot_of(work_index, QUERIES)
                mbarrier.wait(memory.q.full.index(slot * CONSUMERS + PART), phase)
                mbarrier.arrive(fields.empty, count=1)
                if QUERIES == 1:
                    mbarrier.arrive(memory.q.empty.index(PART), count=1)
                else:
                    leave_query(work_index - 1, PART, memory.q)
            work_index += 1
            mbarrier.wait(fields.full, work_index & 1)
            work_tile = read_field(fields.data, 0)
        # Shared memory is the program's until the last rows have been read from there.
        tma_wait(0)
    else:
        consume_work(gl.program_id(0), 0, 0, PART, results, memory, call)


@gluon.jit
def leave_query(work_index, PART: gl.constexpr, q):
    """Let rows of q come to where those of work tile number ``work_index`` were, and their output.

    -1 is no work tile: nothing was there.
    """
    tma_wait(0)
    slot, _ = slot_of(work_index, QUERIES)
    mbarrier.arrive(q.empty.index(slot * CONSUMERS + PART), count=1, pred=work_index >= 0)


@gluon.jit
def run_forward(q_desc, k_desc, v_desc, tangents, bias_descs, results, call):
    """Set the program's warpgroups to work on its shared memory.

    ``tangents`` are three descriptors as those of the operands, ``bias_descs`` those of what pairs
    look up; None where there are none.
    """
    o_desc = results.out
    PARTS: gl.constexpr = QUERIES * CONSUMERS
    q_s = gl.allocate_shared_memory(q_desc.dtype, [PARTS, 1, 1, ROWS, D], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, BLOCK_N, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, BLOCK_N, DV], v_desc.layout)
    out, fields, kept, overflowed, bias, q_empty = None, None, None, None, None, None
    if OWN_OUTPUT:
        out = gl.allocate_shared_memory(o_desc.dtype, [CONSUMERS, 1, 1, ROWS, DV], o_desc.layout)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [PARTS, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for part in gl.static_range(PARTS):
        mbarrier.init(q_full.index(part), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    if PERSISTENT:
        q_empty = gl.allocate_shared_memory(gl.int64, [PARTS, 1], BARRIER)
        for part in gl.static_range(PARTS):
            mbarrier.init(q_empty.index(part), count=1)
        FIELDS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        numbers = gl.allocate_shared_memory(gl.int32, [16], FIELDS)
        fields_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        fields_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
        mbarrier.init(fields_full, count=1)
        mbarrier.init(fields_empty, count=CONSUMERS)
        fields = Ring(None, numbers, fields_full, fields_empty, None)
    if HAS_DROPOUT:
        BITS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        bits = gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS, 128, 2], BITS)
        kept_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
        for stage in gl.static_range(STAGES):
            mbarrier.init(kept_full.index(stage), count=1)
        kept = Ring(None, bits, kept_full, None, None)
    if FIXED_MAX:
        overflowed = gl.allocate_shared_memory(gl.int32, [2 * CONSUMERS, 16], FIELDS)
    if HAS_BIAS:
        data, full, empty = bias_memory(bias_descs)
        bias = Ring(bias_descs, data, full, empty, None)
    q_tangent, k_tangent, v_tangent = None, None, None
    if HAS_TANGENT_Q:
        tiles = gl.allocate_shared_memory(
            tangents[0].dtype, [CONSUMERS, 1, 1, ROWS, D], tangents[0].layout
        )
        q_tangent = Tangent(tangents[0], tiles)
    if HAS_TANGENT_K:
        tiles = gl.allocate_shared_memory(
            tangents[1].dtype, [STAGES, 1, 1, BLOCK_N, D], tangents[1].layout
        )
        k_tangent = Tangent(tangents[1], tiles)
    if HAS_TANGENT_V:
        tiles = gl.allocate_shared_memory(
            tangents[2].dtype, [STAGES, 1, 1, BLOCK_N, DV], tangents[2].layout
        )
        v_tangent = Tangent(tangents[2], tiles)
    memory = ForwardMemory(
        Ring(q_desc, q_s, q_full, q_empty, q_tangent),
        Ring(k_desc, k_s, k_full, k_empty, k_tangent),
        Ring(v_desc, v_s, v_full, v_empty, v_tangent),
        out, fields, kept, bias, overflowed,
    )
    gl.warp_specialize(
        [
            (produce, (memory, call)),
            (consume, (0, results, memory, call)),
            (consume, (1, results, memory, call)),
            (consume, (2, results, memory, call)),
        ][: CONSUMERS + 1],
        [4, 4, 4][:CONSUMERS],
        [REGISTERS, REGISTERS, REGISTERS][:CONSUMERS],
    )
