"""Sums along the diagonals of tiles of dS, by one warpgroup, while others compute the next.

A warp has 64 keys and 32 queries, in squares of 8 by 8. Squares on one diagonal of squares are
added up first, in registers; then the pairs of each sum along their own diagonals. Both are
products with constants on tensor cores, which take one instruction where bf16 would be unpacked and
added in eight: what a producer issues, consumers cannot. Few squares are held at a time, since a
producer has few registers.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

STEPS = gl.constexpr(8)
"""Squares of a warp along its keys."""


@triton.constexpr_function
def layout_of_rows():
    """Layout of (halves of the keys, 1, 8 keys, 64 queries) in a warpgroup."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 16], [0, 0, 0, 8]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        [[0, 0, 0, 32], [1, 0, 0, 0]],
        [],
        [2, 1, 8, 64],
    )


@triton.constexpr_function
def layout_of_squares():
    """Layout of one square of each warp, (halves of the keys, of the queries, 8, 8)."""
    return gl.DistributedLinearLayout(
        [[0, 0, 0, 1]],
        [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]],
        [[0, 1, 0, 0], [1, 0, 0, 0]],
        [],
        [2, 2, 8, 8],
    )


@gluon.jit
def along(AXIS: gl.constexpr, NUMBER: gl.constexpr):
    """``0 ... NUMBER - 1`` along an axis of :func:`layout_of_squares`."""
    SQUARES: gl.constexpr = layout_of_squares()
    LAST: gl.constexpr = gl.SliceLayout(3 if AXIS < 3 else 2, SQUARES)
    MIDDLE: gl.constexpr = gl.SliceLayout(2 if AXIS < 2 else 1, LAST)
    found = gl.arange(0, NUMBER, layout=gl.SliceLayout(1 if AXIS < 1 else 0, MIDDLE))
    if AXIS == 1:
        found = found[None, :, None, None]
    elif AXIS == 2:
        found = found[None, None, :, None]
    else:
        found = found[None, None, None, :]
    return found


@gluon.jit
def as_square(values):
    """``values`` in :func:`layout_of_squares`, which threads have already."""
    return gl.convert_layout(values, layout_of_squares(), assert_trivial=True)


@gluon.jit
def load_squares(rows, STEP: gl.constexpr):
    """The four squares of each warp's keys number ``STEP``, from the first queries on."""
    held = rows.slice(STEP, 1, dim=1).load(layout_of_rows())
    squares = gl.permute(gl.reshape(held, [2, 8, 2, 2, 2, 8]), (0, 2, 1, 5, 3, 4))
    even, odd = gl.split(squares)
    square0, square2 = gl.split(even)
    square1, square3 = gl.split(odd)
    return as_square(square0), as_square(square1), as_square(square2), as_square(square3)


@gluon.jit
def add_squares(sum0, sum1, square0, square1, unit):
    """``sum0 + square0, sum1 + square1``: squares in bf16, times the matrix ``unit``."""
    return gl.inline_asm_elementwise(
        """
        mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32
            {$0, $1, $2, $3}, {$8, $9}, {$10}, {$4, $5, $6, $7};
        """,
        "=f,=f,=f,=f,0,1,2,3,r,r,r",
        [sum0, sum1, square0, square1, unit],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=2,
    )


@triton.constexpr_function
def adding_columns(line):
    """PTX of :func:`add_columns`.

    Row y of the turned square has the element of row (s - y) mod 8 in column s. A row of ones among
    zeros adds up its columns into that row of the lines. Elements of fp32 are multiplied as two of
    bf16, together as exact as 2^-17.
    """
    return f"""
    {{
        .reg .b32 lane, source, left, right, both, high0, high1, upper, lower; .reg .pred here;
        mov.u32 lane, %laneid;
        and.b32 source, lane, 3; mul.lo.u32 source, source, 10; sub.u32 source, source, lane;
        shfl.sync.idx.b32 left, $8, source, 31, 0xffffffff;
        add.u32 source, source, 4;
        shfl.sync.idx.b32 right, $9, source, 31, 0xffffffff;
        setp.eq.s32 here, $10, {line}; selp.b32 upper, 0x3f803f80, 0, here;
        setp.eq.s32 here, $10, {line - 8}; selp.b32 lower, 0x3f803f80, 0, here;
        cvt.rn.bf16x2.f32 both, right, left;
        mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32
            {{$0, $1, $2, $3}}, {{upper, lower}}, {{both}}, {{$4, $5, $6, $7}};
        shl.b32 high0, both, 16; and.b32 high1, both, 0xffff0000;
        sub.f32 left, left, high0; sub.f32 right, right, high1;
        cvt.rn.bf16x2.f32 both, right, left;
        mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32
            {{$0, $1, $2, $3}}, {{upper, lower}}, {{both}}, {{$0, $1, $2, $3}};
    }}
    """


