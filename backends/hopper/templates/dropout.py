"""Dropout by the producer: it draws, the consumers take a bit of each pair."""
# ruff: noqa: F821

#: begin


@gluon.jit
def draw_tile(
    drop, tile_index, first_row, first_column, kept, PARTS: gl.constexpr, COLUMNS: gl.constexpr
):
    """Draw for the pairs of tile number ``tile_index``.

    The consumers took the bits before of the same stage.
    """
    slot = slot_of(tile_index, STAGES)
    keep_of_tile(kept.data, slot.stage * PARTS, drop, first_row, first_column, PARTS, COLUMNS)
    producer_commit(kept, slot)


@gluon.jit
def take_kept(PART: gl.constexpr, tile_index, kept, PARTS: gl.constexpr, COLUMNS: gl.constexpr):
    """The kept pairs of tile number ``tile_index``, of its 64 rows number PART."""
    slot = slot_of(tile_index, STAGES)
    consumer_wait(kept, slot)
    return kept.data.index(slot.stage * PARTS + PART).load(layout_of_bits(COLUMNS))
