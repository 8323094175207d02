"""Dropout by the producer: it draws, the consumers take a bit of each pair."""
# ruff: noqa: F821

#: begin


@gluon.jit
def draw_tile(
    drop, count, first_row, first_column, kept_s, kept_full, PARTS: gl.constexpr,
    COLUMNS: gl.constexpr,
):
    """Draw for the pairs of tile number ``count``.

    The consumers took the bits before of the same stage.
    """
    stage, _ = slot_of(count, STAGES)
    keep_of_tile(kept_s, stage * PARTS, drop, first_row, first_column, PARTS, COLUMNS)
    mbarrier.arrive(kept_full.index(stage), count=1)


@gluon.jit
def take_kept(
    PART: gl.constexpr, count, kept_s, kept_full, PARTS: gl.constexpr, COLUMNS: gl.constexpr,
):
    """Which pairs of tile number ``count`` are kept, of its 64 rows number PART."""
    stage, phase = slot_of(count, STAGES)
    mbarrier.wait(kept_full.index(stage), phase)
    return kept_s.index(stage * PARTS + PART).load(layout_of_bits(COLUMNS))
