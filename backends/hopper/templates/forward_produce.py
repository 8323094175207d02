"""The first half of the forward kernel for Hopper: its tiles and its producer.

Follows ``forward_shared`` in one module.
"""
# ruff: noqa: F821

#: begin
@gluon.jit
def count_tiles(tile, shift, scope):
    """``forward_visits``; where a work tile needs one and has none, one PARTIAL beyond all keys."""
    visits = forward_visits(tile, shift, scope)
    nothing = False
    if NEEDS_TILE:
        nothing = visits.full + visits.partial == 0
        partial = gl.where(nothing, 1, visits.partial)
        visits = Visits(visits.full, partial, visits.first_live, visits.first_full)
    return visits, nothing


@gluon.jit
def tile_at(step, work, PARTIAL: gl.constexpr):
    """Index of tile number ``step`` of the PARTIAL ones, or of the FULL ones.

    Where later rows have later tiles, the last PARTIAL one is the first to be visited. Those that
    only the last rows of a query tile attend to are then visited first.
    """
    beyond = tl.cdiv(work.scope.sizes.kv_len, BLOCK_N)
    found = beyond
    if FORWARD_HAS_PARTIAL or not PARTIAL:
        if PARTIAL and (FORWARD_DESCENDING or ROWS_ARE_LISTED):
            step = gl.maximum(work.visits.partial - 1 - step, 0)
        found = forward_tile(step, work.visits, work.tile, work.shift, work.scope, PARTIAL)
    if PARTIAL:
        found = gl.where(work.nothing, beyond, found)
    return found


@gluon.jit
def attends(step, row_tile, work):
    """Tell whether rows ``row_tile * ROWS ...`` may have a live pair in PARTIAL tile ``step``."""
    there = row_tile * ROWS < work.scope.sizes.q_len
    if ROWS_HAVE_TILES:
        kv_tile = tile_at(step, work, True)
        there = there & rows_have(kv_tile, row_tile, work.shift, work.scope)
    return there


@gluon.jit
def tiles_of_rows(PART: gl.constexpr, work):
    """The tiles that one consumer's rows attend to: a part of the work tile's without gaps.

    The first PARTIAL one, the one behind the last, and the number of FULL ones; a consumer without
    any takes one of them. Before FULL tiles none is left out: when weights wait for the product
    with their tile of v, the next one's may have no place to come to.
    """
    visits = work.visits
    begin, end, full = 0, visits.partial, visits.full
    if SKIPS:
        row_tile = work.tile * CONSUMERS + PART
        full = gl.where(row_tile * ROWS < work.scope.sizes.q_len, full, 0)
        most = gl.maximum(visits.partial - gl.where(full > 0, 0, 1), 0)
        if ROWS_ARE_LISTED:
            first, behind = forward_tiles_of_part(PART, work.tile, work.shift, work.scope)
            begin = gl.minimum(visits.partial - behind, most)
            end = visits.partial - first
        else:
            while (begin < most) & (attends(begin, row_tile, work) == 0):
                begin = begin + 1
        least = gl.where(full > 0, visits.partial, begin + 1)
        if not NEEDS_TILE:
            # A work tile may have no tile at all, and then no consumer waits for one.
            least = gl.minimum(least, visits.partial)
        if ROWS_ARE_LISTED:
            end = gl.maximum(end, least)
        else:
            while (end > least) & (attends(end - 1, row_tile, work) == 0):
                end = end - 1
    return begin, end, full


@gluon.jit
def skip_tiles(begin, end, k, v):
    """Let tiles number ``begin`` to ``end - 1`` pass."""
    for tile_index in range(begin, end):
        slot = slot_of(tile_index, STAGES)
        consumer_wait(k, slot)
        consumer_release(k, slot)
        consumer_wait(v, slot)
        consumer_release(v, slot)


@gluon.jit
def load_tiles(tile_index, kv_tile, memory, work, draw, wanted):
    """Load one tile of k and one of v, as soon as the consumers have left their places.

    And those of their tangents, and of what pairs look up, if that is ``wanted``. Meanwhile draw
    for the tile before, whose weights wait for these scores' product to begin.
    """
    k, v = memory.k, memory.v
    slot = slot_of(tile_index, STAGES)
    place = [work.scope.head.b, work.scope.head.hkv, kv_tile * BLOCK_N, 0]
    producer_acquire(k, slot)
    producer_load_blocks(k, slot, place, KEY_BLOCKS)
    if HAS_BIAS:
        present, first_query = wanted
        load_bias(
            tile_index, present, work.scope.head, first_query, kv_tile * BLOCK_N + work.shift.kv,
            memory.bias,
        )
    if HAS_DROPOUT:
        if tile_index > draw.tiles_before:
            draw_tile(
                draw.drop, tile_index - 1, draw.first_row, draw.tile_before * BLOCK_N, memory.kept,
                CONSUMERS, BLOCK_N,
            )
    producer_acquire(v, slot)
    producer_load(v, slot, place)


