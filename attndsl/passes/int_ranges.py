"""Ranges of integer expressions, so that a kernel computes in 32 bits wherever that is exact.

Interval arithmetic over the DAG, rounded outwards. Positions and sizes are taken to be below 2**30
in magnitude, which the runtime checks at the call; a looked-up or passed integer has the range of
its own width.

Non-goals: relations between names (``kv < kv_len`` is not known), ranges of floats.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from attndsl.ir import DType, Op, toposort

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl.ir import Node

Range = tuple[int, int]
"""Lowest and highest value, both included."""

POSITION_LIMIT = 1 << 30
"""Logical positions and sizes are below this in magnitude."""
_HIGHEST = POSITION_LIMIT - 1
_KERNEL_RANGES: dict[str, Range] = {
    "$tile": (0, POSITION_LIMIT // 16),
    "$tiles": (0, POSITION_LIMIT // 16),
    "$whole": (0, POSITION_LIMIT // 16),
    "$origin": (-_HIGHEST, _HIGHEST),
    **{
        f"${name}_{end}": (-_HIGHEST, _HIGHEST)
        for name in ("q", "kv")
        for end in ("low", "high", "offset")
    },
}
"""Params of the tile plan (:mod:`attndsl.passes.tiles.tile_plan`, ``sets``, ``intervals``)."""
INT32: Range = (-(1 << 31), (1 << 31) - 1)
INT64: Range = (-(1 << 63), (1 << 63) - 1)


def range_of_bits(bits: int) -> Range:
    """Range of a signed integer of ``bits`` bits."""
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def fits(found: Range, limits: Range = INT32) -> bool:
    """Return True if ``found`` lies within ``limits``."""
    return limits[0] <= found[0] and found[1] <= limits[1]


def ranges(
    roots: tuple[Node, ...],
    bits: Mapping[str, int],
    from_zero: bool = False,
    known: Mapping[str, Range] | None = None,
) -> dict[Node, Range]:
    """The range of every INT node below ``roots``.

    Args:
        roots: Expressions.
        bits: Width of each int tensor and int param by name; 64 where missing.
        from_zero: Whether logical positions are row numbers, which are not negative.
        known: Ranges of variables, sizes, tensors and params that are known better, by name.
    """
    found: dict[Node, Range] = {}
    for item in toposort(*roots):
        if item.dtype is DType.INT:
            exact = exact_range(item, found, bits)
            if from_zero and item.op is Op.VAR:
                exact = 0, _HIGHEST
            if known and item.op in (Op.VAR, Op.SIZE, Op.LOAD, Op.PARAM):
                exact = known.get(str(item.value), exact)
            # 64-bit arithmetic wraps: beyond it nothing is known.
            found[item] = exact if fits(exact, INT64) else INT64
    return found


def exact_range(
    item: Node, found: Mapping[Node, Range], bits: Mapping[str, int] = MappingProxyType({})
) -> Range:
    """The range of an INT node before it wraps; a power that is too large has that of 64 bits.

    Args:
        item: The node.
        found: Ranges of its INT operands.
        bits: As in :func:`ranges`.
    """
    if item.op is Op.CONST:
        value = int(item.value)  # type: ignore[arg-type]
        return value, value
    if item.op is Op.VAR:
        return (-_HIGHEST, _HIGHEST) if item.value in ("q", "kv") else (0, _HIGHEST)
    if item.op is Op.SIZE:
        return (1 if item.value in ("heads", "kv_heads", "head_dim") else 0), _HIGHEST
    if item.value in _KERNEL_RANGES and item.op is Op.PARAM:
        return _KERNEL_RANGES[str(item.value)]
    if item.op in (Op.PARAM, Op.LOAD):
        return range_of_bits(bits.get(str(item.value), 64))
    if item.op is Op.CAST:
        return (0, 1) if item.args[0].dtype is DType.BOOL else INT64
    rule = _RULES.get(item.op)
    operands = [found[arg] for arg in item.args if arg.dtype is DType.INT]
    return rule(*operands) if rule else INT64


def _corners(a: Range, b: Range, combine: Callable[[int, int], int]) -> Range:
    values = [combine(x, y) for x in a for y in b]
    return min(values), max(values)


def _floordiv(a: Range, b: Range) -> Range:
    # The quotient is largest in magnitude at the divisors nearest 0; a divisor of 0 gives 0.
    divisors = {d for d in (b[0], b[1], -1, 1) if d != 0 and b[0] <= d <= b[1]}
    values = [x // d for x in a for d in divisors] + [0]
    return min(values), max(values)


def _mod(a: Range, b: Range) -> Range:
    low, high = min(b[0] + 1, 0), max(b[1] - 1, 0)
    if a[0] >= 0 and b[0] > 0:
        high = min(high, a[1])
    return low, high


def _abs(a: Range) -> Range:
    return (0 if a[0] <= 0 <= a[1] else min(abs(a[0]), abs(a[1]))), max(abs(a[0]), abs(a[1]))


def _bitand(a: Range, b: Range) -> Range:
    non_negative = [r[1] for r in (a, b) if r[0] >= 0]
    return (0, min(non_negative)) if non_negative else _bits_hull(a, b)


def _bits_hull(a: Range, b: Range) -> Range:
    top = max(abs(a[0]), abs(a[1]), abs(b[0]), abs(b[1])).bit_length()
    return (0 if a[0] >= 0 and b[0] >= 0 else -(1 << top)), (1 << top) - 1


def _shl(a: Range, b: Range) -> Range:
    low, high = max(0, min(b[0], 63)), max(0, min(b[1], 63))
    return _corners(a, (low, high), lambda x, y: x << y)


def _shr(a: Range, b: Range) -> Range:
    low, high = max(0, min(b[0], 63)), max(0, min(b[1], 63))
    return _corners(a, (low, high), lambda x, y: x >> y)


def _pow(a: Range, b: Range) -> Range:
    top = max(abs(a[0]), abs(a[1]))
    if b[1] > 64 or top.bit_length() * b[1] > 64:
        return INT64
    return (0 if a[0] >= 0 else -(top ** b[1])), max(1, top ** b[1])


_RULES: dict[Op, Callable[..., Range]] = {
    Op.ADD: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    Op.SUB: lambda a, b: (a[0] - b[1], a[1] - b[0]),
    Op.MUL: lambda a, b: _corners(a, b, lambda x, y: x * y),
    Op.NEG: lambda a: (-a[1], -a[0]),
    Op.FLOORDIV: _floordiv,
    Op.MOD: _mod,
    Op.MIN: lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    Op.MAX: lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    Op.ABS: _abs,
    Op.SIGN: lambda a: (max(-1, min(1, a[0])), max(-1, min(1, a[1]))),
    Op.BITAND: _bitand,
    Op.BITOR: _bits_hull,
    Op.BITXOR: _bits_hull,
    Op.BITNOT: lambda a: (~a[1], ~a[0]),
    Op.SHL: _shl,
    Op.SHR: _shr,
    Op.POW: _pow,
    Op.WHERE: lambda a, b: (min(a[0], b[0]), max(a[1], b[1])),
}
