"""Sine, cosine and tangent in fp32, without a branch and for arguments of any size.

``tl.sin`` puts libdevice's function into a kernel for each element that a thread holds, with a loop
for large arguments in each. Compilers then take minutes for a kernel with some of them.

An argument of any size is reduced by the method of M. H. Payne and R. N. Hanek, "Radian reduction
for trigonometric functions", SIGNUM Newsletter 18 (1983): of the product with 2 / pi, only those
bits are computed that say where in the full turn it lies.

``..._cody_waite`` are for arguments up to 1e5 (:mod:`attndsl.passes.trig_ranges`). A sine takes 34
PTX instructions in place of 58 (sm_90, Triton 3.9): multiples of pi / 2 in three parts are
subtracted (W. J. Cody and W. Waite, "Software manual for the elementary functions", 1980, chapter
8). Each step is a fused multiply and add. So the first one is exact, and each later one errs by a
rounding of what is left, however near 0 that is. What the parts leave of pi / 2 is 1e-22, which a
multiple up to 1e5 makes 7e-18.

Largest errors against fp64 in units of the fp32 result's last place, at 4 million arguments spread
evenly over exponents from 2^-20 on. Up to 1.05e5 the three fp32 numbers nearest to each multiple of
pi / 2 are among them, where results are small: there 62 bits behind the point leave fewer digits.

========================  ====  ====  ====  ==================
reduction and arguments    sin   cos   tan  absolute, sin, cos
========================  ====  ====  ====  ==================
Cody-Waite to 1.05e5       1.5   1.5   3.5  8.2e-8
Payne-Hanek to 1.05e5      291  2016  1574  1.1e-7
Payne-Hanek to 3.4e38      415    82   415  1.1e-7
========================  ====  ====  ====  ==================
"""

import triton
import triton.language as tl

# Bits 32 i ... 32 i + 63 of 2 / pi with 32 zeros before its binary fraction, and the 32 after them.
BITS0 = tl.constexpr(0x00000000A2F9836E)
BITS1 = tl.constexpr(0xA2F9836E4E441529)
BITS2 = tl.constexpr(0x4E441529FC2757D1)
BITS3 = tl.constexpr(0xFC2757D1F534DDC0)
BITS4 = tl.constexpr(0xF534DDC0DB629599)
NEXT0 = tl.constexpr(0x4E441529)
NEXT1 = tl.constexpr(0xFC2757D1)
NEXT2 = tl.constexpr(0xF534DDC0)
NEXT3 = tl.constexpr(0xDB629599)
NEXT4 = tl.constexpr(0x3C439041)

TWO_OVER_PI = tl.constexpr(0.6366197466850281)
# Three fp32 numbers whose sum is pi / 2, with the sign changed.
MINUS_HIGH = tl.constexpr(-1.570796251296997)
MINUS_MIDDLE = tl.constexpr(-7.549789415861596e-08)
MINUS_LOW = tl.constexpr(-5.390302953474238e-15)
# 1.5 * 2^23: a sum with a small number is rounded to a whole one, which its lowest bits hold.
ROUNDER = tl.constexpr(12582912.0)
# Whether the functions below are those of the interpreter: the variable that says so is read when
# they are decorated.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def reduced(size):
    """``size - k * pi / 2`` within pi / 4 of 0, and ``k`` modulo 4, for ``size`` >= 0."""
    bits = size.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x7FFFFF) | 0x800000).to(tl.uint64)
    # ``size`` is ``mantissa`` times 2 to the power of ``(bits >> 23) - 150``.
    place = tl.maximum((bits >> 23) - 120, 0)
    word = place >> 5
    zero = mantissa * 0
    window = tl.where(word == 0, zero + BITS0, zero + BITS1)
    window = tl.where(word == 2, zero + BITS2, window)
    window = tl.where(word == 3, zero + BITS3, window)
    window = tl.where(word == 4, zero + BITS4, window)
    after = tl.where(word == 0, zero + NEXT0, zero + NEXT1)
    after = tl.where(word == 2, zero + NEXT2, after)
    after = tl.where(word == 3, zero + NEXT3, after)
    after = tl.where(word == 4, zero + NEXT4, after)
    shift = (place & 31).to(tl.uint64)
    window = (window << shift) | (after >> (32 - shift))
    # Quarters of a turn, with 62 bits behind the point; whole turns overflow.
    turn = mantissa * window
    quarter = (turn + 0x2000000000000000) >> 62
    rest = (turn - (quarter << 62)).to(tl.int64, bitcast=True)
    angle = rest.to(tl.float32) * 3.4061215800865545e-19
    # Near 0 the bits do not suffice, and nothing is to be reduced. NaN and inf come out as NaN.
    near = size < 0.7853981633974483
    angle = tl.where(size < float("inf"), angle, float("nan"))
    angle = tl.where(near, size, angle)
    return angle, tl.where(near, 0, quarter.to(tl.int32))


