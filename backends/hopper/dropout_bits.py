"""Pairs of a product's tile that dropout keeps: drawn by a producer, a bit for each pair.

A draw takes seven rounds. Each round needs the one before, and running products hold up its
multiplications. Consumers that draw get nothing else done while the products of a tile run. A
producer has the time: see M12 in docs/dev/measured.md.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..device.dropout_tile import lower_planes, refined
from .library import halves

TINY = gl.constexpr(2.0**-100)


@gluon.jit
def factor_of_kept(p):
    """The factor of pairs that are kept; tiny where none is, since backwards divide by it."""
    return gl.where(p < 1.0, 1.0 / gl.where(p < 1.0, 1.0 - gl.maximum(p, 0.0), 1.0), TINY)


@gluon.jit
def philox4x32(c0, c1, c2, c3):
    """Draw words by Philox as the portable kernels do, with one instruction for each product.

    LLVM must not know what is added: it would widen the exclusive ors, and then multiply 64 bits.
    """
    hidden = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [0], dtype=gl.uint32, is_pure=True, pack=1
    )
    for turn in gl.static_range(7):
        product0 = c0.to(gl.uint64) * 0xD2511F53
        product1 = c2.to(gl.uint64) * 0xCD9E8D57
        key0, key1 = turn * 0x9E3779B9 & 0xFFFFFFFF, turn * 0xBB67AE85 & 0xFFFFFFFF
        c0 = (product1 >> 32).to(gl.uint32) ^ c1 ^ (hidden + key0)
        c2 = (product0 >> 32).to(gl.uint32) ^ c3 ^ (hidden + key1)
        c1, c3 = product1.to(gl.uint32), product0.to(gl.uint32)
    return c0, c1, c2, c3


@gluon.jit
def kept_words(drop, rows, keys):
    """The bits of blocks' pairs, uint32, as ``backends.philox`` has them: 1 for those to keep.

    Args:
        drop: Of :func:`~..device.dropout_tile.drop_of_head`.
        rows: Places of rows, uint32.
        keys: Places of keys, uint32; tiles of both that broadcast to that of the blocks.
    """
    row_word, key_word, word2, word3, begin, fraction, least = drop
    spread = (begin + rows * 0xC13FA9A9) + keys * 0x91E10DA5
    kept = gl.where(spread < fraction, 0, -1).to(gl.uint32)
    words = philox4x32(rows + row_word, keys + key_word, word2, word3)
    return refined(refined(kept, lower_planes(words), 0, least), words, 4, least)


@triton.constexpr_function
def layout_of_row_blocks():
    """Layout in a warpgroup of the blocks of 64 rows and 128 keys: places of rows, and of keys.

    A thread has all pairs of its two blocks in the tile of a product whose rows are queries.
    """
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1]], lanes, [[8, 0], [16, 0]], [], [32, 8])


@gluon.jit
def keep_of_rows(
    memory, slot, drop, first_row, first_column, PARTS: gl.constexpr, COLUMNS: gl.constexpr
):
    """Say which pairs of a tile are kept, for consumers of 64 rows each, which are queries.

    Args:
        memory: int32 (slots, 128, 2) in shared memory: the bits of two neighbouring columns'
            pairs, for each thread. Of 64 columns they are the upper four bits of each byte.
        slot: Number of the first consumer's.
        drop: As of :func:`kept_words`.
        first_row: The tile's, a multiple of 16.
        first_column: The tile's, a multiple of COLUMNS.
        PARTS: Number of consumers.
        COLUMNS: 64 or 128.
    """
    BLOCKS: gl.constexpr = layout_of_row_blocks()
    rows = gl.arange(0, 32, layout=gl.SliceLayout(1, BLOCKS)).to(gl.uint32)
    keys = gl.arange(0, 8, layout=gl.SliceLayout(0, BLOCKS)).to(gl.uint32)
    keys = (first_column // 128 * 8).to(gl.uint32) + keys
    for part in gl.static_range(PARTS):
        own = (first_row // 2 + part * 32).to(gl.uint32) + rows
        kept = kept_words(drop, own[:, None], keys[None, :])
        if COLUMNS == 64:
            kept = kept << (4 - first_column % 128 // 16).to(gl.uint32)
        memory.index(slot + part).store(gl.reshape(kept, [128, 2]).to(gl.int32))


@triton.constexpr_function
def layout_of_row_bits(columns):
    """Layout of the bits from :func:`keep_of_rows`: each thread holds those of its own pairs."""
    return gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0])


@triton.constexpr_function
def masking():
    """PTX that zeroes halves of 16 packed words: two rows, four eights of columns, 32 columns.

    Operands from the 33rd on are the first column's bits, from the 49th on the second's. ``prmt``
    makes two bytes of each byte's sign.
    """
    lines = [".reg .b32 mask; .reg .b32 left<4>; .reg .b32 right<4>;"]
    for place in range(4):
        lines += [f"shl.b32 left{place}, $32, {3 - place};"]
        lines += [f"shl.b32 right{place}, $48, {3 - place};"]
    for place in range(16):
        row, byte, half = place % 2, place // 2 % 4, place // 8
        low, high, sign = 8 + byte, 12 + byte, 2 * half + row
        selected = high << 12 | high << 8 | low << 4 | low
        lines += [
            f"prmt.b32 mask, left{sign}, right{sign}, {selected:#x};",
            f"and.b32 ${place}, ${16 + place}, mask;",
        ]
    return "{ " + " ".join(lines) + " }"


@triton.constexpr_function
def masking_operands():
    """Constraints of :func:`masking`."""
    return ",".join(["=&r"] * 16 + ["r"] * 48)


@gluon.jit
def keep_packed(weights, kept):
    """Weights of :func:`~.library.pack`, 0 where :func:`keep_of_rows` said to drop them."""
    left, right = gl.split(kept)
    return gl.inline_asm_elementwise(
        masking(),
        masking_operands(),
        [weights, of_packed(left, weights), of_packed(right, weights)],
        dtype=gl.int32,
        is_pure=True,
        pack=16,
    )


@gluon.jit
def of_packed(bits, weights):
    """Threads' words for each of their packed weights; of 128 columns the first 64's come first."""
    GROUPS: gl.constexpr = weights.shape[1] // 32
    bits = gl.reshape(gl.join(bits << 4, bits) if GROUPS == 2 else bits, [4, 8, 4, GROUPS])
    for _ in gl.static_range(4):
        bits = gl.join(bits, bits)
    bits = gl.reshape(gl.permute(bits, (0, 4, 1, 3, 5, 6, 7, 2)), [64, 32 * GROUPS])
    return gl.convert_layout(bits, weights.type.layout, assert_trivial=True)


@triton.constexpr_function
def layout_of_key_blocks(columns):
    """Layout in a warpgroup of the blocks of 128 keys and ``columns`` rows of q.

    Blocks are (places of keys, 16 rows, places of these); each warp has 16 rows, whose pairs are
    those of all eight warps that take the product of keys and queries.
    """
    steps = [[0, 0, 1]] + [[0, 4 << bit, 0] for bit in range((columns // 64).bit_length() - 1)]
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(
        steps, lanes, [[0, 1, 0], [0, 2, 0]], [], [8, columns // 16, 8]
    )


@gluon.jit
def keep_of_keys(
    memory, slot, drop, first_row, first_column, PARTS: gl.constexpr, COLUMNS: gl.constexpr
):
    """Say which pairs of a tile are kept, for two consumers of 64 rows each, which are keys.

    Args:
        memory: int8 (slots, 128, COLUMNS / 16) in shared memory: a bit for each pair that a thread
            has of 16 columns. From the lowest on: the second of two columns and of two rows, 8
            apart, and neighbouring columns.
        slot: Number of the first consumer's.
        drop: As of :func:`kept_words`.
        first_row: The tile's, a multiple of 128.
        first_column: The tile's, a multiple of 16.
        PARTS: 2.
        COLUMNS: 64 or more, a power of two.
    """
    BLOCKS: gl.constexpr = layout_of_key_blocks(COLUMNS)
    PAIRS: gl.constexpr = gl.SliceLayout(2, BLOCKS)
    keys = gl.arange(0, 8, layout=gl.SliceLayout(1, PAIRS)).to(gl.uint32)
    keys = (first_row // 16).to(gl.uint32) + keys
    groups = gl.arange(0, COLUMNS // 16, layout=gl.SliceLayout(0, PAIRS)).to(gl.uint32)
    places = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, BLOCKS))).to(gl.uint32)
    places = (first_column // 2).to(gl.uint32) + places
    rows = groups[None, :][:, :, None] * 8 + places[None, :][:, None, :]
    kept = kept_words(drop, rows, keys[:, None][:, :, None])
    left, right = gl.split(gl.reshape(kept, [8, COLUMNS // 16, 4, 2]))
    # A byte has 16 keys of each consumer: of four bits that are its own two are of one warp.
    parts = gl.join(left & 0x0F0F0F0F, left >> 4 & 0x0F0F0F0F)
    parts |= gl.join(right << 4 & 0xF0F0F0F0, right & 0xF0F0F0F0)
    bits = gl.join(parts & 0x33333333, parts >> 2 & 0x33333333)
    bits |= bits >> 6
    bits = gl.permute(gl.join(bits, bits >> 16).to(gl.int8), (4, 5, 0, 2, 1, 3))
    first, second = gl.split(gl.reshape(bits, [128, COLUMNS // 16, PARTS]))
    memory.index(slot).store(first)
    memory.index(slot + 1).store(second)


@triton.constexpr_function
def layout_of_key_bits(columns):
    """Layout of the bits from :func:`keep_of_keys`: each thread holds those of its own pairs."""
    return gl.BlockedLayout([1, columns // 16], [32, 1], [4, 1], [1, 0])


@triton.constexpr_function
def layout_of_pairs(words):
    """Layout of :func:`layout_of_key_bits`, with a dim for the 32 bits of each four bytes."""
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
    """``tile``, 64 rows of a product, but 0 or negated what :func:`keep_of_keys` said to drop."""
    WORDS: gl.constexpr = bits.shape[1] // 4
    PAIRS: gl.constexpr = layout_of_pairs(WORDS)
    blocks = gl.reshape(tile, [4, 2, 8, WORDS, 4, 2, 4, 2])
    pairs = gl.reshape(gl.permute(blocks, (0, 2, 6, 3, 4, 7, 1, 5)), [128, WORDS, 32])
    pairs = gl.convert_layout(pairs, PAIRS, assert_trivial=True)
    # Four bytes are in one register.
    words = gl.inline_asm_elementwise(
        "mov.b32 $0, $4; mov.b32 $1, $4; mov.b32 $2, $4; mov.b32 $3, $4;",
        "=r,=r,=r,=r,r",
        [bits],
        dtype=gl.int32,
        is_pure=True,
        pack=4,
    )
    words, _ = gl.split(gl.reshape(words, [128, WORDS, 2, 2]))
    words, _ = gl.split(words)
    words = gl.convert_layout(words, gl.SliceLayout(2, PAIRS), assert_trivial=True)
    pairs = gl.inline_asm_elementwise(
        choice(NEGATED),
        choice_operands(),
        [pairs, gl.broadcast(pairs, words[:, :, None])[1]],
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
