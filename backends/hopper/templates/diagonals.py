"""Gradients by distance in the backward: the producer adds up dS along diagonals.

The producer loads tile t + 1 and then adds up dS of t, or at once where t is a work tile's last: no
consumer waits for it. No warpgroup waits for itself: the load waits for consumers to leave a tile no
later than t, and dS of t needs the loads up to t alone. Nothing need say that dS has been read: that
of t + 2 takes its place, whose load comes after.
"""
# ruff: noqa: F821

#: begin


@gluon.jit
def line_of_sums(tile, head, call):
    """Address of a key tile's sum for the distance of the first query from the tile's end."""
    sizes = call.sizes
    kv_tiles = tl.cdiv(sizes.kv_len, BLOCK_N)
    number = (head.b * sizes.heads + head.h) * kv_tiles + tile
    start = number.to(gl.int64) * (call.padded + kv_tiles * BLOCK_N)
    return call.given.DISTANCE_SUMS + (start + (kv_tiles - 1 - tile) * BLOCK_N)


@gluon.jit
def add_tile(tile_index, sums, memory):
    """Add dS of tile number ``tile_index`` to sums along its diagonals, 64 queries at a time."""
    slot = slot_of(tile_index, 2)
    consumer_wait(memory.ds, slot)
    ds = memory.ds.data.index(slot.stage)
    PARTS: gl.constexpr = ds.shape[1] // 64
    for part in gl.static_range(PARTS):
        add_diagonals(sums + 64 * part, ds, part, memory.lines)