@triton.jit
def sine_near_zero(angle):
    """Taylor's polynomial of the sine to the 9th power: within 3e-9 for angles up to pi / 4."""
    square = angle * angle
    series = 2.7557319223985893e-6 * square - 1.9841269841269841e-4
    series = series * square + 8.3333333333333333e-3
    series = series * square - 1.6666666666666667e-1
    return series * square * angle + angle


@triton.jit
def cosine_near_zero(angle):
    """Taylor's polynomial of the cosine to the 10th power: within 2e-10 for such angles."""
    square = angle * angle
    series = -2.7557319223985888e-7 * square + 2.4801587301587302e-5
    series = series * square - 1.3888888888888889e-3
    series = series * square + 4.1666666666666667e-2
    series = series * square - 0.5
    return series * square + 1.0


@triton.jit
def sin(x):
    """Sine."""
    angle, quarter = reduced(tl.abs(x))
    size = tl.where((quarter & 1) == 0, sine_near_zero(angle), cosine_near_zero(angle))
    return tl.where(((quarter & 2) != 0) != (x < 0.0), -size, size)


@triton.jit
def cos(x):
    """Cosine."""
    angle, quarter = reduced(tl.abs(x))
    size = tl.where((quarter & 1) == 0, cosine_near_zero(angle), sine_near_zero(angle))
    return tl.where(((quarter + 1) & 2) != 0, -size, size)


@triton.jit
def tan(x):
    """Tangent."""
    angle, quarter = reduced(tl.abs(x))
    sine, cosine = sine_near_zero(angle), cosine_near_zero(angle)
    even = (quarter & 1) == 0
    size = tl.where(even, sine, -cosine) / tl.where(even, cosine, sine)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def fused(a, b, c):
    """``a * b + c``, rounded once. Not all versions of the interpreter do that themselves."""
    return (a.to(tl.float64) * b + c).to(tl.float32) if INTERPRETED else tl.fma(a, b, c)


@triton.jit
def reduced_cody_waite(x):
    """``x - k * pi / 2`` within pi / 4 of 0, and a number whose two lowest bits are those of ``k``.

    For ``x`` up to 1e5 in size. NaN stays NaN.
    """
    rounded = fused(x, TWO_OVER_PI, ROUNDER)
    quarters = rounded - ROUNDER
    angle = fused(quarters, MINUS_HIGH, x)
    angle = fused(quarters, MINUS_MIDDLE, angle)
    angle = fused(quarters, MINUS_LOW, angle)
    return angle, rounded.to(tl.int32, bitcast=True)


@triton.jit
def sin_cody_waite(x):
    """Sine of ``x`` up to 1e5 in size."""
    angle, quarter = reduced_cody_waite(x)
    size = tl.where((quarter & 1) == 0, sine_near_zero(angle), cosine_near_zero(angle))
    return tl.where((quarter & 2) != 0, -size, size)


@triton.jit
def cos_cody_waite(x):
    """Cosine of ``x`` up to 1e5 in size."""
    angle, quarter = reduced_cody_waite(x)
    size = tl.where((quarter & 1) == 0, cosine_near_zero(angle), sine_near_zero(angle))
    return tl.where(((quarter + 1) & 2) != 0, -size, size)


@triton.jit
def tan_cody_waite(x):
    """Tangent of ``x`` up to 1e5 in size."""
    angle, quarter = reduced_cody_waite(x)
    sine, cosine = sine_near_zero(angle), cosine_near_zero(angle)
    even = (quarter & 1) == 0
    return tl.where(even, sine, -cosine) / tl.where(even, cosine, sine)
