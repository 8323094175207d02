"""The first half of the forward kernel for Hopper: its tiles and its producer.

Follows ``forward_shared`` in one module.
"""
# ruff: noqa: F821

#: begin
@gluon.jit
def count_tiles(tile, head, sizes, shift, given):
    """As ``forward_visits``; where an item needs a tile and has none, one PARTIAL tile beyond all keys."""
    visits = forward_visits(tile, head, sizes, shift, given)
    nothing = False
    if NEEDS_TILE:
        nothing = visits.full + visits.partial == 0
        partial = gl.where(nothing, 1, visits.partial)
        visits = Visits(visits.full, partial, visits.first_live, visits.first_full)
    return visits, nothing


@gluon.jit
def partial_tile(step, nothing, visits, tile, head, sizes, shift, given):
    """Index of PARTIAL tile number ``step``: the last one first where later rows have later tiles.

    Those that only the last rows of a query tile attend to are then the first ones.
    """
    beyond = tl.cdiv(sizes.kv_len, BLOCK_N)
    found = beyond
    if FORWARD_HAS_PARTIAL:
        if FORWARD_DESCENDING or ROWS_ARE_LISTED:
            step = gl.maximum(visits.partial - 1 - step, 0)
        found = forward_tile(step, visits, tile, head, sizes, shift, given, True)
    return gl.where(nothing, beyond, found)


@gluon.jit
def attends(step, nothing, visits, tile, row_tile, head, sizes, shift, given):
    """Whether rows ``row_tile * ROWS ...`` may have a live pair in PARTIAL tile number ``step``."""
    there = row_tile * (BLOCK_M // CONSUMERS) < sizes.q_len
    if ROWS_HAVE_TILES:
        kv_tile = partial_tile(step, nothing, visits, tile, head, sizes, shift, given)
        there = there & rows_have(kv_tile, row_tile, head, sizes, shift, given)
    return there


@gluon.jit
def tiles_of_rows(PART: gl.constexpr, nothing, visits, tile, head, sizes, shift, given):
    """Of the item's tiles, those that one consumer's rows attend to: a part without gaps.

    The first PARTIAL one, the one behind the last, and the number of FULL ones; a consumer without
    any takes one of them. Before FULL tiles none is left out: when weights wait for the product
    with their tile of v, the next one's may have no place to come to.
    """
    begin, end, full = 0, visits.partial, visits.full
    if SKIPS:
        ROWS: gl.constexpr = BLOCK_M // CONSUMERS
        row_tile = tile * CONSUMERS + PART
        full = gl.where(row_tile * ROWS < sizes.q_len, full, 0)
        most = gl.maximum(visits.partial - gl.where(full > 0, 0, 1), 0)
        if ROWS_ARE_LISTED:
            first, behind = forward_tiles_of_part(PART, tile, head, sizes, shift, given)
            begin = gl.minimum(visits.partial - behind, most)
            end = visits.partial - first
        else:
            while (begin < most) & (
                attends(begin, nothing, visits, tile, row_tile, head, sizes, shift, given) == 0
            ):
                begin = begin + 1
        least = gl.where(full > 0, visits.partial, begin + 1)
        if not NEEDS_TILE:
            # An item may have no tile at all, and then no consumer waits for one.
            least = gl.minimum(least, visits.partial)
        if ROWS_ARE_LISTED:
            end = gl.maximum(end, least)
        else:
            while (end > least) & (
                attends(end - 1, nothing, visits, tile, row_tile, head, sizes, shift, given) == 0
            ):
                end = end - 1
    return begin, end, full


@gluon.jit
def leave_tiles(begin, end, k_full, k_empty, v_full, v_empty):
    """Let tiles number ``begin`` to ``end - 1`` pass."""
    for count in range(begin, end):
        stage, phase = slot_of(count, STAGES)
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)


@gluon.jit
def load_pair(
    k_desc, v_desc, k_s, v_s, k_full, k_empty, v_full, v_empty, count, kv_tile, head,
    #: drawing
    #: load_parameters
):
    """Load one tile of k and one of v, as soon as the consumers have left their places.

    And those of the tangents of what moves. Meanwhile draw for the tile before, whose weights wait
    for these scores' product to begin.
    """
    stage, phase = slot_of(count, STAGES)
    place = [head.b, head.hkv, kv_tile * BLOCK_N, 0]
    mbarrier.wait(k_empty.index(stage), phase ^ 1)
    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes * (2 if MOVES_K else 1))
    tma_load(k_desc, place, k_full.index(stage), k_s.index(stage))
    if MOVES_K:
        tma_load(k_moved_desc, place, k_full.index(stage), k_moved_s.index(stage))
    #: load_pairs
    if HAS_DROPOUT:
        if count > done:
            draw_tile(drop, count - 1, first_row, tile_before * BLOCK_N, kept_s, kept_full, CONSUMERS, BLOCK_N)
    mbarrier.wait(v_empty.index(stage), phase ^ 1)
    mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes * (2 if MOVES_V else 1))
    tma_load(v_desc, place, v_full.index(stage), v_s.index(stage))
    if MOVES_V:
        tma_load(v_moved_desc, place, v_full.index(stage), v_moved_s.index(stage))


