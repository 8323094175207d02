"""Device functions that generated kernels call: tiles, positions, and functions Triton lacks.

All floats are fp32. Functions that libdevice has are written out here where the interpreter needs
them too, so that one text runs on every target.
"""

import triton
import triton.language as tl

from attndsl.backends.device.records import Head, LogSum, Operands, Rows, Shift

from ..log_sum import FAR
from .trigonometry import cos as cos
from .trigonometry import cos_cody_waite as cos_cody_waite
from .trigonometry import sin as sin
from .trigonometry import sin_cody_waite as sin_cody_waite
from .trigonometry import tan as tan
from .trigonometry import tan_cody_waite as tan_cody_waite

LOG2E = tl.constexpr(1.4426950408889634)
MARK = tl.constexpr(4096.0)
NEAR = tl.constexpr(FAR)
TOO_FAR = tl.constexpr(2.0**23)
STATISTICS_PADDING = tl.constexpr(128)


@triton.jit
def place_of_item(item, tiles, heads, together, GROUPED: tl.constexpr, DESCENDING: tl.constexpr):
    """Tile, and head of ``heads``: where GROUPED, ``together`` heads at a time, tile by tile.

    The longest tiles come first. They are the last ones where DESCENDING. Groups are counted from
    the last item on: if heads are not a multiple of ``together``, the first group has fewer heads.
    The last group must be full, so that its longest tiles start early.
    """
    if GROUPED:
        rest = tiles * heads - 1 - item
        group = rest // (tiles * together)
        within = rest - group * (tiles * together)
        size = tl.minimum(together, heads - group * together)
        tile = within // size
        head = group * together + within % size
    else:
        tile = tiles - 1 - item % tiles
        head = item // tiles
    if not DESCENDING:
        tile = tiles - 1 - tile
    return tile, head


