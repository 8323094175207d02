"""Which pairs of a product's tile dropout keeps, each thread for the pairs that it holds.

A draw takes seven rounds, each of which needs the one before, and few warps run at a time. The
forward's consumers draw while they wait for products. The backward's have no registers for it: its
producer draws, a bit for each pair. Measured (B2 H16 S8192 D128 causal): forward 1.41 ms so, 1.92
with bits from the producer; backward 3.45 ms by its consumers, 3.30 so.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton.library import philox2x32, words_of_head
from .library import count_up, finish, halves

TINY = gl.constexpr(2.0**-100)
MOST = gl.constexpr(1 - 2.0**-17)
"""The largest probability by which draws of 16 bits keep anything."""


@gluon.jit
def drop_of_head(p, head_of_batch, seed, first, KEYS_FIRST: gl.constexpr):
    """What decides which pairs of a head are kept.

    Args:
        p: With what probability a pair is dropped.
        head_of_batch: Number of the head.
        seed: A number, or where one lies.
        first: The tile's first row, a multiple of 16: of k where KEYS_FIRST, else of q.
        KEYS_FIRST: Whether rows of the tile are keys, and its columns queries.

    Returns:
        Counters of the first row and of column 0, the key, and the least draw that is kept, in the
        upper half of a word.
    """
    row_word, column_word, key = words_of_head(head_of_batch, seed)
    p = gl.minimum(gl.maximum(p, 0.0), 1.0)
    # Of 16 bits: (draw + 1/2) * 2^-16 >= p. All of it is exact.
    least = gl.minimum(gl.ceil(p * 65536.0 - 0.5), 65535.0).to(gl.uint32) << 16
    begin = (first // 2).to(gl.uint32)
    if KEYS_FIRST:
        drop = column_word + begin, row_word, key, least
    else:
        drop = row_word + begin, column_word, key, least
    return drop


@gluon.jit
def factor_of_kept(p):
    """The factor of pairs that are kept; tiny where none is: the largest draw is kept even then."""
    some = p <= MOST
    return gl.where(some, 1.0 / gl.where(some, 1.0 - gl.maximum(p, 0.0), 1.0), TINY)


@triton.constexpr_function
def layout_of_blocks(columns):
    """Where a warpgroup has those pairs of a product's tile (64, columns) that begin blocks.

    They are in the first 8 of 16 rows, and of 16 columns; of each block a thread has all four.
    """
    steps = [[0, 1]] + [[0, 8 << bit] for bit in range((columns // 16).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(steps, lanes, [[8, 0], [16, 0]], [], [32, columns // 2])


@gluon.jit
def draws_of_pairs(drop, first, zero, COLUMNS: gl.constexpr, SCORES: gl.constexpr):
    """What is drawn for each pair of a tile (64, COLUMNS) whose rows are queries.

    Args:
        drop: Of :func:`drop_of_head`, KEYS_FIRST being false.
        first: The tile's first column, a multiple of 16.
        zero: One that no compiler knows to be: draws are made before what comes next is waited for.
        COLUMNS: A power of two from 16 on.
        SCORES: Layout of the product.

    Returns:
        uint32, whose upper 16 bits are the draw.
    """
    row_begin, column_begin, key, _ = drop
    BLOCKS: gl.constexpr = layout_of_blocks(COLUMNS)
    rows = gl.arange(0, 32, layout=gl.SliceLayout(1, BLOCKS)).to(gl.uint32)
    begin = column_begin + (first // 2).to(gl.uint32)
    columns = count_up(begin, COLUMNS // 2, gl.SliceLayout(0, BLOCKS)).to(gl.uint32)
    rows, columns = gl.broadcast((row_begin + rows)[:, None], columns[None, :])
    # A word has the draws of two keys, the lower half that of the first; the second word is of the
    # second query.
    word, other = philox2x32(rows, columns, key)
    finish(word, zero)
    finish(other, zero)
    draws = gl.join(gl.join(word << 16, other << 16), gl.join(word, other))
    blocks = gl.reshape(draws, [4, 8, COLUMNS // 16, 8, 2, 2])
    whole = gl.reshape(gl.permute(blocks, (0, 4, 1, 2, 5, 3)), [64, COLUMNS])
    return gl.convert_layout(whole, SCORES, assert_trivial=True)


@gluon.jit
def keep_drawn(values, draws, drop):
    """``values``, 0 where their draws are below the least that is kept."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred kept; setp.ge.u32 kept, $2, $3; selp.f32 $0, $1, 0f00000000, kept; }",
        "=f,f,r,r",
        [values, draws, drop[3]],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def kept_bits(drop, PART: gl.constexpr, first, COLUMNS: gl.constexpr):
    """Which pairs of a tile (64, COLUMNS) are kept, whose rows are keys.

    Args:
        drop: Of :func:`drop_of_head`, KEYS_FIRST being true.
        PART: Number of 64 rows from that first row on.
        first: The tile's first column, a multiple of 16.
        COLUMNS: 64 or more, a power of two.

    Returns:
        int32 (128, COLUMNS / 64): a bit for each pair of each thread. From the lowest on: the
        second of two columns and the second of two rows, 8 apart, decide on two bits, neighbouring
        columns on one, and 16 columns on the rest.
    """
    row_begin, column_begin, key, least = drop
    BLOCKS: gl.constexpr = layout_of_blocks(COLUMNS)
    rows = 32 * PART + gl.arange(0, 32, layout=gl.SliceLayout(1, BLOCKS))
    places = gl.arange(0, COLUMNS // 2, layout=gl.SliceLayout(0, BLOCKS))
    columns = column_begin + (first // 2).to(gl.uint32) + places.to(gl.uint32)
    rows, columns = gl.broadcast((row_begin + rows.to(gl.uint32))[:, None], columns[None, :])
    word, other = philox2x32(columns, rows, key)
    bits = gl.where(word << 16 >= least, 1, 0) + gl.where(word >= least, 4, 0)
    bits += gl.where(other << 16 >= least, 2, 0)
    bits += gl.where(other >= least, 8, 0)
    bits = bits << ((places // 8 * 2 + places % 2) % 8 * 4)[None, :]
    threads = gl.reshape(bits, [4, 8, COLUMNS // 64, 4, 4, 2])
    threads = gl.reshape(gl.permute(threads, (0, 1, 4, 2, 3, 5)), [128, COLUMNS // 64, 8])
    return gl.sum(threads, 2)


@triton.constexpr_function
def layout_of_bits(words):
    """Where the threads of a warpgroup have their words."""
    return gl.BlockedLayout([1, words], [32, 1], [4, 1], [1, 0])


@triton.constexpr_function
def layout_of_pairs(words):
    """As :func:`layout_of_bits`, with the bits of each word."""
    return gl.BlockedLayout([1, words, 32], [32, 1, 1], [4, 1, 1], [2, 1, 0])


@triton.constexpr_function
def choice(negated):
    """PTX of :func:`keep` for the 32 values of one word of bits, which is the 65th operand."""
    lines = [".reg .pred kept; .reg .b32 bit; .reg .f32 other; mov.f32 other, 0f00000000;"]
    for place in range(32):
        lines += [f"and.b32 bit, $64, {1 << place:#x};", "setp.ne.u32 kept, bit, 0;"]
        lines += [f"neg.f32 other, ${32 + place};"] * negated
        lines += [f"selp.f32 ${place}, ${32 + place}, other, kept;"]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def choice_operands():
    """Constraints of :func:`choice`."""
    return ",".join(["=&f"] * 32 + ["f"] * 32 + ["r"] * 32)


@gluon.jit
def keep(tile, bits, NEGATED: gl.constexpr = False):
    """``tile``, 64 rows of a product, but 0 or negated what is dropped; from :func:`kept_bits`."""
    WORDS: gl.constexpr = bits.shape[1]
    PAIRS: gl.constexpr = layout_of_pairs(WORDS)
    blocks = gl.reshape(tile, [4, 2, 8, WORDS, 4, 2, 4, 2])
    pairs = gl.reshape(gl.permute(blocks, (0, 2, 6, 3, 4, 7, 1, 5)), [128, WORDS, 32])
    pairs = gl.convert_layout(pairs, PAIRS, assert_trivial=True)
    bits = gl.convert_layout(bits, gl.SliceLayout(2, PAIRS), assert_trivial=True)
    pairs = gl.inline_asm_elementwise(
        choice(NEGATED),
        choice_operands(),
        [pairs, gl.broadcast(pairs, bits[:, :, None])[1]],
        dtype=gl.float32,
        is_pure=True,
        pack=32,
    )
    blocks = gl.reshape(pairs, [4, 8, 4, WORDS, 4, 2, 2, 2])
    whole = gl.reshape(gl.permute(blocks, (0, 6, 1, 3, 4, 7, 2, 5)), [64, 64 * WORDS])
    return gl.convert_layout(whole, tile.type.layout, assert_trivial=True)


@gluon.jit
def halves_of_kept(weights, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Weights in HALF and in LAYOUT, 0 for those that are negative."""
    ROWS: gl.constexpr = weights.shape[0]
    COLUMNS: gl.constexpr = weights.shape[1]
    left, right = gl.split(gl.reshape(weights, [ROWS, COLUMNS // 2, 2]))
    CONVERT: gl.constexpr = (
        "cvt.rn.relu.bf16x2.f32 $0, $2, $1;"
        if gl.bfloat16 == HALF
        else "cvt.rn.relu.f16x2.f32 $0, $2, $1;"
    )
    words = gl.inline_asm_elementwise(
        CONVERT, "=r,r,r", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )
    return halves(words, HALF, LAYOUT)
