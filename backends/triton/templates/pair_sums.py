"""Where sums over batch entries and heads lie, of every pair. Follows or precedes their kernel."""
# ruff: noqa: F821

import triton
import triton.language as tl

#: begin


@triton.jit
def store_pairs(
    SUMS, step_part, step_b, step_h, step_q, step_kv, total, part, b, head, first, kv_first,
    q_len, kv_len, inside,
):
    """Store ``total`` at the places of a tile's pairs; ``inside``: all of them are."""
    rows = first + tl.arange(0, total.shape[0])
    columns = kv_first + tl.arange(0, total.shape[1])
    matrix = SUMS + (part.to(tl.int64) * step_part + b.to(tl.int64) * step_b + head.to(tl.int64) * step_h)
    places = rows.to(tl.int64)[:, None] * step_q + columns.to(tl.int64)[None, :] * step_kv
    total = total.to(SUMS.dtype.element_ty)
    if inside:
        # Without a mask, which would be a word each time.
        tl.store(matrix + places, total)
    else:
        tl.store(matrix + places, total, mask=(rows < q_len)[:, None] & (columns < kv_len)[None, :])


@triton.jit
def place_of_program(
    own_batches, own_heads, q_len, kv_len, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """First rows of a program's tile, the batch entry and head that are told apart, and its part."""
    q_tiles = tl.cdiv(q_len, BLOCK_M)
    kv_tiles = tl.cdiv(kv_len, BLOCK_N)
    kv_first = (tl.program_id(0) % kv_tiles) * BLOCK_N
    found = tl.program_id(0) // kv_tiles
    first = (found % q_tiles) * BLOCK_M
    found = found // q_tiles
    own_h = found % own_heads
    found = found // own_heads
    return first, kv_first, found % own_batches, own_h, found // own_batches


@triton.jit
def place_of_member(member, own_b, own_h, rest_heads):
    """Batch entry and head of one of those that are not told apart."""
    if HEADS_APART:
        b = own_b + member
        h = own_h
    else:
        b = own_b + member // rest_heads
        h = own_h * rest_heads + member % rest_heads
    return b, h
