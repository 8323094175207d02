"""The first half of the forward kernel for Hopper: its tiles and its producer.

Follows ``forward_shared`` in one module.
"""
# ruff: noqa: F821

#: begin
@gluon.jit
def count_tiles(
    tile, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    #: parameters
    #: forward_lists
):
    """As ``forward_tiles``; where an item needs a tile and has none, one PARTIAL tile beyond all keys."""
    full_tiles, partial_tiles, first_live, first_full = forward_tiles(
        tile, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
        BLOCK_M, BLOCK_N,
        #: arguments
        #: forward_lists
    )
    nothing = False
    if NEEDS_TILE:
        nothing = full_tiles + partial_tiles == 0
        partial_tiles = gl.where(nothing, 1, partial_tiles)
    return full_tiles, partial_tiles, first_live, first_full, nothing


@gluon.jit
def partial_tile(
    step, partial_tiles, nothing, full_tiles, first_live, first_full, tile,
    b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    #: parameters
    #: forward_lists
):
    """Index of PARTIAL tile number ``step``: the last one first where later rows have later tiles.

    Those that only the last rows of a query tile attend to are then the first ones.
    """
    beyond = tl.cdiv(kv_len, BLOCK_N)
    found = beyond
    if FORWARD_HAS_PARTIAL:
        if FORWARD_DESCENDING or ROWS_ARE_LISTED:
            step = gl.maximum(partial_tiles - 1 - step, 0)
        found = forward_partial_tile(
            step, full_tiles, first_live, first_full, tile,
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: forward_lists
        )
    return gl.where(nothing, beyond, found)


@gluon.jit
def attends(
    step, partial_tiles, nothing, full_tiles, first_live, first_full, tile, row_tile,
    b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, ROWS: gl.constexpr,
    #: parameters
    #: forward_lists
):
    """Whether rows ``row_tile * ROWS ...`` may have a live pair in PARTIAL tile number ``step``."""
    there = row_tile * ROWS < q_len
    if ROWS_HAVE_TILES:
        kv_tile = partial_tile(
            step, partial_tiles, nothing, full_tiles, first_live, first_full, tile,
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: forward_lists
        )
        there = there & rows_visits(
            kv_tile, row_tile,
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            ROWS, BLOCK_N,
            #: arguments
        )
    return there


@gluon.jit
def tiles_of_rows(
    PART: gl.constexpr, CONSUMERS: gl.constexpr,
    partial_tiles, nothing, full_tiles, first_live, first_full, tile,
    b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    #: parameters
    #: forward_lists
):
    """Of the item's tiles, those that one consumer's rows attend to: a part without gaps.

    The first PARTIAL one, the one behind the last, and the number of FULL ones; a consumer without
    any takes one of them. Before FULL tiles none is left out: when weights wait for the product
    with their tile of v, the next one's may have no place to come to.
    """
    begin, end = 0, partial_tiles
    if SKIPS:
        ROWS: gl.constexpr = BLOCK_M // CONSUMERS
        row_tile = tile * CONSUMERS + PART
        full_tiles = gl.where(row_tile * ROWS < q_len, full_tiles, 0)
        most = gl.maximum(partial_tiles - gl.where(full_tiles > 0, 0, 1), 0)
        if ROWS_ARE_LISTED:
            first, behind = forward_tiles_of_part(
                PART, tile, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                BLOCK_M, BLOCK_N,
                #: arguments
                #: forward_lists
            )
            begin = gl.minimum(partial_tiles - behind, most)
            end = partial_tiles - first
        else:
            while (begin < most) & (
                attends(
                    begin, partial_tiles, nothing, full_tiles, first_live, first_full, tile, row_tile,
                    b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                    BLOCK_M, BLOCK_N, ROWS,
                    #: arguments
                    #: forward_lists
                ) == 0
            ):
                begin = begin + 1
        least = gl.where(full_tiles > 0, partial_tiles, begin + 1)
        if ROWS_ARE_LISTED:
            end = gl.maximum(end, least)
        else:
            while (end > least) & (
                attends(
                    end - 1, partial_tiles, nothing, full_tiles, first_live, first_full, tile, row_tile,
                    b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                    BLOCK_M, BLOCK_N, ROWS,
                    #: arguments
                    #: forward_lists
                ) == 0
            ):
                end = end - 1
    return begin, end, full_tiles


