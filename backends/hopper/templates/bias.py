"""Tiles of biases and masks that pairs look up: the producer loads them, each consumer reads its own.

Each consumer has one tile of each tensor in shared memory. The producer loads the next as soon as
the consumer has read the one before, so it comes while the rest of the step is computed.

Where masks alone look something up (BIAS_IN_MASK), FULL tiles load nothing. Both sides pass their
barriers still: so phases follow the number of tiles, and neither side is ahead of the other by two
of them.
"""
# ruff: noqa: F821

#: begin


@gluon.jit
def bias_memory(descs):
    """Stages of what pairs look up by tiles, one a consumer, for each tensor; barriers full, empty."""
    data = ()
    for n in gl.static_range(BIAS_TILES):
        data = data + (allocate_tiles(descs[n], BIAS_PARTS),)
    full, empty = allocate_barriers(BIAS_PARTS), allocate_barriers(BIAS_PARTS)
    for part in gl.static_range(BIAS_PARTS):
        init_barrier(full, part, 1)
        init_barrier(empty, part, 1)
    return data, full, empty


@gluon.jit
def slot_of_bias(PART: gl.constexpr, tile_index):
    """Slot of a consumer's tiles."""
    return Slot(PART, tile_index & 1)


@gluon.jit
def load_bias(tile_index, wanted, head, first_query, first_key, bias):
    """Load what pairs look up for each consumer, when it has read what was there.

    Unless ``wanted``, nothing: consumers do not read it.
    """
    for part in gl.static_range(BIAS_PARTS):
        slot = slot_of_bias(part, tile_index)
        producer_acquire(bias, slot)
        query = first_query + part * BIAS_QUERIES % BLOCK_M
        key = first_key + part * BIAS_KEYS % BLOCK_N
        if BIAS_IN_MASK:
            if wanted:
                load_bias_of_part(slot, head, query, key, bias)
            else:
                producer_commit(bias, slot)
        else:
            load_bias_of_part(slot, head, query, key, bias)


@gluon.jit
def load_bias_of_part(slot, head, query, key, bias):
    """Load one consumer's tile of each tensor."""
    ready = producer_expect(bias, slot, BIAS_BYTES * BIAS_QUERIES * BIAS_KEYS)
    places = places_of_bias(head, query, key)
    for n in gl.static_range(BIAS_TILES):
        tma_load(bias.desc[n], places[n], ready, bias.data[n].index(slot.stage))


@gluon.jit
def read_bias(PART: gl.constexpr, tile_index, USED: gl.constexpr, bias):
    """Values that the pairs of a consumer's tile look up, where they are ``USED``."""
    consumer_wait(bias, slot_of_bias(PART, tile_index))
    tiles = ()
    found = ()
    if USED or not BIAS_IN_MASK:
        for n in gl.static_range(BIAS_TILES):
            tile = bias.data[n].index(PART).reshape([BIAS_QUERIES, BIAS_KEYS])
            tiles = tiles + ((tile.permute((1, 0)) if BIAS_TURNED else tile),)
        for n in gl.static_range(BIAS_TILES):
            found = found + (tiles[n].load(SCORES),)
    return found
