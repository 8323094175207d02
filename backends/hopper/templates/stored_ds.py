"""dS on its way from shared to global memory.

One consumer stores the tile that both have written, and the other notes that in ``stored_tiles``
(batch, heads, tiles of keys, tiles of queries). Before both meet again, one tile later, it has been
read; the tile after that takes its place.
"""
# ruff: noqa: F821

#: begin


@gluon.jit
def store_ds(PART: gl.constexpr, q_index, first, shared, keys, results, work):
    """Store a tile of dS, whose queries begin at ``first``, or note that it is stored."""
    head, sizes = work.scope.head, work.scope.sizes
    number = head.b * sizes.heads + head.h
    row = number * tl.cdiv(sizes.kv_len, BLOCK_N) * BLOCK_N + keys.first
    if PART == 0:
        tma_store(results.ds, [row, first], shared)
    else:
        q_tiles = tl.cdiv(sizes.q_len, BLOCK_M)
        gl.store(results.stored_tiles + (row // BLOCK_N * q_tiles + q_index), 1)
