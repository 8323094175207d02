"""Gradients by distance in the backward: the producer adds up dS along diagonals.

It does so when it has loaded the next tile, so that no consumer waits for it. The one after takes
the place of dS, but is loaded only then.
"""
# ruff: noqa: F821

#: begin


@gluon.jit
def line_of_sums(DISTANCE_SUMS, tile, head, sizes, padded):
    """Where sums of a tile of keys lie that are of the first query less the tile's end."""
    kv_tiles = tl.cdiv(sizes.kv_len, BLOCK_N)
    start = ((head.b * sizes.heads + head.h) * kv_tiles + tile).to(gl.int64) * (padded + kv_tiles * BLOCK_N)
    return DISTANCE_SUMS + (start + (kv_tiles - 1 - tile) * BLOCK_N)


@gluon.jit
def add_tile(count, sums, ds_s, lines_s, ds_full):
    """Add dS of tile number ``count`` to sums along its diagonals, 64 queries at a time."""
    place, phase = slot_of(count, 2)
    mbarrier.wait(ds_full.index(place), phase)
    slopes = ds_s.index(place)
    PARTS: gl.constexpr = slopes.shape[1] // 64
    for part in gl.static_range(PARTS):
        add_diagonals(sums + 64 * part, slopes, part, lines_s)
