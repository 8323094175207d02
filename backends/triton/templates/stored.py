"""Sums over batch entries and heads of dS, the gradient of each score, which a backward has stored.

Moving memory takes the time: the kernel reads each stored tile once and writes each element of a
gradient once. ``pair_sums.py`` follows in one module.
"""
# ruff: noqa: F821

from typing import NamedTuple

import triton
import triton.language as tl

from attndsl.backends.device.records import Corner, Share, Sizes, Steps, Stored

#: flags

#: functions


@triton.jit
def load_ds(stored, tile, member, share, heads, rest_heads):
    """dS of a tile (keys, queries) of one that is not told apart; zeros where it was not stored."""
    b, h = place_of_member(member, share, rest_heads)
    head = b * heads + h
    key_tile, query_tile = tile
    number = (head * stored.key_tiles + key_tile) * stored.query_tiles + query_tile
    # One condition for all of them: with one each, elements would be loaded one by one.
    some = tl.load(stored.tiles + number + tl.zeros([1, 1], tl.int32)) != 0
    corner = (head.to(tl.int64) * stored.keys + share.corner.kv) * stored.queries + share.corner.q
    places = tl.arange(0, BLOCK_N)[:, None] * stored.queries + tl.arange(0, BLOCK_M)[None, :]
    return tl.load(stored.ds + corner + places, mask=some, other=0.0)


@triton.jit
def stored(
    SLOPES, STORED_TILES, slope_keys, slope_queries, key_tiles, query_tiles,
    heads, own_heads, own_batches, rest_heads, rest, members, q_len, kv_len,
    #: given
):
    """One program: one tile of what is told apart, over a part of what is not, as in ``pairs``.

    Told apart are ``own_batches`` batch entries and ``own_heads`` heads, of each of which ``rest``
    have the same elements; a part is ``members`` of these. SLOPES (batch, heads, slope_keys,
    slope_queries) is of key_tiles x query_tiles tiles a head, each of whole ones of this kernel;
    STORED_TILES says for each whether it was stored.
    """
    sizes = Sizes(own_batches, heads, heads, q_len, kv_len)
    given = Given(
        #: given
    )
    of_all = Stored(SLOPES, STORED_TILES, slope_keys, slope_queries, key_tiles, query_tiles)
    share = share_of_program(own_batches, own_heads, sizes)
    key_tile = share.corner.kv // (slope_keys // key_tiles)
    query_tile = share.corner.q // (slope_queries // query_tiles)
    tile = key_tile, query_tile
    begin = tl.minimum(share.part * members, rest)
    end = tl.minimum(begin + members, rest)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for member in tl.range(begin, end - 1, 2):
        # Both are on their way before either is added.
        one = load_ds(of_all, tile, member, share, heads, rest_heads)
        other = load_ds(of_all, tile, member + 1, share, heads, rest_heads)
        total += one.to(tl.float32) + other.to(tl.float32)
    if (end - begin) % 2 == 1:
        last = load_ds(of_all, tile, end - 1, share, heads, rest_heads)
        total += last.to(tl.float32)
    total = tl.trans(total)
    inside = (share.corner.q + BLOCK_M <= q_len) & (share.corner.kv + BLOCK_N <= kv_len)
    store_sums(total, share, inside, sizes, given)
