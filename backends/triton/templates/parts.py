"""Parts of the keys of some rows: which tiles each program takes, and how their sums are merged.

A program has some parts of the live tiles of some rows. Query heads that share keys are rows of one
tile: row r is head ``r % GROUP`` of query ``r // GROUP``. How many parts there are follows from the
number of live tiles of these rows, and from how many tiles of rows a request has. So the bits of a
request do not depend on what else a batch has. In a batch of many tiles of rows a program has several parts one after the other, or all
of them, and loads keys without a break.

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
    return tl.maximum(most // EVEN_PARTS * EVEN_PARTS, LEAST_PARTS)


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
def share_of_parts(live, most, limits):
    """The program's share of a unit's parts; ``most`` is the most that so many live tiles have.

    Bits depend on parts. How many of them a program takes depends on how many programs there are,
    so bits must not depend on that.
    """
    parts, taken = parts_of(live, tl.minimum(most, limits.most_parts))
    each = tl.cdiv(parts, tl.num_programs(0))
    if SEVERAL_PARTS:
        each = tl.maximum(each, tl.minimum(limits.least_tiles // taken, parts))
        if each > 1:
            each = tl.cdiv(each, PARTS_OF_GROUP) * PARTS_OF_GROUP
    first = tl.program_id(0) * each
    last = tl.minimum(first + each, parts)
    end = tl.minimum(last * taken, live)
    alone = each >= parts if FOLDS else parts == 1
    return ShareOfParts(parts, taken, each, first, last, end, alone)


@triton.jit
def sums_of_part(running, keys):
    """The softmax of the part at hand, and how many sums of the program so far are not finite."""
    softmax, lost = times_values_factor(running.softmax, keys), running.lost
    if CHECKS:
        lost += tl.sum(tl.sum(not_finite(softmax.acc), 1), 0)
    return softmax, lost


@triton.jit
def end_only_part(running, share, keys, rows, room):
    """Put the program's only part away: in ``merged`` if the unit has no other, or in the room."""
    softmax, lost = sums_of_part(running, keys)
    if not share.alone:
        store_part(softmax, room, share.first, rows.exists)
    return RunningParts(softmax, running.group, softmax, 0, 0, lost)


@triton.jit
def end_part(running, share, keys, rows, places, room):
    """Add a part to its group, and put the group away behind its last part.

    It goes to ``merged`` if the program merges all of them, else to the place of its first part.
    """
    softmax, lost = sums_of_part(running, keys)
    factor = places.factors.of_scores
    group, merged, part = with_part(running.group, softmax, factor), running.merged, running.part
    if (part + 1 == share.last) | ((part + 1) % PARTS_OF_GROUP == 0):
        first = part // PARTS_OF_GROUP * PARTS_OF_GROUP
        if not FOLDS:
            store_part(group, room, first, rows.exists)
        elif share.alone:
            merged = with_part(merged, group, factor)
        else:
            store_part(group, room, first, rows.exists)
        group = empty_softmax(ROWS)
    return RunningParts(empty_softmax(ROWS), group, merged, part + 1, share.taken, lost)


@triton.jit
def attend_step(
    running, step, kv_tile, queries, keys, share, rows, places, room,
    PARTIAL: tl.constexpr, ENDS: tl.constexpr, ISOLATES: tl.constexpr,
):
    """Take live tile number ``step`` into the running softmax of its part, which it ENDS maybe."""
    q_tile, q = queries
    softmax = attend_keys(
        running.softmax, q_tile, q, kv_tile, keys, places.factors, places.scope_of_rows, PARTIAL,
        ISOLATES,
    )
    left = running.left - 1 if ENDS else running.left
    running = RunningParts(
        softmax, running.group, running.merged, running.part, left, running.lost
    )
    if ENDS:
        if (step + 1 == share.end) | (left == 0):
            running = end_part(running, share, keys, rows, places, room)
    return running


@triton.jit
def attend_parts(
    queries, keys, visits, share, rows, places, shift, room,
    SEVERAL: tl.constexpr, ISOLATES: tl.constexpr,
):
    """Take the live tiles of the program's parts, of its one part if not SEVERAL.

    Tiles are PEELED, FULL ones without the mask's code, only where a pair's mask is looked up:
    otherwise it is hidden behind the loads of keys, and a second loop would wait for its first.
    """
    nothing = empty_softmax(ROWS)
    running = RunningParts(nothing, nothing, nothing, share.first, share.taken, 0)
    begin = share.first * share.taken
    if PEELED:
        for PARTIAL in tl.static_range(2):
            if (PARTIAL and FORWARD_HAS_PARTIAL) or (not PARTIAL and FORWARD_HAS_FULL):
                before = visits.full if PARTIAL else 0
                number = visits.partial if PARTIAL else visits.full
                first = tl.maximum(begin, before)
                kv_tile = forward_tile(
                    first - before, visits, places.tile, shift, places.scope, PARTIAL
                )
                for step in tl.range(first, tl.minimum(share.end, before + number)):
                    running = attend_step(
                        running, step, kv_tile, queries, keys, share, rows, places, room,
                        PARTIAL, SEVERAL, ISOLATES,
                    )
                    kv_tile = forward_tile(
                        step + 1 - before, visits, places.tile, shift, places.scope, PARTIAL
                    )
    else:
        kv_tile = live_tile(begin, visits, places, shift)
        for step in tl.range(begin, share.end):
            running = attend_step(
                running, step, kv_tile, queries, keys, share, rows, places, room,
                FORWARD_HAS_PARTIAL, SEVERAL, ISOLATES,
            )
            kv_tile = live_tile(step + 1, visits, places, shift)
    if not SEVERAL:
        running = end_only_part(running, share, keys, rows, room)
    return running


