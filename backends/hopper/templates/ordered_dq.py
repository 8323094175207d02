"""The order in which work tiles add to sums of dQ, which a backward's producer keeps.

The consumers compute, and wait before they add. The producer waits for the turn of the tile that
they compute on, and passes on that of the tile before it, while they compute.

Memory order. A consumer's threads add with ``red.relaxed.gpu``, in the generic proxy: no copy of the
asynchronous proxy writes sums, so that no proxy fence is needed. They arrive at ``q.empty``
(release, CTA), whose phase the producer's threads wait for (acquire, CTA). Then one of these adds
1 to the count by ``red.release.gpu``. A release is cumulative: it orders whatever happened before
it, the consumers' additions too. The next work tile's producer reads the count by
``ld.acquire.gpu`` and arrives at ``turns.full`` (release, CTA), for which its consumers wait
(acquire, CTA) before they add. So each addition happens before all of the next work tile's to the
same sums, and the bits are the same in every run.
"""
# ruff: noqa: F821

#: begin


@gluon.jit
def tiles_ahead(masked, work):
    """Number of the ``masked`` query tiles, which need the mask's code, that come before FULL ones."""
    ahead = 0
    if TWO_SIDED:
        visits = work.visits
        # None where all tiles need that code.
        most = gl.where(masked < visits.partial + visits.full, masked, 0)
        first = tile_at(0, work, False)
        if REVERSED:
            while (ahead < most) & (tile_at(visits.partial - 1 - ahead, work, True) > first):
                ahead += 1
        else:
            while (ahead < most) & (tile_at(ahead, work, True) < first):
                ahead += 1
    return ahead


@gluon.jit
def place_in_turn(step, ahead, masked, visits, FULL: gl.constexpr):
    """Number of the query tile that is visited as number ``step``, a FULL one or another.

    The ``masked`` ones are numbered first, and all but ``ahead`` of them are visited last.
    """
    total = visits.partial + visits.full
    if REVERSED:
        place = total - 1 - step
        if FULL:
            place += ahead
        elif TWO_SIDED:
            place = gl.where(step < ahead, masked - 1 - step, place)
    else:
        place = step - (total - masked)
        if FULL:
            place = masked + step - ahead
        elif TWO_SIDED:
            place = gl.where(step < ahead, step, place)
    return place


@gluon.jit
def q_tile_in_turn(step, ahead, masked, work):
    """Index of the query tile that is visited as number ``step``."""
    visits = work.visits
    place = place_in_turn(step, ahead, masked, visits, False)
    if KV_PASS_HAS_FULL:
        is_full = (step >= ahead) & (step < ahead + visits.partial + visits.full - masked)
        place = gl.where(is_full, place_in_turn(step, ahead, masked, visits, True), place)
    return q_tile_at(place, work, True)


@gluon.jit
def clear_turns(turns):
    """No query tile is under way."""
    for place in gl.static_range(2):
        pack_fields(Turn(-1, 0), turns.data.index(place))


@gluon.jit
def follow_turns(tile_index, tile, q_tile, work, memory):
    """Keep turns after the loads of query tile number ``tile_index`` have begun.

    Its place was free: all consumers have added to the sums of the tile that was there before. The
    tile between both is the one that they compute on.
    """
    turns, head, sizes = memory.turns, work.scope.head, work.scope.sizes
    place = turns.data.index(tile_index & 1)
    pass_turn(place, work.scope.given)
    take_turn(tile_index - 1, turns, work.scope.given)
    row = (head.b * sizes.heads + head.h) * tl.cdiv(sizes.q_len, BLOCK_M)
    turn = kv_pass_turn(tile, q_tile, work.shift, work.scope)
    pack_fields(Turn(row + q_tile, turn), place)


@gluon.jit
def pass_turn(place, given):
    """Let the next work tile add to the query tile that ``place`` tells, if it tells any."""
    own = turn_at(place)
    if own.place >= 0:
        count_turn(given.TURNS + own.place)


@gluon.jit
def take_turn(tile_index, turns, given):
    """Wait for the turn of query tile number ``tile_index``, if it is under way; tell consumers."""
    slot = slot_of(tile_index, 2)
    own = turn_at(turns.data.index(slot.stage))
    if own.place >= 0:
        await_turn(given.TURNS + own.place, own.turn)
        producer_commit(turns, slot)


@gluon.jit
def finish_turns(tile_index, memory, given):
    """Take and pass on all turns of the ``tile_index`` query tiles so far, as soon as they come.

    Whoever waits for the consumers to leave a work tile must do so: they may wait for a turn.
    """
    turns = memory.turns
    for behind in gl.static_range(2):
        slot = slot_of(tile_index + behind, STAGES)
        producer_acquire(memory.q, slot)
        pass_turn(turns.data.index(slot.stage), given)
        if behind == 0:
            take_turn(tile_index - 1, turns, given)
    clear_turns(turns)
