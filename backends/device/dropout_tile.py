"""The pairs of a tile that dropout keeps, in the layout of ``backends.dense.philox``."""

import triton
import triton.language as tl


@triton.jit
def philox4x32(c0, c1, c2, c3):
    """Four tiles of random words (uint32) from four of counters, in 7 rounds; the key is 0.

    Algorithm and its source: ``backends.philox``.
    """
    for turn in tl.static_range(7):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high1, low1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ (turn * 0x9E3779B9 & 0xFFFFFFFF)
        c2 = high0 ^ c3 ^ (turn * 0xBB67AE85 & 0xFFFFFFFF)
        c1, c3 = low1, low0
    return c0, c1, c2, c3


@triton.jit
def drop_of_head(p, head_of_batch, seed):
    """The record that decides which pairs of a head are dropped (``backends.dense.philox``).

    Args:
        p: With what probability a pair is dropped: a number, or a tile of one.
        head_of_batch: Number of the head.
        seed: A number, or where one lies.

    Returns:
        The head's four words; ``v``, and what ``u`` is compared to; ``256 p`` rounded down.
    """
    if seed.dtype.is_ptr():
        seed = tl.load(seed)
    seed = seed.to(tl.int64)
    number, low, high = head_of_batch.to(tl.uint32), seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    word0, word1, word2, word3 = philox4x32(number, 0, low, high)
    begin, _, _, _ = philox4x32(number, 1, low, high)
    scaled = tl.minimum(tl.maximum(p, 0.0), 1.0) * 256.0
    least = tl.minimum(tl.floor(scaled), 255.0)
    # The largest of fp32 below 2^32, where p is 1.
    fraction = tl.minimum((scaled - least) * 4294967296.0, 4294967040.0).to(tl.uint32)
    return word0, word1, word2, word3, begin, fraction, least.to(tl.int32)


@triton.jit
def drop_of_part(p, head_of_batch, seed, row, key):
    """:func:`drop_of_head` for a part of a whole: its places count on from others.

    Args:
        p: As there.
        head_of_batch: Number of the head in the whole.
        seed: As there.
        row: Place of the part's first row, int32.
        key: Place of its first key, int32.
    """
    word0, word1, word2, word3, begin, fraction, least = drop_of_head(p, head_of_batch, seed)
    rows, keys = row.to(tl.uint32), key.to(tl.uint32)
    begin = begin + rows * 0xC13FA9A9 + keys * 0x91E10DA5
    return word0 + rows, word1 + keys, word2, word3, begin, fraction, least


@triton.jit
def rotated(word, NUMBER: tl.constexpr):
    """``word`` (uint32) rotated to the left by NUMBER bits."""
    return (word << NUMBER) | (word >> (32 - NUMBER))


@triton.jit
def lower_planes(words):
    """The words of bits 0 to 3 of draws, from four words (uint32) of bits 4 to 7.

    As ``backends.philox`` has them, its ``ROTATIONS`` among them.
    """
    word0, word1, word2, word3 = words
    return (
        rotated(word1, 21) ^ rotated(word2, 13) ^ rotated(word3, 26),
        rotated(word2, 7) ^ rotated(word3, 4) ^ rotated(word0, 16),
        rotated(word3, 1) ^ rotated(word0, 29) ^ rotated(word1, 27),
        rotated(word0, 13) ^ rotated(word1, 14) ^ rotated(word2, 20),
    )


@triton.jit
def refined(kept, planes, FIRST: tl.constexpr, least):
    """Bits of ``kept``, after four more bits of draws were compared with those of ``least``.

    Args:
        kept: uint32, a bit for each pair: whether lower bits of its draw are as much or more.
        planes: Four words like it, of bits number FIRST and following.
        FIRST: 0 or 4.
        least: What all draws are compared with, a number up to 255 or a tile of one.
    """
    for place in tl.static_range(4):
        either = tl.where(least >> (FIRST + place) & 1 == 1, 0, -1).to(tl.uint32)
        kept = kept & planes[place] | (kept | planes[place]) & either
    return kept


