"""Parts of the keys of some rows: which tiles each program takes, and how their sums are merged.

A program has one part of the live tiles of some rows. Query heads that share keys are rows of one
tile: row r is head ``r % GROUP`` of query ``r // GROUP``. How many parts there are follows from the
number of live tiles of these rows, and from how many tiles of rows a request has. So the bits of a
request do not depend on what else a batch has.

Algorithm: split keys as in Flash-Decoding (T. Dao, D. Haziza, F. Massa, G. Sizov, 2023), over the
online softmax of ``softmax.py``; parts are merged in the order of their keys by whichever program
is the last to end, some rows and parts at once: its loads wait for memory together. Where parts are
many, the last program of each group merges the group's first, and the last of these the groups.
Follows ``softmax.py`` in one module. ``decode.py`` or ``serve.py`` comes behind, and says what keys
are (``attend_keys``) and where results go (``store_rows``).
"""
# ruff: noqa: F821

#: begin


@triton.jit
def packed_rows(numbers, first_query, first_head, members, sizes):
    """Rows of a tile by their numbers: ``members`` heads from ``first_head`` on, of its queries."""
    query = first_query + numbers // GROUP
    member = numbers % GROUP
    exists = (member < members) & (numbers < LINES) & (query < sizes.q_len)
    # Heads beyond the last look up what the last one does.
    return PackedRows(query, first_head + tl.minimum(member, members - 1), exists)


