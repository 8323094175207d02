"""What pairs look up, by tiles: loaded by the producer, read by each consumer for itself.

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
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    data = ()
    for n in gl.static_range(BIAS_TILES):
        desc = descs[n]
        tiles = gl.allocate_shared_memory(
            desc.dtype, [BIAS_PARTS] + desc.block_type.shape, desc.layout
        )
        data = data + (tiles,)
    full = gl.allocate_shared_memory(gl.int64, [BIAS_PARTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [BIAS_PARTS, 1], BARRIER)
    for part in gl.static_range(BIAS_PARTS):
        mbarrier.init(full.index(part), count=1)
        mbarrier.init(empty.index(part), count=1)
    return data, full, empty


@gluon.jit
def load_bias(tile_index, wanted, head, first_query, first_key, bias):
    """Load what pairs look up for each consumer, when it has read what was there.

    Unless ``wanted``, nothing: consumers do not read it.
    """
    for part in gl.static_range(BIAS_PARTS):
        mbarrier.wait(bias.empty.index(part), (tile_index & 1) ^ 1)
        ready = bias.full.index(part)
        query = first_query + part * BIAS_QUERIES % BLOCK_M
        key = first_key + part * BIAS_KEYS % BLOCK_N
        if BIAS_IN_MASK:
            if wanted:
                load_bias_of_part(part, head, query, key, ready, bias)
            else:
                mbarrier.arrive(ready, count=1)
        else:
            load_bias_of_part(part, head, query, key, ready, bias)


@gluon.jit
def load_bias_of_part(part: gl.constexpr, head, query, key, ready, bias):
    """Load one consumer's tile of each tensor."""
    mbarrier.expect(ready, BIAS_BYTES * BIAS_QUERIES * BIAS_KEYS)
    places = places_of_bias(head, query, key)
    for n in gl.static_range(BIAS_TILES):
        tma_load(bias.desc[n], places[n], ready, bias.data[n].index(part))


@gluon.jit
def read_bias(PART: gl.constexpr, tile_index, USED: gl.constexpr, bias):
    """What the pairs of a consumer's tile look up, where it is ``USED``."""
    mbarrier.wait(bias.full.index(PART), tile_index & 1)
    tiles = ()
    found = ()
    if USED or not BIAS_IN_MASK:
        for n in gl.static_range(BIAS_TILES):
            tile = bias.data[n].index(PART).reshape([BIAS_QUERIES, BIAS_KEYS])
            tiles = tiles + ((tile.permute((1, 0)) if BIAS_TURNED else tile),)
        for n in gl.static_range(BIAS_TILES):
            found = found + (tiles[n].load(SCORES),)
    return found