@gluon.jit
def announce_item(turn, item, tile, head, visits, nothing, fast, item_s, item_full, item_empty):
    """Tell the consumers what the item is, as soon as they know what the one before was."""
    mbarrier.wait(item_empty, (turn & 1) ^ 1)
    item_s.store(
        words(
            (item, tile, head.b, head.h, head.hkv, visits.full, visits.partial, visits.first_live,
             visits.first_full, nothing, fast)
        )
    )
    mbarrier.arrive(item_full, count=1)


@gluon.jit
def load_query(
    turn, tile, head, q_desc, q_s, q_full,
    #: again
    #: moved_query
):
    """Load the query tile; where PERSISTENT, as soon as the consumers have left its place."""
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    for part in gl.static_range(CONSUMERS):
        if PERSISTENT:
            mbarrier.wait(q_empty.index(part), (turn & 1) ^ 1)
        place = [head.b, head.h, tile * BLOCK_M + part * ROWS, 0]
        mbarrier.expect(q_full.index(part), q_desc.block_type.nbytes * (2 if MOVES_Q else 1))
        tma_load(q_desc, place, q_full.index(part), q_s.index(part))
        if MOVES_Q:
            tma_load(q_moved_desc, place, q_full.index(part), q_moved_s.index(part))


@gluon.jit
def take_item(
    item, sizes, shift, together,
    #: again
    given,
):
    """Where a consumer's item lies, its tiles, and whether to be ``fast``: as the producer says.

    Else, where a program has this item alone, as the producer will find as well.
    """
    fast = False
    if PERSISTENT:
        tile, head = word(item_s, 1), Head(word(item_s, 2), word(item_s, 3), word(item_s, 4))
        visits = Visits(word(item_s, 5), word(item_s, 6), word(item_s, 7), word(item_s, 8))
        nothing = word(item_s, 9) != 0
        if ANCHORED:
            fast = word(item_s, 10) != 0
        mbarrier.arrive(item_empty, count=1)
    else:
        tile, head = place_of_q_item(item, sizes, together)
        visits, nothing = count_tiles(tile, head, sizes, shift, given)
    return tile, head, visits, nothing, fast


@gluon.jit
def load_item(
    item, fast, turn, done, q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, k_full, k_empty, v_full,
    v_empty, sizes, origins, together,
    #: kept
    #: again
    #: also_loaded
    given,
):
    """Load the query tile, then every key-value tile: PARTIAL ones, then FULL ones.

    Returns the program's number of key-value tiles so far, ``done`` of which were before this item.
    """
    tile, head = place_of_q_item(item, sizes, together)
    if not PERSISTENT:
        load_query(
            turn, tile, head, q_desc, q_s, q_full,
            #: again
            #: moved_query
        )
    shift = shift_of(origins, Q_KIND, KV_KIND)
    visits, nothing = count_tiles(tile, head, sizes, shift, given)
    if PERSISTENT:
        # The consumers may be busy with the item before, and q with them.
        announce_item(turn, item, tile, head, visits, nothing, fast, item_s, item_full, item_empty)
        load_query(
            turn, tile, head, q_desc, q_s, q_full,
            #: again
            #: moved_query
        )
    if HAS_DROPOUT:
        drop = drop_of_item(head, sizes, given)
        first_row, tile_before = tile * BLOCK_M, 0
    for step in range(0, visits.partial):
        kv_tile = partial_tile(step, nothing, visits, tile, head, sizes, shift, given)
        load_pair(
            k_desc, v_desc, k_s, v_s, k_full, k_empty, v_full, v_empty, done + step, kv_tile, head,
            #: drawing
            #: load_partial_pairs
        )
        if HAS_DROPOUT:
            tile_before = kv_tile
    if FORWARD_HAS_FULL:
        for step in range(0, visits.full):
            kv_tile = forward_tile(step, visits, tile, head, sizes, shift, given, False)
            load_pair(
                k_desc, v_desc, k_s, v_s, k_full, k_empty, v_full, v_empty, 
                done + visits.partial + step, kv_tile, head,
                #: drawing
                #: load_full_pairs
            )
            if HAS_DROPOUT:
                tile_before = kv_tile
    if HAS_DROPOUT:
        draw_tile(
            drop, done + visits.partial + visits.full - 1, first_row, tile_before * BLOCK_N, kept_s,
            kept_full, CONSUMERS, BLOCK_N,
        )
    return done + visits.partial + visits.full
