"""Device functions that generated Hopper kernels call."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ..device.library import positions
from .triton_compat import COPIES_OPERANDS


@gluon.jit
def as_block(x):
    """The argument itself: Gluon spreads a scalar to the tile that it meets."""
    return x


@gluon.jit
def spread(values, places):
    """``values`` in the shape of ``places``, which are a vector, a tile's row or its column."""
    if len(places.shape) == 1:
        found = gl.convert_layout(values, places.type.layout)
    elif places.shape[0] == 1:
        found = gl.convert_layout(values, gl.SliceLayout(0, places.type.layout))[None, :]
    else:
        found = gl.convert_layout(values, gl.SliceLayout(1, places.type.layout))[:, None]
    return found


@gluon.jit
def places_of(
    first, length, origin, KIND: gl.constexpr, NUMBER: gl.constexpr, LAYOUT: gl.constexpr
):
    """Logical positions of ``NUMBER`` rows from ``first``; each is looked up once, if at all."""
    if KIND == "index":
        rows = first + gl.arange(0, NUMBER, layout=gl.BlockedLayout([1], [32], [4], [0]))
        found = gl.convert_layout(positions(rows, length, origin, KIND), LAYOUT)
    else:
        found = count_up(positions(first, length, origin, KIND), NUMBER, LAYOUT)
    return found