@triton.jit
def attend_all_parts(
    queries, keys, visits, share, rows, places, shift, room, ISOLATES: tl.constexpr
):
    """Take the program's parts.

    One part has a loop without the code that ends parts: there the time of a tile counts. Its
    place in the room is that of the part, and that of several parts is their group's.
    """
    if not SEVERAL_PARTS:
        running = attend_parts(
            queries, keys, visits, share, rows, places, shift, room, False, ISOLATES
        )
    elif share.each == 1:
        running = attend_parts(
            queries, keys, visits, share, rows, places, shift, room, False, ISOLATES
        )
    else:
        running = attend_parts(
            queries, keys, visits, share, rows, places, shift, room, True, ISOLATES
        )
    return running


@triton.jit
def attend_share(queries, keys, visits, share, rows, places, shift, room):
    """Take the program's parts; returns the softmax of them all, if they are all of the unit.

    If what came out is not finite, they are taken again, so that NaN goes to live pairs alone. See
    ``backends/triton/nan_repair.py``.
    """
    running = attend_all_parts(queries, keys, visits, share, rows, places, shift, room, False)
    if CHECKS:
        if running.lost > 0:
            running = attend_all_parts(
                queries, keys, visits, share, rows, places, shift, room, True
            )
    return running.merged


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

    Parts of a group come together first, whoever merges them. Other processors have written them:
    loads go past the cache of this one. All loads of PARTS_AT_ONCE parts wait for memory together,
    so nothing here may be a sum over parts or rows: that would go through shared memory in between.
    """
    columns = tl.arange(0, BLOCK_DV)
    softmax = empty_softmax(LINES_AT_ONCE)
    for first in tl.range(0, parts.count, PARTS_AT_ONCE):
        for number in tl.static_range(PARTS_AT_ONCE // PARTS_OF_GROUP):
            group = empty_softmax(LINES_AT_ONCE)
            for each in tl.static_range(PARTS_OF_GROUP):
                own = first + PARTS_OF_GROUP * number + each
                part = tl.zeros([LINES_AT_ONCE], tl.int32) + own
                lines = (parts.first + part) * LINES + numbers
                there = exists & (part < parts.count) & ((part & (parts.step - 1)) == 0)
                places = room.sums + lines[:, None] * BLOCK_DV + columns[None, :]
                acc = tl.load(places, mask=there[:, None], other=0.0, cache_modifier=".cg")
                row_sum, row_max = group.row_sum, group.row_max
                if not OWN_WEIGHTS:
                    row_sum = tl.load(
                        room.row_sums + lines, mask=there, other=0.0, cache_modifier=".cg"
                    )
                    row_max = tl.load(
                        room.row_maxes + lines, mask=there, other=float("-inf"),
                        cache_modifier=".cg",
                    )
                group = with_part(group, Softmax(acc, row_sum, row_max), factor)
            softmax = with_part(softmax, group, factor)
    return softmax


@triton.jit
def with_part(softmax, part, factor):
    """The running softmax of some rows with one part more; ``factor`` takes maxima to base 2."""
    if OWN_WEIGHTS:
        return Softmax(softmax.acc + part.acc, softmax.row_sum, softmax.row_max)
    top = tl.maximum(softmax.row_max, part.row_max)
    shift = tl.where(top == float("-inf"), 0.0, top)
    decay = tl.exp2((softmax.row_max - shift) * factor)
    own = tl.exp2((part.row_max - shift) * factor)
    # Explicit, so that bits do not depend on where a compiler has this: see ``share_of_parts``.
    acc = tl.fma(softmax.acc, decay[:, None], part.acc * own[:, None])
    return Softmax(acc, tl.fma(softmax.row_sum, decay, part.row_sum * own), top)


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
def is_last(count, own, number):
    """Tell if the program's ``own`` are the last of so many to be counted; then the count is 0."""
    # All that the program has written is there before it counts.
    tl.debug_barrier()
    last = tl.atomic_add(count, own, sem="acq_rel") == number - own
    if last:
        tl.store(count, 0)
    return last


@triton.jit
def counts_of_unit(counts, unit, most_parts):
    """Address of a unit's counts: of parts or groups, and behind it of the parts of each group."""
    each = tl.where(most_parts > MOST_IN_ONE, 1 + tl.cdiv(most_parts, PARTS_OF_GROUP), 1)
    return counts + unit * each


@triton.jit
def put_together(room, counts, share, out, lse, places, members):
    """After the program's parts of a unit: merge what others have left, if they have ended.

    ``counts`` are those of :func:`counts_of_unit`.
    """
    parts, own = share.parts, share.last - share.first
    step = tl.where(share.each > 1, PARTS_OF_GROUP, 1)
    if (parts > MOST_IN_ONE) & (share.each == 1):
        group = share.first // PARTS_OF_GROUP
        first = group * PARTS_OF_GROUP
        count = tl.minimum(PARTS_OF_GROUP, parts - first)
        own = 0
        step = PARTS_OF_GROUP
        if is_last(counts + 1 + group, 1, count):
            merge_group(room, EveryPart(first, count, 1), places, members)
            own = count
    if own > 0:
        if is_last(counts, own, parts):
            store_merged(room, EveryPart(0, parts, step), out, lse, places, members)


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
