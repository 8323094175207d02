"""What producer and consumers do for dropout: one draws, the others take bits of pairs."""
# ruff: noqa: F821

#: begin


@gluon.jit
def drop_of_rows(
    first, b, h, hkv, batch, heads, kv_heads, q_len, kv_len, KEYS_FIRST: gl.constexpr,
    #: parameters
):
    """What decides which pairs of a head are kept, for tiles whose rows begin at ``first``."""
    chance = drop_probability(
        b, h, hkv, batch, heads, kv_heads, q_len, kv_len,
        #: arguments
    )
    return drop_of_head(chance, b * heads + h, seed, first, KEYS_FIRST)


@gluon.jit
def draw_tile(
    drop, count, first, kept_s, kept_full,
    STAGES: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr, KEYS_FIRST: gl.constexpr,
):
    """Draw for the pairs of tile number ``count``, whose columns begin at ``first``.

    The consumers have left the stage's tile of v, or of dO, and took the bits before.
    """
    stage = count % STAGES
    for part in gl.static_range(PARTS):
        kept_s.index(stage * PARTS + part).store(kept_bits(drop, part, first, COLUMNS, KEYS_FIRST))
    mbarrier.arrive(kept_full.index(stage), count=1)


@gluon.jit
def take_bits(
    PART: gl.constexpr, count, kept_s, kept_full,
    STAGES: gl.constexpr, PARTS: gl.constexpr, COLUMNS: gl.constexpr,
):
    """Which pairs of tile number ``count`` are kept, 32 to a word; those of rows number PART."""
    stage = count % STAGES
    mbarrier.wait(kept_full.index(stage), (count // STAGES) & 1)
    return kept_s.index(stage * PARTS + PART).load(layout_of_bits(COLUMNS // 64))
