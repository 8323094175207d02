"""Which pairs of a product's tile dropout keeps, each thread for the pairs that it holds."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..triton.library import philox2x32, words_of_head
from .library import count_up, finish, halves

TINY = gl.constexpr(2.0**-100)


@gluon.jit
def drop_of_head(p, head_of_batch, seed, first, KEYS_FIRST: gl.constexpr):
    """What decides which pairs of a head are kept, and the factor of those that are.

    Args:
        p: With what probability the head drops a pair.
        head_of_batch: Its number.
        seed: A number, or where one lies.
        first: The tile's first row, a multiple of 16: of k where KEYS_FIRST, else of q.
        KEYS_FIRST: Whether rows of the tile are keys, and its columns queries.

    Returns:
        Counters of the first row and of column 0, the key, and the least draw that is kept, in the
        upper half of a word; and the factor, which is tiny where nothing is kept: draws of 16 bits
        keep one pair of 65536 still.
    """
    row_word, column_word, key = words_of_head(head_of_batch, seed)
    p = gl.minimum(gl.maximum(p, 0.0), 1.0)
    # Of 16 bits: (draw + 1/2) * 2^-16 >= p. All of it is exact.
    least = gl.minimum(gl.ceil(p * 65536.0 - 0.5), 65535.0).to(gl.uint32) << 16
    factor = gl.where(p < 1.0, 1.0 / gl.where(p < 1.0, 1.0 - p, 1.0), TINY)
    begin = (first // 2).to(gl.uint32)
    if KEYS_FIRST:
        drop = column_word + begin, row_word, key, least
    else:
        drop = row_word + begin, column_word, key, least
    return drop, factor


@triton.constexpr_function
def layout_of_blocks(columns):
    """Where a warpgroup has those pairs of a product's tile (64, columns) that begin blocks.

    They are in the first 8 of 16 rows, and of 16 columns; of each block a thread has all four.
    """
    steps = [[0, 1]] + [[0, 8 << bit] for bit in range((columns // 16).bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(steps, lanes, [[8, 0], [16, 0]], [], [32, columns // 2])


@gluon.jit
def draws_of_pairs(
    drop, first, zero, COLUMNS: gl.constexpr, SCORES: gl.constexpr, KEYS_FIRST: gl.constexpr
):
    """What is drawn for each pair of a tile (64, COLUMNS), as ``backends.philox`` lays it out.

    Args:
        drop: Of :func:`drop_of_head`, as KEYS_FIRST.
        first: The tile's first column, a multiple of 16.
        zero: One that no compiler knows to be: draws are made before what comes next is waited for.
        COLUMNS: A power of two from 16 on.
        SCORES: Layout of the product.
        KEYS_FIRST: Whether rows of the tile are keys, and its columns queries.

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
    if KEYS_FIRST:
        word, other = philox2x32(columns, rows, key)
    else:
        word, other = philox2x32(rows, columns, key)
    finish(word, zero)
    finish(other, zero)
    if KEYS_FIRST:
        draws = gl.join(gl.join(word << 16, word), gl.join(other << 16, other))
    else:
        draws = gl.join(gl.join(word << 16, other << 16), gl.join(word, other))
    blocks = gl.reshape(draws, [4, 8, COLUMNS // 16, 8, 2, 2])
    whole = gl.reshape(gl.permute(blocks, (0, 4, 1, 2, 5, 3)), [64, COLUMNS])
    return gl.convert_layout(whole, SCORES, assert_trivial=True)


@gluon.jit
def keep(values, draws, drop):
    """``values``, 0 where they are dropped."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred kept; setp.ge.u32 kept, $2, $3; selp.f32 $0, $1, 0f00000000, kept; }",
        "=f,f,r,r",
        [values, draws, drop[3]],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def negate_dropped(weights, draws, drop):
    """Weights, none of which is negative, negated where they are dropped."""
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred kept; .reg .f32 less;
            neg.f32 less, $1;
            setp.ge.u32 kept, $2, $3;
            selp.f32 $0, $1, less, kept;
        }
        """,
        "=f,f,r,r",
        [weights, draws, drop[3]],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def halves_of_kept(weights, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """Signed weights in HALF and in LAYOUT, 0 for what is negative."""
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