@triton.jit
def addresses_of(tensor, b, rows, WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
    """Addresses of the rows of a tile in a tensor, and a mask of the elements that exist."""
    columns = tl.arange(0, BLOCK_WIDTH)
    base = tensor.base + b * tensor.stride_b
    lines = rows.h.to(tl.int64) * tensor.stride_h + rows.query.to(tl.int64) * tensor.stride_n
    exist = rows.exists[:, None] & (columns < WIDTH)[None, :]
    return base + lines[:, None] + columns[None, :], exist


@triton.jit
def parts_of(tiles, most):
    """Number of programs that share so many live tiles, and of tiles that each of them takes."""
    wanted = tl.minimum(tl.cdiv(tiles, TILES_OF_PART), most)
    taken = tl.maximum(tl.cdiv(tiles, tl.maximum(wanted, 1)), 1)
    return tl.maximum(tl.cdiv(tiles, taken), 1), taken


@triton.jit
def most_parts_of(tiles, members, sizes):
    """The most programs that share so many tiles: where a request has few tiles of rows, more."""
    units = sizes.heads // members * tl.cdiv(sizes.q_len, BLOCK_M)
    most = tl.minimum(tl.minimum(PROGRAMS // units, tiles // MANY_TILES), MOST_PARTS)
    return tl.maximum(most, LEAST_PARTS)


@triton.jit
def live_tile(step, visits, places, shift):
    """Index of a live tile by its number: FULL tiles come before PARTIAL ones."""
    if not FORWARD_HAS_PARTIAL:
        return forward_tile(step, visits, places.tile, shift, places.scope, False)
    if not FORWARD_HAS_FULL:
        return forward_tile(step, visits, places.tile, shift, places.scope, True)
    full = forward_tile(step, visits, places.tile, shift, places.scope, False)
    behind = tl.maximum(step - visits.full, 0)
    partial = forward_tile(behind, visits, places.tile, shift, places.scope, True)
    return tl.where(step < visits.full, full, partial)


@triton.jit
def attend_part(softmax, q_tile, q, keys, factors, visits, part, places, shift):
    """Take the live tiles of one part into the running softmax.

    Tiles are PEELED, FULL ones without the mask's code, only where a pair's mask is looked up:
    otherwise it is hidden behind the loads of keys, and a second loop would wait for its first.
    """
    scope = places.scope
    of_rows = places.scope_of_rows
    for PARTIAL in tl.static_range(2):
        if PEELED and ((PARTIAL and FORWARD_HAS_PARTIAL) or (not PARTIAL and FORWARD_HAS_FULL)):
            before = visits.full if PARTIAL else 0
            number = visits.partial if PARTIAL else visits.full
            first = tl.minimum(tl.maximum(part.first - before, 0), number)
            last = tl.minimum(tl.maximum(part.last - before, 0), number)
            kv_tile = forward_tile(first, visits, places.tile, shift, scope, PARTIAL)
            for step in tl.range(first, last):
                softmax = attend_keys(softmax, q_tile, q, kv_tile, keys, factors, of_rows, PARTIAL)
                kv_tile = forward_tile(step + 1, visits, places.tile, shift, scope, PARTIAL)
    if not PEELED:
        kv_tile = live_tile(part.first, visits, places, shift)
        for step in tl.range(part.first, part.last):
            softmax = attend_keys(
                softmax, q_tile, q, kv_tile, keys, factors, of_rows, FORWARD_HAS_PARTIAL
            )
            kv_tile = live_tile(step + 1, visits, places, shift)
    return softmax


@triton.jit
def room_of(buffer, unit, units, most_parts):
    """Addresses of a unit's parts in a buffer: sums of all units, row sums, then row maxima."""
    lines = most_parts * LINES
    row_sums = buffer + units.to(tl.int64) * lines * BLOCK_DV
    row_maxes = row_sums + units.to(tl.int64) * lines
    start = unit.to(tl.int64) * lines
    return PartsRoom(buffer + start * BLOCK_DV, row_sums + start, row_maxes + start)


@triton.jit
def store_part(softmax, room, part, exists):
    """Leave a part's sums for the program that puts the parts together."""
    store_lines(softmax, room, part * LINES + tl.arange(0, ROWS), exists)


@triton.jit
def store_lines(softmax, room, lines, exists):
    """Write the running softmax of some rows to their lines of the room."""
    columns = tl.arange(0, BLOCK_DV)
    places = room.sums + lines[:, None] * BLOCK_DV + columns[None, :]
    tl.store(places, softmax.acc, mask=exists[:, None])
    if not OWN_WEIGHTS:
        tl.store(room.row_sums + lines, softmax.row_sum, mask=exists)
        tl.store(room.row_maxes + lines, softmax.row_max, mask=exists)


@triton.jit
def merged(room, numbers, parts, factor, exists):
    """The running softmax of some of a tile's rows over ``parts``, in the order of their numbers.

    Other processors have written them: loads go past the cache of this one. All loads of
    PARTS_AT_ONCE parts wait for memory together, so nothing here may be a sum over parts
    or rows: that would go through shared memory in between.
    """
    columns = tl.arange(0, BLOCK_DV)
    softmax = empty_softmax(LINES_AT_ONCE)
    for first in tl.range(0, parts.count, PARTS_AT_ONCE):
        for each in tl.static_range(PARTS_AT_ONCE):
            part = tl.zeros([LINES_AT_ONCE], tl.int32) + first + each
            lines = (parts.first + part * parts.step) * LINES + numbers
            there = exists & (part < parts.count)
            places = room.sums + lines[:, None] * BLOCK_DV + columns[None, :]
            acc = tl.load(places, mask=there[:, None], other=0.0, cache_modifier=".cg")
            if OWN_WEIGHTS:
                softmax = Softmax(softmax.acc + acc, softmax.row_sum, softmax.row_max)
            else:
                row_sum = tl.load(
                    room.row_sums + lines, mask=there, other=0.0, cache_modifier=".cg"
                )
                row_max = tl.load(
                    room.row_maxes + lines, mask=there, other=float("-inf"), cache_modifier=".cg"
                )
                softmax = with_part(softmax, Softmax(acc, row_sum, row_max), factor)
    return softmax


@triton.jit
def with_part(softmax, part, factor):
    """The running softmax of some rows with one part more; ``factor`` takes maxima to base 2."""
    top = tl.maximum(softmax.row_max, part.row_max)
    shift = tl.where(top == float("-inf"), 0.0, top)
    decay = tl.exp2((softmax.row_max - shift) * factor)
    own = tl.exp2((part.row_max - shift) * factor)
    return Softmax(
        softmax.acc * decay[:, None] + part.acc * own[:, None],
        softmax.row_sum * decay + part.row_sum * own,
        top,
    )


@triton.jit
def empty_softmax(COUNT: tl.constexpr):
    """The running softmax of rows before their first tile."""
    return Softmax(
        tl.zeros([COUNT, BLOCK_DV], tl.float32),
        tl.zeros([COUNT], tl.float32),
        tl.full([COUNT], float("-inf"), tl.float32),
    )


@triton.jit
def merge_group(room, parts, places, members):
    """Put a group's parts together, and leave them where its first one was."""
    head, sizes = places.scope.head, places.scope.sizes
    for line in tl.range(0, LINES, LINES_AT_ONCE):
        numbers = line + tl.arange(0, LINES_AT_ONCE)
        exists = packed_rows(numbers, places.tile * BLOCK_M, head.h, members, sizes).exists
        softmax = merged(room, numbers, parts, places.factors.of_scores, exists)
        # Threads write other elements than they have read.
        tl.debug_barrier()
        store_lines(softmax, room, parts.first * LINES + numbers, exists)


@triton.jit
def is_last(count, number):
    """Tell if the program is the last of so many to count; then the count is 0 again."""
    # All that the program has written is there before it counts.
    tl.debug_barrier()
    last = tl.atomic_add(count, 1, sem="acq_rel") == number - 1
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def counts_of_unit(counts, unit, most_parts):
    """Address of a unit's counts: of parts or groups, and behind it of the parts of each group."""
    each = tl.where(most_parts > MOST_IN_ONE, 1 + tl.cdiv(most_parts, PARTS_AT_ONCE), 1)
    return counts + unit * each


@triton.jit
def put_together(room, counts, part, parts, out, lse, places, members):
    """After a part of a unit: merge what the others have left, if they have ended.

    ``counts`` are those of :func:`counts_of_unit`.
    """
    step, number, ends_group = 1, parts, part >= 0
    if parts > MOST_IN_ONE:
        step = PARTS_AT_ONCE
        number = tl.cdiv(parts, PARTS_AT_ONCE)
        group = part // PARTS_AT_ONCE
        first = group * PARTS_AT_ONCE
        size = tl.minimum(PARTS_AT_ONCE, parts - first)
        ends_group = is_last(counts + 1 + group, size)
        if ends_group:
            merge_group(room, EveryPart(first, size, 1), places, members)
    if ends_group:
        if is_last(counts, number):
            store_merged(room, EveryPart(0, number, step), out, lse, places, members)


@triton.jit
def store_merged(room, parts, out, lse, places, members):
    """Put the parts of all rows of a tile together, and write their results."""
    scope = places.scope
    head = scope.head
    for line in tl.range(0, LINES, LINES_AT_ONCE):
        numbers = line + tl.arange(0, LINES_AT_ONCE)
        rows = packed_rows(numbers, places.tile * BLOCK_M, head.h, members, scope.sizes)
        softmax = merged(room, numbers, parts, places.factors.of_scores, rows.exists)
        of_rows = Scope(Head(head.b, rows.h[:, None], head.hkv), scope.sizes, scope.given)
        own = UnitPlaces(
            places.tile, scope, of_rows, places.factors, places.token, places.wrong
        )
        store_rows(softmax, out, lse, rows, own)