@triton.jit
def head_of(head_of_batch, sizes):
    """The query head number ``head_of_batch`` of all batch entries."""
    b = head_of_batch // sizes.heads
    h = head_of_batch % sizes.heads
    return Head(b, h, h // (sizes.heads // sizes.kv_heads))


@triton.jit
def rows_of(tensor, b, h):
    """The rows that a tensor has of batch entry ``b`` and its head ``h``."""
    return Rows(tensor.base + b * tensor.stride_b + h * tensor.stride_h, tensor.stride_n)


@triton.jit
def head_of_result(tensor, b, h, WIDTH: tl.constexpr):
    """Pointer to a head of a result, whose strides count rows of WIDTH elements."""
    return tensor.base + (b * tensor.stride_b + h * tensor.stride_h) * WIDTH


@triton.jit
def rows_of_result(tensor, b, h, WIDTH: tl.constexpr):
    """:func:`rows_of` of a result whose strides count rows of WIDTH elements."""
    return Rows(head_of_result(tensor, b, h, WIDTH), tensor.stride_n * WIDTH)


@triton.jit
def operands_of(operands, head):
    """The rows that a head has of each tensor of ``operands``."""
    return Operands(
        rows_of(operands.q, head.b, head.h),
        rows_of(operands.k, head.b, head.hkv),
        rows_of(operands.v, head.b, head.hkv),
        rows_of(operands.do, head.b, head.h),
        operands.lse,
        operands.delta,
    )


@triton.jit
def with_statistics(operands, head_of_batch, sizes):
    """``operands`` with the statistics of head number ``head_of_batch`` alone.

    The ``LogSum`` (2, batch, heads, q_len) is contiguous, delta padded (:func:`statistics_rows`).
    """
    return Operands(
        operands.q,
        operands.k,
        operands.v,
        operands.do,
        operands.lse + head_of_batch.to(tl.int64) * sizes.q_len,
        operands.delta + statistics_rows(head_of_batch, sizes.q_len),
    )


@triton.jit
def plane_of(sizes):
    """Offset of the rests of a ``LogSum`` behind the shifts in (2, batch, heads, q_len)."""
    return (tl.full([], 0, tl.int64) + sizes.batch) * sizes.heads * sizes.q_len


@triton.jit
def store_log_sum(LSE, line, lse, sizes, exist):
    """Store the ``LogSum`` of rows at ``line`` of (batch, heads, q_len); near 0, as one number."""
    whole = lse.shift + lse.rest
    near = tl.abs(whole) <= NEAR
    tl.store(LSE + line, tl.where(near, whole, lse.shift), mask=exist)
    tl.store(LSE + plane_of(sizes) + line, tl.where(near, 0.0, lse.rest), mask=exist)


@triton.jit
def load_log_sum(LSE, line, plane, exist):
    """The ``LogSum`` of rows, rests in base 2; rows with no live pair have weights of 0 by it."""
    shift = tl.load(LSE + line, mask=exist, other=float("-inf"))
    rest = tl.load(LSE + plane + line, mask=exist, other=0.0)
    return LogSum(tl.where(shift == float("-inf"), float("inf"), shift), rest * LOG2E)


@triton.jit
def load_tile(
    matrix,
    first,
    length,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    CHECKED: tl.constexpr,
):
    """Rows ``first ... first + BLOCK`` of a matrix (length, WIDTH).

    Zeros beyond WIDTH, and beyond ``length`` where CHECKED. The tile's base is a 64-bit address;
    offsets within the tile are as wide as the row stride.
    """
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_WIDTH)
    stride = matrix.stride
    pointers = (matrix.base + first.to(tl.int64) * stride) + (
        rows[:, None] * stride + columns[None, :]
    )
    if CHECKED:
        inside = (first + rows < length)[:, None]
        if WIDTH != BLOCK_WIDTH:
            inside = inside & (columns < WIDTH)[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)
    elif WIDTH != BLOCK_WIDTH:
        tile = tl.load(pointers, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def store_tile(
    matrix, first, length, tile, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    """Store ``tile`` into rows ``first ... first + BLOCK`` of a matrix (length, WIDTH)."""
    rows = tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_WIDTH)
    stride = matrix.stride
    pointers = (matrix.base + first.to(tl.int64) * stride) + (
        rows[:, None] * stride + columns[None, :]
    )
    inside = (first + rows < length)[:, None] & (columns < WIDTH)[None, :]
    tl.store(pointers, tile.to(matrix.base.dtype.element_ty), mask=inside)


@triton.jit
def positions(index, length, origin, KIND: tl.constexpr):
    """Logical positions (int32) of rows ``index``: by an offset, a 0-d tensor of one, or a map."""
    if KIND == "index":
        found = tl.load(origin + index, mask=index < length, other=0).to(tl.int32)
    elif KIND == "tensor":
        found = index + tl.load(origin).to(tl.int32)
    else:
        found = index + origin
    return found


@triton.jit
def shift_of_positions(origin, KIND: tl.constexpr):
    """Logical position of row 0 where positions are rows plus an offset; 0 for a map."""
    if KIND == "index":
        shift = 0
    elif KIND == "tensor":
        shift = tl.load(origin).to(tl.int32)
    else:
        shift = origin
    return shift


@triton.jit
def shift_of(origins, Q_KIND: tl.constexpr, KV_KIND: tl.constexpr):
    """Logical positions of row 0 and of key 0."""
    return Shift(shift_of_positions(origins.q, Q_KIND), shift_of_positions(origins.kv, KV_KIND))


@triton.jit
def dot(a, b, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """``a @ b`` in fp32; UPCAST where the interpreter's half-precision product is wrong."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_add(a, b, total, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """``total + a @ b``."""
    if UPCAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def is_finite(tile):
    """Tell whether all elements of a tile are finite."""
    return tl.sum(tl.sum(not_finite(tile), 1), 0) == 0


@triton.jit
def is_number(x):
    """Tell whether ``x`` is neither NaN nor infinite."""
    return tl.abs(x) < float("inf")


@triton.jit
def not_finite(tile):
    """1 for each element that is NaN or infinite, 0 for others."""
    return tl.where(is_number(tile.to(tl.float32)), 0, 1)


@triton.jit
def for_live_pairs(weights, live, rows):
    """``weights`` (n, m) and ``rows`` (m, width) whose product takes NaN to live pairs alone.

    Rows that are not finite are zeros then, and the weights of their live pairs NaN.
    """
    wrong = tl.sum(not_finite(rows), 1) > 0
    weights = tl.where(live & wrong[None, :], float("nan"), weights)
    return weights, tl.where(wrong[:, None], tl.zeros_like(rows), rows)


@triton.jit
def saturated(x):
    """The number of 32 bits that is nearest to an integer of 64."""
    return tl.minimum(tl.maximum(x, -2147483648), 2147483647).to(tl.int32)


@triton.jit
def as_block(x):
    """A scalar as a (1, 1) tile; a tile as it is."""
    return x + tl.zeros([1, 1], tl.int32).to(x.dtype)


@triton.jit
def load_of_blocks(row, kv, first, count, step, SIZE: tl.constexpr):
    """Elements of a tile's rows at ``row``, of which keys ``kv`` have one for each block of SIZE.

    The tile's first key is a multiple of its number of keys, which is a power of two, and so is
    SIZE. ``count`` blocks are ``step`` apart; later ones are the last. See M74 in
    docs/dev/measured.md.
    """
    KEYS: tl.constexpr = kv.shape[0] * kv.shape[1]
    found = tl.load(row + tl.minimum(first // SIZE, count - 1) * step)
    for block in tl.static_range(1, KEYS // SIZE):
        more = tl.load(row + tl.minimum(first // SIZE + block, count - 1) * step)
        found = tl.where(kv >= first + block * SIZE, more, found)
    return found


@triton.jit
def int_floordiv(a, b):
    """Quotient rounded down, as in Python; 0 where the divisor is 0."""
    divisor = tl.where(b == 0, 1, b)
    quotient = a // divisor
    remainder = a - quotient * divisor
    rounded_up = (remainder != 0) & ((remainder < 0) != (divisor < 0))
    quotient = tl.where(rounded_up, quotient - 1, quotient)
    return tl.where(b == 0, 0, quotient)


@triton.jit
def int_mod(a, b):
    """Remainder with the divisor's sign, as in Python; 0 where the divisor is 0."""
    divisor = tl.where(b == 0, 1, b)
    remainder = a % divisor
    wrong_sign = (remainder != 0) & ((remainder < 0) != (divisor < 0))
    remainder = tl.where(wrong_sign, remainder + divisor, remainder)
    return tl.where(b == 0, 0, remainder)


@triton.jit
def float_floordiv(a, b):
    """``floor(a / b)``."""
    return tl.floor(a / b)


@triton.jit
def float_mod(a, b):
    """``a - floor(a / b) * b``."""
    return a - tl.floor(a / b) * b


@triton.jit
def sign(x):
    """-1, 0 or 1 in the type of ``x``."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def round_half_even(x):
    """Nearest integer, ties to even: adding 1.5 * 2**23 leaves no room for a fraction."""
    rounded = (x + 12582912.0) - 12582912.0
    return tl.where(tl.abs(x) < 4194304.0, rounded, x)


@triton.jit
def relu(x):
    """``max(x, 0)``; NaN stays NaN."""
    return tl.where(x <= 0.0, 0.0, x)


@triton.jit
def silu(x):
    """``x * sigmoid(x)``."""
    return x * tl.sigmoid(x)


@triton.jit
def gelu(x):
    """``x * (1 + erf(x / sqrt(2))) / 2``."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def tanh(x):
    """Hyperbolic tangent: an odd polynomial near 0, where the quotient would cancel."""
    square = x * x
    near = 2.1869488536155203e-2
    near = near * square - 5.3968253968253968e-2
    near = near * square + 1.3333333333333333e-1
    near = near * square - 3.3333333333333333e-1
    near = near * square * x + x
    decay = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def tanh_approx(x):
    """Hyperbolic tangent by one instruction: relative error 2^-11, subnormals kept.

    Source: PTX ISA, ``tanh`` (sm_75 and later). N. Juffa measured 1.1e-5 on Turing (NVIDIA
    developer forum, thread 173291), which nobody promises of others.
    """
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def reciprocal_approx(x):
    """``1 / x`` within one unit in the last place; 0 where that is subnormal.

    Source: PTX ISA, ``rcp.approx.ftz.f32``. A division would scale its operands first, for divisors
    whose reciprocal is subnormal.
    """
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def exp_ex2(x):
    """``exp(x)``, 0 where that is subnormal: ``tl.exp`` scales its operand for those."""
    return tl.exp2(x * LOG2E)


@triton.jit
def tanh_ex2(x):
    """``1 - 2 / (1 + exp(2 |x|))`` with the sign of ``x``; ``x - x^3 / 3`` near 0.

    Where exp overflows, the reciprocal is 0 and the result 1. The quotient's error is absolute,
    3e-7, but a soft cap multiplies by the cap what it has divided by it: the series near 0 keeps
    the relative error below 2^-17. Its next term is 2 / 15 x^4 of the result, 2.1e-6 at 1 / 16.
    """
    size = tl.abs(x)
    far = 1.0 - 2.0 * reciprocal_approx(1.0 + tl.exp2(2.885390081777927 * size))
    near = x - x * (x * x) * 0.3333333333333333
    return tl.where(size < 0.0625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def sigmoid_approx(x):
    """``(1 + tanh(x / 2)) / 2``: absolute error 2^-12."""
    return 0.5 * tanh_approx(0.5 * x) + 0.5


@triton.jit
def sigmoid_ex2(x):
    """``1 / (1 + exp(-x))``; where exp overflows, the reciprocal is 0."""
    return reciprocal_approx(1.0 + tl.exp2(x * -LOG2E))


@triton.jit
def silu_approx(x):
    """``x * sigmoid(x)``."""
    return x * sigmoid_approx(x)


@triton.jit
def silu_ex2(x):
    """``x * sigmoid(x)``."""
    return x * sigmoid_ex2(x)


@triton.jit
def log1p(x):
    """``log(1 + x)`` without loss near 0.

    Source: D. Goldberg, What every computer scientist should know about floating-point
    arithmetic, 1991, theorem 4.
    """
    above = 1.0 + x
    corrected = tl.log(above) * (x / tl.where(above == 1.0, 1.0, above - 1.0))
    return tl.where(above == 1.0, x, tl.where(above == float("inf"), above, corrected))


@triton.jit
def expm1(x):
    """``exp(x) - 1``: a polynomial near 0, where the difference would cancel."""
    near = 1.0 / 5040.0
    near = near * x + 1.0 / 720.0
    near = near * x + 1.0 / 120.0
    near = near * x + 1.0 / 24.0
    near = near * x + 1.0 / 6.0
    near = near * x + 0.5
    near = near * x * x + x
    return tl.where(tl.abs(x) < 0.35, near, tl.exp(x) - 1.0)


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``, without overflow."""
    return tl.where(x > 0.0, x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def power(base, exponent):
    """``base ** exponent``: NaN for a negative base and a fractional exponent; 1 for exponent 0.

    An infinite base is as good as a positive one there, as in ``pow`` of IEEE 754. Unlike there, -0
    is 0: its odd negative powers are positive.
    """
    size = tl.exp2(exponent * tl.log2(tl.abs(base)))
    whole = tl.floor(exponent) == exponent
    # Half of a whole number is exact.
    odd = whole & (tl.floor(0.5 * exponent) != 0.5 * exponent)
    signed = tl.where(odd, -size, size)
    result = tl.where((base < 0.0) & (base > float("-inf")), float("nan"), size)
    result = tl.where((base < 0.0) & whole, signed, result)
    return tl.where((exponent == 0.0) | (base == 1.0), 1.0, result)


@triton.jit
def fractional_power(base, exponent):
    """:func:`power` for an exponent that is no whole number."""
    base = tl.where(base == float("-inf"), float("inf"), base)
    return tl.exp2(exponent * tl.log2(base))


@triton.jit
def finite_size(x):
    """``abs(x)``, 0 where that is not finite."""
    size = tl.abs(x)
    return tl.where(size < float("inf"), size, 0.0)


@triton.jit
def raise_bound(BOUND, sizes):
    """Make the fp32 number whose bits are at BOUND the greatest of itself and ``sizes``, none < 0.

    Bits of such numbers are ordered as they are, and a maximum is the same in any order.
    """
    bits = sizes.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(BOUND, tl.max(bits, 0), sem="relaxed")


@triton.jit
def exact_parts(part, SCALE):
    """Finite parts times the fp64 power of two at SCALE, rounded to int64; 0 for others."""
    kept = tl.where(tl.abs(part) < float("inf"), part, 0.0)
    return tl.floor(kept.to(tl.float64) * tl.load(SCALE) + 0.5).to(tl.int64)


@triton.jit
def add_exactly(SUMS, place, exact):
    """Add integers at the places: the sum is the same in any order."""
    places = place + tl.zeros(exact.shape, tl.int32)
    tl.atomic_add(SUMS + places, exact, mask=exact != 0, sem="relaxed")


@triton.jit
def note_infinities(NOTES, place, part):
    """Note at the places which parts are inf (1), -inf (2) or NaN (4)."""
    note = tl.where(part == float("inf"), 1, tl.where(part == float("-inf"), 2, 0))
    note = tl.where(part != part, 4, note)
    places = place + tl.zeros(part.shape, tl.int32)
    tl.atomic_or(NOTES + places, note, mask=note != 0, sem="relaxed")


@triton.jit
def statistics_rows(head_of_batch, q_len):
    """Index of a head's first row in LSE_SHIFT, LSE_REST and DELTA.

    Heads are padded to whole tiles there, so that tiles load them without a mask: a masked load
    with a value other than zero cannot be asynchronous.
    """
    return head_of_batch.to(tl.int64) * (tl.cdiv(q_len, STATISTICS_PADDING) * STATISTICS_PADDING)


@triton.jit
def row_statistics(
    OUT,
    DOUT,
    LSE,
    DLSE,
    LSE_SHIFT,
    LSE_REST,
    DELTA,
    stride_ob,
    stride_oh,
    stride_om,
    stride_gb,
    stride_gh,
    stride_gm,
    heads,
    q_len,
    DV: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    FAR: tl.constexpr,
):
    """Per query row: the parts of its ``LogSum``, and DELTA.

    LSE (2, batch, heads, q_len) and DLSE (batch, heads, q_len) are contiguous fp32; the others
    likewise, with the rows of a head padded (:func:`statistics_rows`) by rows with no live pair.
    If FAR is not 0, shifts are part of the rests. But if one of the program's ROWS is so FAR from
    0, all rests have MARK added instead; or, if FAR is negative, rows too far for it are NaN.
    """
    q_tiles = tl.cdiv(q_len, STATISTICS_PADDING) * (STATISTICS_PADDING // ROWS)
    first = (tl.program_id(0) % q_tiles) * ROWS
    head_of_batch = tl.program_id(0) // q_tiles
    b = head_of_batch // heads
    h = head_of_batch % heads
    rows = first + tl.arange(0, ROWS)
    out_head = Rows(OUT + b * stride_ob + h * stride_oh, stride_om)
    dout_head = Rows(DOUT + b * stride_gb + h * stride_gh, stride_gm)
    out = load_tile(out_head, first, q_len, DV, ROWS, BLOCK_DV, True)
    dout = load_tile(dout_head, first, q_len, DV, ROWS, BLOCK_DV, True)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    row = head_of_batch.to(tl.int64) * q_len + rows
    # The program's number is that of a tile, of a head, of a batch entry.
    plane = (tl.num_programs(0) // q_tiles).to(tl.int64) * q_len
    shift, rest = load_log_sum(LSE, row, plane, rows < q_len)
    if HAS_DLSE:
        delta -= tl.load(DLSE + row, mask=rows < q_len, other=0.0)
    empty = shift == float("inf")
    padded_row = statistics_rows(head_of_batch, q_len) + rows
    if FAR > 0:
        sizes = tl.where(empty, 0.0, tl.abs(shift))
        far = tl.max(tl.where(sizes <= FAR, 0, 1), 0) == 1
        rest += tl.where(far, MARK, shift * LOG2E)
    elif FAR < 0:
        too_far = (tl.abs(shift) > TOO_FAR) & (tl.abs(shift) < float("inf"))
        rest += tl.where(too_far, float("nan"), shift * LOG2E)
    tl.store(LSE_SHIFT + padded_row, shift)
    tl.store(LSE_REST + padded_row, rest)
    tl.store(DELTA + padded_row, tl.where(empty, 0.0, delta))