@gluon.jit
def count_up(begin, NUMBER: gl.constexpr, LAYOUT: gl.constexpr):
    """``begin + (0 ... NUMBER - 1)`` in ``LAYOUT``, that of the columns of a product.

    One instruction a column, as in :func:`ramp`; of a plain range the places within the tile would
    be kept through the loop, in a register each.
    """
    EIGHTHS: gl.constexpr = gl.BlockedLayout([NUMBER // 8, 2], [8, 4], [4, 1], [1, 0])
    eighths = gl.arange(0, NUMBER // 8, layout=gl.SliceLayout(1, EIGHTHS)) * 8
    places = gl.arange(0, 8, layout=gl.SliceLayout(0, EIGHTHS))
    both = eighths[:, None] + (places + begin)[None, :]
    return gl.convert_layout(gl.reshape(both, [NUMBER]), LAYOUT)


@gluon.jit
def ramp(begin, steepness, NUMBER: gl.constexpr, LAYOUT: gl.constexpr):
    """``begin + steepness * (0 ... NUMBER - 1)`` in ``LAYOUT``, that of the columns of a product.

    A thread has two neighbours of each eight columns: as a sum of multiples of eight, which are
    constants, and of its place among eight, a column takes one instruction.
    """
    EIGHTS: gl.constexpr = gl.BlockedLayout([NUMBER // 8, 2], [8, 4], [4, 1], [1, 0])
    eighths = gl.arange(0, NUMBER // 8, layout=gl.SliceLayout(1, EIGHTS)).to(gl.float32) * 8.0
    places = gl.arange(0, 8, layout=gl.SliceLayout(0, EIGHTS)).to(gl.float32)
    both = eighths[:, None] * steepness + (places * steepness + begin)[None, :]
    return gl.convert_layout(gl.reshape(both, [NUMBER]), LAYOUT)


@gluon.jit
def ramps(begins, steepness, NUMBER: gl.constexpr, SCORES: gl.constexpr):
    """:func:`ramp` for each row of a product from its own begin."""
    ROWS: gl.constexpr = begins.shape[0]
    zeros = gl.full([ROWS, NUMBER], 0.0, gl.float32, layout=SCORES)
    EIGHTHS: gl.constexpr = gl.reshape(zeros, [ROWS, NUMBER // 8, 8]).type.layout
    PLACES: gl.constexpr = gl.SliceLayout(1, EIGHTHS)
    eighths = gl.arange(0, NUMBER // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, EIGHTHS)))
    places = gl.arange(0, 8, layout=gl.SliceLayout(0, PLACES)).to(gl.float32)
    begins = gl.convert_layout(begins, gl.SliceLayout(1, PLACES), assert_trivial=True)
    steps = (eighths.to(gl.float32) * 8.0)[None, :, None] * steepness
    both = steps + (places[None, :] * steepness + begins[:, None])[:, None, :]
    return gl.convert_layout(gl.reshape(both, [ROWS, NUMBER]), SCORES, assert_trivial=True)


@gluon.jit
def max_of_two_rows(row_max):
    """For each row of a product the larger of its value and of that 8 rows apart: one a thread.

    Rows of their own take 3% longer at D64: see M24 in docs/dev/measured.md.
    """
    ROWS: gl.constexpr = row_max.shape[0]
    pairs = gl.reshape(row_max, [ROWS // 16, 2, 8])
    both, pairs = gl.broadcast(gl.max(pairs, 1)[:, None, :], pairs)
    return gl.convert_layout(gl.reshape(both, [ROWS]), row_max.type.layout, assert_trivial=True)


@triton.constexpr_function
def mixture(number):
    """PTX of :func:`mixed_exp2` for 16 values."""
    ptx = [".reg .f32 near, whole, rest, part; .reg .b32 power;"]
    for place in range(16):
        x = f"${16 + place}"
        if place >= number:
            ptx += [f"ex2.approx.ftz.f32 ${place}, {x};"]
            continue
        ptx += [
            # 1.5 * 2^23 + 127: the lowest bits are those of the nearest integer, as an exponent.
            f"add.f32 near, {x}, 0f4B40007F;",
            "sub.f32 whole, near, 0f4B40007F;",
            f"sub.f32 rest, {x}, whole;",
            "fma.rn.f32 part, rest, 0f3D6150FD, 0f3E78062B;",
            "fma.rn.f32 part, part, rest, 0f3F317AFE;",
            "mul.f32 part, part, rest;",
            "shl.b32 power, near, 23;",
            f"fma.rn.f32 ${place}, part, power, power;",
        ]
    return "{ " + " ".join(ptx) + " }"


@triton.constexpr_function
def mixture_operands():
    """Constraints of :func:`mixture`."""
    return ",".join(["=&f"] * 16 + ["f"] * 16)


@gluon.jit
def mixed_exp2(x, NUMBER: gl.constexpr):
    """2^x where |x| < 126, with a relative error of 1.1e-4; NaN of NaN.

    NUMBER of 16 by a cubic on the multipliers' pipe, to which the other unit, that of ex2 and tanh,
    leaves room (as in FlashAttention-4, arXiv 2603.05451): the fit with the least largest error on
    [-1/2, 1/2] that is exact at 0, times a power of two.
    """
    return gl.inline_asm_elementwise(
        mixture(NUMBER), mixture_operands(), [x], dtype=gl.float32, is_pure=True, pack=16
    )


@gluon.jit
def multiply(left, right, zeros, WIDTH: gl.constexpr):
    """Begin the product of two tiles' rows, of which all columns from ``WIDTH`` on are zeros."""
    COLUMNS: gl.constexpr = left.shape[1]
    # Tiles have powers of two columns: see M72 in docs/dev/measured.md.
    HALF_WAY: gl.constexpr = COLUMNS // 2
    QUARTER: gl.constexpr = COLUMNS // 4
    if COLUMNS > 64 and WIDTH <= HALF_WAY + QUARTER:
        LAST: gl.constexpr = COLUMNS // 8 if WIDTH <= HALF_WAY + COLUMNS // 8 else QUARTER
        product = warpgroup_mma(
            left.slice(0, HALF_WAY, dim=1),
            right.slice(0, HALF_WAY, dim=1).permute((1, 0)),
            zeros,
            use_acc=False,
            is_async=True,
        )
        product = warpgroup_mma(
            left.slice(HALF_WAY, LAST, dim=1),
            right.slice(HALF_WAY, LAST, dim=1).permute((1, 0)),
            product,
            is_async=True,
        )
    else:
        product = warpgroup_mma(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return product


@gluon.jit
def column_blocks(data, stage, NUMBER: gl.constexpr, WIDTH: gl.constexpr):
    """Rows of q or k in NUMBER blocks of 64 columns; all WIDTH columns together if that is 1."""
    ROWS: gl.constexpr = data.shape[3]
    if NUMBER == 1:
        found = (data.index(stage).reshape([ROWS, WIDTH]),)
    else:
        first = stage * NUMBER
        found = (
            data.index(first).reshape([ROWS, 64]),
            data.index(first + 1).reshape([ROWS, 64]),
            data.index(first + 2).reshape([ROWS, 64]),
        )
    return found


@gluon.jit
def multiply_blocks(left, right, zeros, WIDTH: gl.constexpr):
    """Begin the product of rows that :func:`column_blocks` returns, as :func:`multiply` does."""
    if len(left) == 1:
        product = multiply(left[0], right[0], zeros, WIDTH)
    else:
        product = zeros
        for block in gl.static_range(len(left)):
            product = warpgroup_mma(
                left[block], right[block].permute((1, 0)), product, use_acc=block > 0, is_async=True
            )
    return product


@gluon.jit
def pack(tile, HALF: gl.constexpr):
    """A tile of fp32 in ``HALF``, two neighbours of a row in each 32-bit word.

    Loops carry words without a cost: of 16-bit values each takes a register, and two instructions
    a pair to get there and back.
    """
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    left, right = gl.split(gl.reshape(tile, [ROWS, COLUMNS // 2, 2]))
    CONVERT: gl.constexpr = (
        "cvt.rn.bf16x2.f32 $0, $2, $1;" if gl.bfloat16 == HALF else "cvt.rn.f16x2.f32 $0, $2, $1;"
    )
    return gl.inline_asm_elementwise(
        CONVERT, "=r,r,r", [left, right], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(words, zero, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """The tile that :func:`pack` packed, in ``LAYOUT``; no compiler knows that ``zero`` is 0."""
    if COPIES_OPERANDS:
        # Words of the product's own: of those that a loop carries, the next turn's are written
        # while the product reads them, and ptxas would wait for it (C7513). A plain copy, or a
        # zero that it can see, would be removed.
        words = words ^ zero
    return halves(words, HALF, LAYOUT)


@gluon.jit
def halves(words, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """The tile that :func:`pack` packed, in ``LAYOUT``, and in the same registers."""
    both = gl.join(words.to(gl.int16), (words >> 16).to(gl.int16))
    tile = gl.reshape(both, [words.shape[0], 2 * words.shape[1]])
    return gl.convert_layout(tile.to(HALF, bitcast=True), LAYOUT)


@gluon.jit
def widened(words, HALF: gl.constexpr, LAYOUT: gl.constexpr):
    """The tile that :func:`pack` packed, in fp32 and in ``LAYOUT``."""
    if gl.bfloat16 == HALF:
        left = (words << 16).to(gl.float32, bitcast=True)
        right = (words & -65536).to(gl.float32, bitcast=True)
    else:
        left = words.to(gl.int16).to(HALF, bitcast=True).to(gl.float32)
        right = (words >> 16).to(gl.int16).to(HALF, bitcast=True).to(gl.float32)
    tile = gl.reshape(gl.join(left, right), [words.shape[0], 2 * words.shape[1]])
    return gl.convert_layout(tile, LAYOUT)


@triton.constexpr_function
def never_stored(number):
    """PTX that stores an OR of ``number`` 32-bit operands where the next is not zero."""
    lines = [f"or.b32 any, any, ${number + place};" for place in range(1, number)]
    lines = [f"mov.b32 any, ${number};", *lines, f"and.b32 any, any, ${2 * number};"]
    lines += ["setp.ne.b32 never, any, 0;", "@never st.shared.b32 [any], any;"]
    lines += [f"mov.b32 ${place}, 0;" for place in range(number)]
    return "{ .reg .pred never; .reg .b32 any; " + " ".join(lines) + " }"


@triton.constexpr_function
def registers(number):
    """Constraints of :func:`never_stored`."""
    return ",".join(["=r"] * number + ["r"] * (2 * number))


@gluon.jit
def pin_before_wait(values, zero):
    """Compute ``values``, words or fp32, before whatever comes next is waited for.

    ptxas moves waits for products up, over arithmetic that was meant to run during the product. A
    store that depends on the arithmetic stays where it is; since ``zero`` is one that no compiler
    knows to be, it never happens.
    """
    EACH: gl.constexpr = values.shape[0] * values.shape[1] // 128
    gl.inline_asm_elementwise(
        never_stored(EACH),
        registers(EACH),
        [values, zero],
        dtype=gl.int32,
        is_pure=False,
        pack=EACH,
    )


@gluon.jit
def lazy_max(row_max, highest):
    """Maxima to subtract from now on: ``row_max`` unless a row of the warp is past that by over 8.

    Weights of at most 2^8 are as exact as those of at most 1, and sums of a row need not be scaled
    down for each small step of its maximum: conditional rescaling, as in FlashAttention-4 (arXiv
    2603.05451). Both are vectors of a product's rows, of which a thread has two.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred past; .reg .f32 bound, upper, lower;
            add.f32 bound, $2, 0f41000000;
            setp.gt.f32 past, $4, bound;
            add.f32 bound, $3, 0f41000000;
            setp.gt.or.f32 past, $5, bound, past;
            vote.sync.any.pred past, past, 0xffffffff;
            max.f32 upper, $2, $4;
            max.f32 lower, $3, $5;
            selp.f32 $0, upper, $2, past;
            selp.f32 $1, lower, $3, past;
        }
        """,
        "=&f,=&f,f,f,f,f",
        [row_max, highest],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@triton.constexpr_function
def unless_all(operation, neutral, number):
    """PTX of ``operation`` on ``number`` numbers and as many of their rows.

    Warps skip it if all of their rows' are ``neutral``, a number in hexadecimal digits.
    """
    first, next_row = 2 * number, 2 * number + 2
    lines = [
        ".reg .pred some;",
        f"setp.ne.f32 some, ${first}, 0f{neutral};",
        f"setp.ne.or.f32 some, ${next_row}, 0f{neutral}, some;",
        "vote.sync.any.pred some, some, 0xffffffff;",
        "@!some bra done;",
    ]
    lines += [f"{operation}.f32 ${place}, ${place}, ${first + place};" for place in range(number)]
    return "{ " + " ".join(lines) + " done: }"


@triton.constexpr_function
def operands_in_place(number):
    """Constraints of :func:`unless_all`."""
    return ",".join(["=f"] * number + [str(place) for place in range(number)] + ["f"] * number)


@gluon.jit
def lazy_rescale(sums, factors):
    """A product's tile times a factor for each row; warps whose factors are 1 skip it."""
    EACH: gl.constexpr = sums.shape[0] * sums.shape[1] // 128
    return gl.inline_asm_elementwise(
        unless_all("mul", "3F800000", EACH),
        operands_in_place(EACH),
        [sums, gl.broadcast(sums, factors[:, None])[1]],
        dtype=gl.float32,
        is_pure=True,
        pack=EACH,
    )


@gluon.jit
def lazy_difference(scores, shifts):
    """A product's tile less a number for each row; warps whose numbers are 0 skip it."""
    EACH: gl.constexpr = scores.shape[0] * scores.shape[1] // 128
    return gl.inline_asm_elementwise(
        unless_all("sub", "00000000", EACH),
        operands_in_place(EACH),
        [scores, gl.broadcast(scores, shifts[:, None])[1]],
        dtype=gl.float32,
        is_pure=True,
        pack=EACH,
    )


@triton.constexpr_function
def shifting(number):
    """PTX of :func:`lazy_shift` for ``number`` elements, those of a thread."""
    rest, place, factor = (f"${part * number}" for part in (2, 3, 4))
    lines = [
        ".reg .pred far; .reg .f32 one, other, inverse, mark; .reg .b32 lane; .reg .b64 own;",
        f"setp.ge.f32 far, {rest}, 0f457A0000;",
        f"setp.lt.and.f32 far, {rest}, 0f46000000, far;",
        "@!far bra.uni near;",
        "mov.u32 lane, %laneid; and.b32 lane, lane, 3; mul.wide.u32 own, lane, 8;",
        f"add.s64 own, own, {place};",
        f"rcp.approx.f32 inverse, {factor};",
        # 4096 by what it is multiplied with after this: ``factor`` * log2(e).
        "mul.f32 mark, inverse, 0f45317218;",
    ]
    for eighth in range(number // 4):
        lines.append(f"ld.global.v2.f32 {{one, other}}, [own + {32 * eighth}];")
        lines.append("neg.f32 one, one; neg.f32 other, other;")
        for place_of_four, shift in enumerate(("one", "other", "one", "other")):
            element = f"${4 * eighth + place_of_four}"
            lines.append(f"fma.rn.f32 {element}, {element}, {factor}, {shift};")
            lines.append(f"fma.rn.f32 {element}, {element}, inverse, mark;")
    return "{ " + " ".join(lines) + " near: }"


@triton.constexpr_function
def shifting_operands(number):
    """Constraints of :func:`shifting`."""
    tied = [str(place) for place in range(number)]
    return ",".join([*["=f"] * number, *tied, *["f"] * number, *["l"] * number, *["f"] * number])


@gluon.jit
def lazy_shift(scores, rests, shifts, factor):
    """Scores (keys, queries) of which the rests in base 2 may be taken off, times ``factor``.

    Rests of 4096 and more mark queries whose log-sum-exps are far from 0, see ``row_statistics``:
    all of 64, or none. Their shifts, which lie at ``shifts``, are taken off here, with one
    rounding, and what marks them is added.
    """
    EACH: gl.constexpr = scores.shape[0] * scores.shape[1] // 128
    places = gl.zeros_like(scores).to(gl.int64) + shifts.to(gl.int64)
    return gl.inline_asm_elementwise(
        shifting(EACH),
        shifting_operands(EACH),
        [scores, gl.broadcast(scores, rests[None, :])[1], places, gl.zeros_like(scores) + factor],
        dtype=gl.float32,
        is_pure=False,
        pack=EACH,
    )


@gluon.jit
def partial_row_sums(tile):
    """Eight sums a row of a product's tile: each thread's own need no exchange."""
    return gl.sum(gl.reshape(tile, [tile.shape[0], tile.shape[1] // 8, 8]), 1)


@gluon.jit
def fold_partials(eighths):
    """Four sums a row from eight: each thread's two become one."""
    return gl.sum(gl.reshape(eighths, [eighths.shape[0], 4, 2]), 2)


@gluon.jit
def sync_consumers():
    """Wait until both consumer warpgroups are here (named barrier 9)."""
    in_each_thread("bar.sync 9, 256")


@gluon.jit
def await_written():
    """Wait until what this warpgroup has stored from shared memory is there, not just read."""
    in_each_thread("cp.async.bulk.wait_group 0")


@gluon.jit
def signal_p():
    """Say that what was stored before may be read (named barrier 10), and go on."""
    in_each_thread("bar.arrive 10, 256")


@gluon.jit
def wait_for_p():
    """Wait until the other consumer warpgroup has called :func:`signal_p` as often."""
    in_each_thread("bar.sync 10, 256")


@gluon.jit
def in_each_thread(INSTRUCTION: gl.constexpr):
    """An instruction, once in each of the 128 threads of a warpgroup: one element a thread."""
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    nothing = gl.full([128], 0, gl.int32, layout=THREADS)
    gl.inline_asm_elementwise(
        "{ " + INSTRUCTION + "; mov.b32 $0, $1; }", "=r,r", [nothing], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def await_turn(count, turn):
    """Wait until ``count``, an int32 in global memory, is ``turn``.

    Each thread reads it, with acquire semantics at the GPU's scope.
    """
    THREADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    turns = gl.full([128], turn, gl.int32, layout=THREADS)
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred early; .reg .b32 found;
            again: ld.acquire.gpu.global.b32 found, [$1];
            setp.lt.s32 early, found, $2;
            @early bra again;
            mov.b32 $0, found;
        }
        """,
        "=r,l,r", [count.to(gl.int64), turns], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def count_turn(count):
    """Add 1 to ``count``, an int32 in global memory, with release semantics at the GPU's scope."""
    threads = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(
        """
        {
            .reg .pred first;
            setp.eq.s32 first, $2, 0;
            @first red.release.gpu.global.add.u32 [$1], 1;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r", [count.to(gl.int64), threads], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_to_sums(base, tile):
    """Add a product's tile (64 rows, columns) of fp32 to sums in global memory.

    Sums lie in the order in which the threads of a warpgroup hold them, so that each thread adds 16
    bytes at a time and a warp 512 in a row: blocks of 64 rows and 8 columns, side by side, of which
    each is (4 warps, 8 rows of a warp's 16, 4 pairs of columns, 2 halves of its rows, 2 columns of
    a pair). ``sums.dq_from_sums`` reads them. The bytes take the time: see M77 in
    docs/dev/measured.md.
    """
    LAYOUT: gl.constexpr = tile.type.layout
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, tile.shape[1], layout=gl.SliceLayout(0, LAYOUT))
    of_row = (row // 16) * 128 + (row % 8) * 16 + (row % 16 // 8) * 2
    of_column = (column // 8) * 512 + (column % 8 // 2) * 4 + column % 2
    pointers = (base + of_row[:, None]) + of_column[None, :]
    gl.inline_asm_elementwise(
        """
        red.relaxed.gpu.global.add.v4.f32 [$4], {$8, $9, $10, $11};
        mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;
        """,
        "=r,=r,=r,=r,l,l,l,l,f,f,f,f",
        [pointers.to(gl.int64), tile],
        dtype=gl.int32,
        is_pure=False,
        pack=4,
    )
