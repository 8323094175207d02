"""Dropout in the backward: the producer draws, the consumers take a bit of each pair."""
# ruff: noqa: F821

#: begin


@gluon.jit
def drop_of_rows(
    first, b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
    #: parameters
):
    """What decides which pairs of a head are kept, for tiles of keys that begin at ``first``."""
    chance = drop_probability(
        b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
        #: arguments
    )
    return drop_of_head(chance, b * heads + h, seed, first, True)


@gluon.jit
def draw_tile(
    drop, count, first, kept_s, kept_full, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
):
    """Draw for the pairs of tile number ``count``, whose columns begin at ``first``.

    The consumers have left the stage's tile of dO, and took the bits before.
    """
    stage = count % STAGES
    for part in gl.static_range(2):
        kept_s.index(stage * 2 + part).store(kept_bits(drop, part, first, COLUMNS))
    mbarrier.arrive(kept_full.index(stage), count=1)


@gluon.jit
def take_bits(
    PART: gl.constexpr, count, kept_s, kept_full, STAGES: gl.constexpr, COLUMNS: gl.constexpr,
):
    """Which pairs of tile number ``count`` are kept, 32 to a word; those of rows number PART."""
    stage = count % STAGES
    mbarrier.wait(kept_full.index(stage), (count // STAGES) & 1)
    return kept_s.index(stage * 2 + PART).load(layout_of_bits(COLUMNS // 64))
