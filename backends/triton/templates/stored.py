"""Sums over batch entries and heads of dS, the gradient of each score, which a backward has stored.

What takes time is to move it: each tile that was stored is read once, and each element of a gradient
written once. ``pair_sums.py`` follows in one module.
"""
# ruff: noqa: F821

import triton
import triton.language as tl

#: flags


@triton.jit
def load_slopes(
    SLOPES, STORED_TILES, keys, queries, key_tiles, query_tiles, key_tile, query_tile, member, own_b, own_h,
    heads, rest_heads, first, kv_first, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """dS of a tile (keys, queries) of one that is not told apart; zeros where it was not stored."""
    b, h = place_of_member(member, own_b, own_h, rest_heads)
    head = b * heads + h
    tile = (head * key_tiles + key_tile) * query_tiles + query_tile
    # One condition for all of them: with one each, elements would be loaded one by one.
    some = tl.load(STORED_TILES + tile + tl.zeros([1, 1], tl.int32)) != 0
    corner = (head.to(tl.int64) * keys + kv_first) * queries + first
    places = tl.arange(0, BLOCK_N)[:, None] * queries + tl.arange(0, BLOCK_M)[None, :]
    return tl.load(SLOPES + corner + places, mask=some, other=0.0)


@triton.jit
def stored(
    SLOPES, STORED_TILES, slope_keys, slope_queries, key_tiles, query_tiles,
    heads, own_heads, own_batches, rest_heads, rest, members, q_len, kv_len,
    #: outputs
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program: one tile of what is told apart, over a part of what is not, as in ``pairs``.

    Told apart are ``own_batches`` batch entries and ``own_heads`` heads, of each of which ``rest``
    have the same elements; a part is ``members`` of these. SLOPES (batch, heads, slope_keys,
    slope_queries) is of key_tiles x query_tiles tiles a head, each of whole ones of this kernel;
    STORED_TILES says for each whether it was stored.
    """
    first, kv_first, own_b, own_h, part = place_of_program(
        own_batches, own_heads, q_len, kv_len, BLOCK_M, BLOCK_N
    )
    key_tile = kv_first // (slope_keys // key_tiles)
    query_tile = first // (slope_queries // query_tiles)
    begin = tl.minimum(part * members, rest)
    end = tl.minimum(begin + members, rest)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for member in tl.range(begin, end - 1, 2):
        # Both are on their way before either is added.
        one = load_slopes(
            SLOPES, STORED_TILES, slope_keys, slope_queries, key_tiles, query_tiles, key_tile, query_tile,
            member, own_b, own_h, heads, rest_heads, first, kv_first, BLOCK_M, BLOCK_N,
        )
        other = load_slopes(
            SLOPES, STORED_TILES, slope_keys, slope_queries, key_tiles, query_tiles, key_tile, query_tile,
            member + 1, own_b, own_h, heads, rest_heads, first, kv_first, BLOCK_M, BLOCK_N,
        )
        total += one.to(tl.float32) + other.to(tl.float32)
    if (end - begin) % 2 == 1:
        last = load_slopes(
            SLOPES, STORED_TILES, slope_keys, slope_queries, key_tiles, query_tiles, key_tile, query_tile,
            end - 1, own_b, own_h, heads, rest_heads, first, kv_first, BLOCK_M, BLOCK_N,
        )
        total += last.to(tl.float32)
    total = tl.trans(total)
    inside = (first + BLOCK_M <= q_len) & (kv_first + BLOCK_N <= kv_len)
    #: end_sums