@gluon.jit
def leave_tiles(begin, end, k_full, k_empty, v_full, v_empty, STAGES: gl.constexpr):
    """Let tiles number ``begin`` to ``end - 1`` pass."""
    for count in range(begin, end):
        stage, phase = slot_of(count, STAGES)
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)


@gluon.jit
def load_pair(
    k_desc, v_desc, k_s, v_s, k_full, k_empty, v_full, v_empty, count, kv_tile, b, hkv,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    #: drawing
    #: load_parameters
):
    """Load one tile of k and one of v, as soon as the consumers have left their places.

    And those of the tangents of what moves. Meanwhile draw for the tile before, whose weights wait
    for these scores' product to begin.
    """
    stage, phase = slot_of(count, STAGES)
    place = [b, hkv, kv_tile * BLOCK_N, 0]
    mbarrier.wait(k_empty.index(stage), phase ^ 1)
    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes * (2 if MOVES_K else 1))
    tma_load(k_desc, place, k_full.index(stage), k_s.index(stage))
    if MOVES_K:
        tma_load(k_moved_desc, place, k_full.index(stage), k_moved_s.index(stage))
    #: load_pairs
    if HAS_DROPOUT:
        if count > done:
            draw_tile(
                drop, count - 1, first_row, tile_before * BLOCK_N, kept_s, kept_full,
                STAGES, CONSUMERS, BLOCK_N,
            )
    mbarrier.wait(v_empty.index(stage), phase ^ 1)
    mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes * (2 if MOVES_V else 1))
    tma_load(v_desc, place, v_full.index(stage), v_s.index(stage))
    if MOVES_V:
        tma_load(v_moved_desc, place, v_full.index(stage), v_moved_s.index(stage))


@gluon.jit
def announce_item(
    turn, item, tile, b, h, hkv, full_tiles, partial_tiles, first_live, first_full, nothing, fast,
    item_s, item_full, item_empty,
):
    """Tell the consumers what the item is, as soon as they know what the one before was."""
    mbarrier.wait(item_empty, (turn & 1) ^ 1)
    item_s.store(
        words(
            (item, tile, b, h, hkv, full_tiles, partial_tiles, first_live, first_full, nothing, fast)
        )
    )
    mbarrier.arrive(item_full, count=1)


@gluon.jit
def load_query(
    turn, tile, b, h, q_desc, q_s, q_full,
    BLOCK_M: gl.constexpr, CONSUMERS: gl.constexpr,
    #: again
    #: moved_query
):
    """Load the query tile; where PERSISTENT, as soon as the consumers have left its place."""
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    for part in gl.static_range(CONSUMERS):
        if PERSISTENT:
            mbarrier.wait(q_empty.index(part), (turn & 1) ^ 1)
        place = [b, h, tile * BLOCK_M + part * ROWS, 0]
        mbarrier.expect(q_full.index(part), q_desc.block_type.nbytes * (2 if MOVES_Q else 1))
        tma_load(q_desc, place, q_full.index(part), q_s.index(part))
        if MOVES_Q:
            tma_load(q_moved_desc, place, q_full.index(part), q_moved_s.index(part))