@gluon.jit
def add_columns(upper, lower, square, row, LINE: gl.constexpr):
    """Lines with the sums of a square's turned columns added in the one where ``row`` is ``LINE``.

    Args:
        upper: The first eight lines of eight sums.
        lower: The next eight, ``row`` less 8.
        square: fp32.
        row: int32, what each row of ``upper`` is called.
        LINE: Which one gets the sums.
    """
    return gl.inline_asm_elementwise(
        adding_columns(LINE),
        "=f,=f,=f,=f,0,1,2,3,f,f,r,r",
        [upper, lower, square, row],
        dtype=(gl.float32, gl.float32),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def sums_of_warps(tile, PART: gl.constexpr, lines_s):
    """Store sums along diagonals of the queries number ``PART``, apart for each warp's pairs.

    ``lines_s`` (halves of the keys, of the queries, 128) are of query less key, the one counted
    from the first of the part, the other from that of the half: from -64 on.
    """
    first, second = along(2, 8), along(3, 8)
    nothing = gl.zeros([2, 2, 8, 8], gl.float32, layout=layout_of_squares())
    unit = gl.where(first == second, nothing + 1.0, nothing).to(gl.bfloat16)
    # The second half of the queries begins four lines later.
    row, _ = gl.broadcast(first - 4 * along(1, 2), nothing)
    rows = tile.reshape([2, STEPS, 8, tile.shape[1]]).slice(64 * PART, 64, dim=3)
    upper, lower = nothing, nothing
    # Of four diagonals of squares, of which each step begins one and ends one.
    sum0, sum1, sum2, sum3, before = nothing, nothing, nothing, nothing, nothing
    for step in gl.static_range(STEPS + 4):
        sum0, sum1, sum2, sum3 = nothing, sum0, sum1, sum2
        if step < STEPS:
            square0, square1, square2, square3 = load_squares(rows, step)
            # In this order, what the next step adds to lies side by side as it is.
            sum0, sum2 = add_squares(sum0, sum2, square0, square2, unit)
            sum1, sum3 = add_squares(sum1, sum3, square1, square3, unit)
        # Diagonals below a square's own are those above its neighbour's.
        square = gl.where(first > second, before, sum3)
        upper, lower = add_columns(upper, lower, square, row, STEPS + 3 - step)
        before = sum3
    lines_s.slice(0, 64, dim=2).store(gl.reshape(upper, [2, 2, 64]))
    lines_s.slice(64, 64, dim=2).store(gl.reshape(lower, [2, 2, 64]))


@gluon.jit
def sums_of_half(lines_s, HALF: gl.constexpr, FIRST: gl.constexpr):
    """64 sums from ``FIRST`` on, of one half of the keys."""
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 2, 1], [1, 1, 32], [1, 1, 4], [2, 1, 0])
    both = lines_s.slice(HALF, 1, dim=0).slice(FIRST, 64, dim=2).load(PAIRS)
    whole = gl.reshape(gl.sum(both, 1), [64])
    return gl.convert_layout(whole, gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def add_diagonals(SUMS, tile, PART: gl.constexpr, lines_s):
    """Add sums along diagonals of a tile's queries number ``PART``, 64 of them, to those in memory.

    Each sum is added to by one thread, whichever tile along the queries it comes from, and one
    thread's additions to an address are made in its order.

    Args:
        SUMS: Of query less key, from minus the number of keys on; 64 more than that are added to.
        tile: (128 keys, 64 or 128 queries) in shared memory, bf16.
        PART: Which queries.
        lines_s: (2, 2, 128) fp32 of shared memory.
    """
    sums_of_warps(tile, PART, lines_s)
    places = gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    begin = sums_of_half(lines_s, 1, 0)
    middle = sums_of_half(lines_s, 1, 64) + sums_of_half(lines_s, 0, 0)
    end = sums_of_half(lines_s, 0, 64)
    gl.atomic_add(SUMS + places, begin, sem="relaxed")
    gl.atomic_add(SUMS + (places + 64), middle, sem="relaxed")
    gl.atomic_add(SUMS + (places + 128), end, sem="relaxed")