@gluon.jit
def announce_nothing(work_index, work_tile, items):
    """Tell the consumers of a work tile that is none: negative, or beyond the last."""
    acquire_item(items, work_index)
    announce_item(QueryItem(work_tile, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), items)


@gluon.jit
def slot_of_rows(PART: gl.constexpr, work_index):
    """Slot of a consumer's rows of q."""
    stage, phase = slot_of(work_index, QUERIES)
    return Slot(stage * CONSUMERS + PART, phase)


@gluon.jit
def load_query(work_index, tile, head, q):
    """Load the query tile, as soon as the consumers have left its place."""
    for part in gl.static_range(CONSUMERS):
        slot = slot_of_rows(part, work_index)
        producer_acquire(q, slot)
        place = [head.b, head.h, tile * BLOCK_M + part * ROWS, 0]
        producer_load_blocks(q, slot, place, KEY_BLOCKS)


@gluon.jit
def take_work(work_tile, shift, items, call):
    """A consumer's work tile, as the producer says.

    Else, where a program has this one alone, as the producer will find as well.
    """
    uses_fixed_max = False
    if PERSISTENT:
        item = query_item(items)
        tile, head = item.tile, Head(item.b, item.h, item.hkv)
        visits = Visits(item.full, item.partial, item.first_live, item.first_full)
        nothing = item.nothing
        if FIXED_MAX:
            uses_fixed_max = item.uses_fixed_max
        release_item(items)
    else:
        tile, head = place_of_work(work_tile, call)
    scope = Scope(head, call.sizes, call.given)
    if not PERSISTENT:
        visits, nothing = count_tiles(tile, shift, scope)
    return Work(tile, scope, visits, nothing, uses_fixed_max, call.origins, shift)


@gluon.jit
def load_work(work_tile, uses_fixed_max, work_index, tiles_before, memory, call):
    """Load the query tile, then every key-value tile: PARTIAL ones, then FULL ones.

    Returns the program's number of key-value tiles so far, ``tiles_before`` of which were before
    this work tile.
    """
    tile, head = place_of_work(work_tile, call)
    scope = Scope(head, call.sizes, call.given)
    if not PERSISTENT:
        load_query(work_index, tile, head, memory.q)
    shift = shift_of(call.origins, Q_KIND, KV_KIND)
    visits, nothing = count_tiles(tile, shift, scope)
    work = Work(tile, scope, visits, nothing, uses_fixed_max, call.origins, shift)
    if PERSISTENT:
        # The consumers may be busy with the work tile before, and q with them.
        acquire_item(memory.items, work_index)
        item = QueryItem(
            work_tile, tile, head.b, head.h, head.hkv, visits.full, visits.partial,
            visits.first_live, visits.first_full, nothing, uses_fixed_max,
        )
        announce_item(item, memory.items)
        load_query(work_index, tile, head, memory.q)
    if HAS_DROPOUT:
        drop = drop_of_item(scope)
        first_row, tile_before = tile * BLOCK_M, 0
    for FULL in gl.static_range(2 if FORWARD_HAS_FULL else 1):
        for step in range(0, visits.full if FULL else visits.partial):
            kv_tile = tile_at(step, work, not FULL)
            before = tiles_before + visits.partial if FULL else tiles_before
            # The first tile may take the mask's code though it is FULL.
            load_tiles(
                before + step, kv_tile, memory, work,
                Draw(drop, first_row, tile_before, tiles_before) if HAS_DROPOUT else None,
                (
                    visits.partial + step == 0 if BIAS_IN_MASK and FULL else True,
                    tile * BLOCK_M + shift.q,
                ) if HAS_BIAS else None,
            )
            if HAS_DROPOUT:
                tile_before = kv_tile
    if HAS_DROPOUT:
        draw_tile(
            drop, tiles_before + visits.partial + visits.full - 1, first_row, tile_before * BLOCK_N,
            memory.kept, CONSUMERS, BLOCK_N,
        )
    return tiles_before + visits.partial + visits.full