@gluon.jit
def take_item(
    item, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset, together,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    #: again
    #: parameters
    #: forward_lists
):
    """Where a consumer's item lies, its tiles, and whether to be ``fast``: as the producer says.

    Else, where a program has this item alone, as the producer will find as well.
    """
    fast = False
    if PERSISTENT:
        tile, b, h, hkv = word(item_s, 1), word(item_s, 2), word(item_s, 3), word(item_s, 4)
        full_tiles, partial_tiles = word(item_s, 5), word(item_s, 6)
        first_live, first_full = word(item_s, 7), word(item_s, 8)
        nothing = word(item_s, 9) != 0
        if ANCHORED:
            fast = word(item_s, 10) != 0
        mbarrier.arrive(item_empty, count=1)
    else:
        tile, b, h, hkv = place_of_q_item(item, batch, heads, kv_heads, q_len, together, BLOCK_M)
        full_tiles, partial_tiles, first_live, first_full, nothing = count_tiles(
            tile, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: forward_lists
        )
    return tile, b, h, hkv, full_tiles, partial_tiles, first_live, first_full, nothing, fast


@gluon.jit
def load_item(
    item, fast, turn, done, q_desc, k_desc, v_desc, q_s, k_s, v_s, q_full, k_full, k_empty, v_full, v_empty,
    batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, together,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
    Q_KIND: gl.constexpr, KV_KIND: gl.constexpr,
    #: kept
    #: again
    #: also_loaded
    #: parameters
    #: forward_lists
):
    """Load the query tile, then every key-value tile: PARTIAL ones, then FULL ones.

    Returns the program's number of key-value tiles so far, ``done`` of which were before this item.
    """
    tile, b, h, hkv = place_of_q_item(item, batch, heads, kv_heads, q_len, together, BLOCK_M)
    if not PERSISTENT:
        load_query(
            turn, tile, b, h, q_desc, q_s, q_full, BLOCK_M, CONSUMERS,
            #: again
            #: moved_query
        )
    q_offset = shift_of_positions(q_origin, Q_KIND)
    kv_offset = shift_of_positions(kv_origin, KV_KIND)
    full_tiles, partial_tiles, first_live, first_full, nothing = count_tiles(
        tile, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
        BLOCK_M, BLOCK_N,
        #: arguments
        #: forward_lists
    )
    if PERSISTENT:
        # The consumers may be busy with the item before, and q with them.
        announce_item(
            turn, item, tile, b, h, hkv, full_tiles, partial_tiles, first_live, first_full, nothing,
            fast, item_s, item_full, item_empty,
        )
        load_query(
            turn, tile, b, h, q_desc, q_s, q_full, BLOCK_M, CONSUMERS,
            #: again
            #: moved_query
        )
    if HAS_DROPOUT:
        drop = drop_of_item(
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
            #: arguments
        )
        first_row, tile_before = tile * BLOCK_M, 0
    for step in range(0, partial_tiles):
        kv_tile = partial_tile(
            step, partial_tiles, nothing, full_tiles, first_live, first_full, tile,
            b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
            BLOCK_M, BLOCK_N,
            #: arguments
            #: forward_lists
        )
        load_pair(
            k_desc, v_desc, k_s, v_s, k_full, k_empty, v_full, v_empty, done + step, kv_tile, b, hkv,
            BLOCK_N, STAGES, CONSUMERS,
            #: drawing
            #: load_partial_pairs
        )
        if HAS_DROPOUT:
            tile_before = kv_tile
    if FORWARD_HAS_FULL:
        for step in range(0, full_tiles):
            kv_tile = forward_full_tile(
                step, full_tiles, first_live, first_full, tile,
                b, h, hkv, batch, heads, kv_heads, q_len, kv_len, q_offset, kv_offset,
                BLOCK_M, BLOCK_N,
                #: arguments
                #: forward_lists
            )
            load_pair(
                k_desc, v_desc, k_s, v_s, k_full, k_empty, v_full, v_empty,
                done + partial_tiles + step, kv_tile, b, hkv,
                BLOCK_N, STAGES, CONSUMERS,
                #: drawing
                #: load_full_pairs
            )
            if HAS_DROPOUT:
                tile_before = kv_tile
    if HAS_DROPOUT:
        draw_tile(
            drop, done + partial_tiles + full_tiles - 1, first_row, tile_before * BLOCK_N,
            kept_s, kept_full, STAGES, CONSUMERS, BLOCK_N,
        )
    return done + partial_tiles + full_tiles