@triton.jit
def kept_pairs(
    first_row, first_column, p, head_of_batch, seed, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The pairs of a tile that are kept: int8 (ROWS, COLUMNS), 0 or 1.

    ``first_row`` is a multiple of 16, ``first_column`` of COLUMNS or of 128, ROWS and COLUMNS are
    powers of two from 16 on, and ``p`` is a number or a tile (1, 1). Of tiles of fewer than 128
    columns some is drawn for nothing.
    """
    of_head = drop_of_head(p, head_of_batch, seed)
    return kept_of_head(of_head, first_row, first_column, ROWS, COLUMNS)


@triton.jit
def kept_pairs_of_part(
    first_row, first_column, p, head_of_batch, seed, row, key,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """:func:`kept_pairs` for a part of a whole; see :func:`drop_of_part`."""
    of_head = drop_of_part(p, head_of_batch, seed, row, key)
    return kept_of_head(of_head, first_row, first_column, ROWS, COLUMNS)


@triton.jit
def kept_of_head(of_head, first_row, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """:func:`kept_pairs` of what :func:`drop_of_head` says."""
    row_word, key_word, word2, word3, begin, fraction, least = of_head
    BLOCKS: tl.constexpr = (COLUMNS + 127) // 128
    EIGHTS: tl.constexpr = COLUMNS // 8 // BLOCKS
    rows = (first_row // 2 + tl.arange(0, ROWS // 2)).to(tl.uint32)[:, None]
    keys = (first_column // 128 * 8 + tl.arange(0, BLOCKS * 8)).to(tl.uint32)[None, :]
    zeros = tl.zeros([ROWS // 2, BLOCKS * 8], tl.uint32)
    spread = begin + rows * 0xC13FA9A9 + keys * 0x91E10DA5
    kept = tl.where(spread < fraction, zeros, zeros ^ 0xFFFFFFFF)
    words = philox4x32(
        rows + row_word + zeros, keys + key_word + zeros, word2 + zeros, word3 + zeros
    )
    kept = refined(refined(kept, lower_planes(words), 0, least), words, 4, least)
    eights = first_column // 8 % 16 + tl.arange(0, EIGHTS)
    shifts = 8 * (eights % 4) + 4 * (eights // 8) + 2 * (eights // 4 % 2)
    shifts = (shifts[None, :] + tl.arange(0, 2)[:, None]).to(tl.uint32)
    pairs = (kept[:, :, None, None] >> shifts[None, None, :, :] & 1).to(tl.int8)
    blocks = tl.reshape(pairs, [ROWS // 16, 8, BLOCKS, 8, 2, EIGHTS])
    return tl.reshape(tl.permute(blocks, (0, 4, 1, 2, 5, 3)), [ROWS, COLUMNS])


@triton.jit
def kept_single_pairs(
    first_row, first_column, p, head_of_batch, seed, q, kv, starts,
    BY_Q: tl.constexpr, BY_KV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """:func:`kept_pairs`, drawn for each pair alone: for a part that begins within blocks.

    Args:
        first_row: The tile's first row in the part.
        first_column: The same of keys.
        p: As there.
        head_of_batch: Number of the head in the whole.
        seed: As there.
        q: The tile's logical positions of queries, in any shape.
        kv: The same of keys.
        starts: Numbers of the part's first row and of its first key in the whole, int32.
        BY_Q: Whether logical positions are the rows that are counted.
        BY_KV: The same of keys.
        ROWS: Rows of the tile.
        COLUMNS: Its columns.
    """
    row_word, key_word, word2, word3, begin, fraction, least = drop_of_head(p, head_of_batch, seed)
    row, key = starts
    rows = first_row + row + tl.arange(0, ROWS)
    keys = first_column + key + tl.arange(0, COLUMNS)
    if BY_Q:
        rows = tl.reshape(q, [ROWS])
    if BY_KV:
        keys = tl.reshape(kv, [COLUMNS])
    rows, keys = rows[:, None], keys[None, :]
    zeros = tl.zeros([ROWS, COLUMNS], tl.uint32)
    row_places = ((rows >> 4 << 3) + (rows & 7)).to(tl.uint32)
    key_places = ((keys >> 7 << 3) + (keys & 7)).to(tl.uint32)
    spread = begin + row_places * 0xC13FA9A9 + key_places * 0x91E10DA5
    kept = tl.where(spread < fraction, zeros, zeros ^ 0xFFFFFFFF)
    words = philox4x32(
        row_places + row_word + zeros, key_places + key_word + zeros, word2 + zeros, word3 + zeros
    )
    kept = refined(refined(kept, lower_planes(words), 0, least), words, 4, least)
    eights = keys >> 3 & 15
    shifts = 8 * (eights & 3) + 4 * (eights >> 3) + 2 * (eights >> 2 & 1) + (rows >> 3 & 1)
    return (kept >> shifts.to(tl.uint32) & 1).to(tl.int8)


@triton.jit
def keep_factor(kept, p):
    """Factor of each weight that dropout with probability ``p`` gives, from :func:`kept_pairs`."""
    factor = tl.where(p < 1.0, 1.0 / tl.where(p < 1.0, 1.0 - tl.maximum(p, 0.0), 1.0), 0.0)
    return tl.where(kept != 0, factor, 0.0)
