"""The warpgroups of Hopper's forward: the work tiles that a program takes, its memory.

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
    """The work tile after ``work_tile``, or that itself where ``takes`` is 0."""
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
            announce_nothing(work_index, own, memory.items)
            for part in gl.static_range(CONSUMERS):
                producer_acquire(memory.q, slot_of_rows(part, work_index))
                producer_commit(memory.q, slot_of_rows(part, work_index))
        work_tile = next_work(work_tile, takes, drawn, work_tiles, call)
        work_index += 1
        older = last
        last = gl.where(fixed != 0, own, -1)
        acquire_item(memory.items, work_index)
        lost = 0
        for part in gl.static_range(CONSUMERS):
            place = memory.overflowed.index((work_index & 1) * CONSUMERS + part)
            lost = lost | read_field(place, 0)
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
        announce_nothing(work_index, work_tiles, memory.items)
    else:
        load_work(work_tile, 0, 0, 0, memory, call)


@gluon.jit
def consume(PART: gl.constexpr, results, memory, call):
    """Attention of rows number ``PART`` of the query tiles of all work tiles of the program."""
    if PERSISTENT:
        sizes = call.sizes
        work_tiles = tl.cdiv(sizes.q_len, BLOCK_M) * sizes.batch * sizes.heads
        work_index, tiles_before = 0, 0
        items = memory.items
        await_item(items, work_index)
        work_tile = query_item(items).work_tile
        while work_tile < work_tiles:
            if not FIXED_MAX or work_tile >= 0:
                tiles_before = consume_work(
                    work_tile, work_index, tiles_before, PART, results, memory, call
                )
            else:
                slot = slot_of_rows(PART, work_index)
                consumer_wait(memory.q, slot)
                release_item(items)
                if QUERIES == 1:
                    consumer_release(memory.q, slot)
                else:
                    leave_query(work_index - 1, PART, memory.q)
            work_index += 1
            await_item(items, work_index)
            work_tile = query_item(items).work_tile
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
    consumer_release(q, slot_of_rows(PART, work_index), work_index >= 0)


@gluon.jit
def run_forward(q_desc, k_desc, v_desc, tangents, bias_descs, results, call):
    """Set the program's warpgroups to work on its shared memory.

    ``tangents`` are three descriptors as those of the operands, ``bias_descs`` those of what pairs
    look up; None where there are none.
    """
    PARTS: gl.constexpr = QUERIES * CONSUMERS
    q_s = allocate_tiles(q_desc, PARTS * KEY_BLOCKS)
    k_s, v_s = allocate_tiles(k_desc, STAGES * KEY_BLOCKS), allocate_tiles(v_desc, STAGES)
    out = allocate_tiles(results.out, CONSUMERS) if OWN_OUTPUT else None
    q_full, q_empty = new_barriers(PARTS, 1), None
    k_full, k_empty, v_full, v_empty = (
        allocate_barriers(STAGES), allocate_barriers(STAGES), allocate_barriers(STAGES), allocate_barriers(STAGES)
    )
    for stage in gl.static_range(STAGES):
        init_barrier(k_full, stage, 1)
        init_barrier(k_empty, stage, CONSUMERS)
        init_barrier(v_full, stage, 1)
        init_barrier(v_empty, stage, CONSUMERS)
    items, kept, overflowed, bias = None, None, None, None
    if PERSISTENT:
        q_empty = new_barriers(PARTS, 1)
        item, item_full, item_empty = item_memory(CONSUMERS)
        items = Channel(None, item, item_full, item_empty, None)
    if HAS_DROPOUT:
        BITS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        bits = gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS, 128, 2], BITS)
        kept = Channel(None, bits, new_barriers(STAGES, 1), None, None)
    if FIXED_MAX:
        NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        overflowed = gl.allocate_shared_memory(gl.int32, [2 * CONSUMERS, 16], NUMBERS)
    if HAS_BIAS:
        data, full, empty = bias_memory(bias_descs)
        bias = Channel(bias_descs, data, full, empty, None)
    q_tangent, k_tangent, v_tangent = None, None, None
    if HAS_TANGENT_Q:
        q_tangent = Tiles(tangents[0], allocate_tiles(tangents[0], CONSUMERS))
    if HAS_TANGENT_K:
        k_tangent = Tiles(tangents[1], allocate_tiles(tangents[1], STAGES))
    if HAS_TANGENT_V:
        v_tangent = Tiles(tangents[2], allocate_tiles(tangents[2], STAGES))
    memory = ForwardMemory(
        Channel(q_desc, q_s, q_full, q_empty, q_tangent),
        Channel(k_desc, k_s, k_full, k_empty, k_tangent),
        Channel(v_desc, v_s, v_full, v_empty, v_tangent),
        out, items, kept, bias, overflowed,
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
