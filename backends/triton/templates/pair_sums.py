"""Sums over batch entries and heads, of every pair. Follows or precedes their kernel."""
# ruff: noqa: F821

#: begin


@triton.jit
def store_pairs(SUMS, steps, total, place, inside, sizes):
    """Store ``total`` at the places of a share's pairs; ``inside``: all of them are."""
    rows = place.corner.q + tl.arange(0, total.shape[0])
    columns = place.corner.kv + tl.arange(0, total.shape[1])
    matrix = SUMS + (
        place.part.to(tl.int64) * steps.part
        + place.b.to(tl.int64) * steps.b
        + place.h.to(tl.int64) * steps.h
    )
    places = rows.to(tl.int64)[:, None] * steps.q + columns.to(tl.int64)[None, :] * steps.kv
    total = total.to(SUMS.dtype.element_ty)
    if inside:
        # Without a mask, which would be a word each time.
        tl.store(matrix + places, total)
    else:
        there = (rows < sizes.q_len)[:, None] & (columns < sizes.kv_len)[None, :]
        tl.store(matrix + places, total, mask=there)


@triton.jit
def share_of_program(own_batches, own_heads, sizes):
    """A program's tile, the batch entry and head that are told apart, and its part."""
    q_tiles = tl.cdiv(sizes.q_len, BLOCK_M)
    kv_tiles = tl.cdiv(sizes.kv_len, BLOCK_N)
    kv_first = (tl.program_id(0) % kv_tiles) * BLOCK_N
    rest = tl.program_id(0) // kv_tiles
    first = (rest % q_tiles) * BLOCK_M
    rest = rest // q_tiles
    own_h = rest % own_heads
    rest = rest // own_heads
    return Share(Corner(first, kv_first), rest % own_batches, own_h, rest // own_batches)


@triton.jit
def place_of_member(member, share, rest_heads):
    """Batch entry and head of one of those that are not told apart."""
    if HEADS_APART:
        b = share.b + member
        h = share.h
    else:
        b = share.b + member // rest_heads
        h = share.h * rest_heads + member % rest_heads
    return b, h
