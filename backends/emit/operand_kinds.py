"""Facts of each printed operand beside its text: its kind, and the width of an int.

Triton treats Python numbers, scalars and blocks differently, and ints of 32 and of 64 bits too. So
each operand says what it is, and the printer converts where an operation asks for another.
"""

from __future__ import annotations

import enum
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attndsl.ir import DType, Op
from attndsl.passes.evaluate import apply
from attndsl.passes.int_ranges import fits

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.passes.evaluate import Value

ATOM, UNARY, PRODUCT, SUM, SHIFT, AND, XOR, OR, COMPARE = range(9, 0, -1)
"""Binding strengths of texts: the greater, the tighter."""

INFIX = {
    Op.ADD: ("+", SUM),
    Op.SUB: ("-", SUM),
    Op.MUL: ("*", PRODUCT),
    Op.DIV: ("/", PRODUCT),
    Op.BITAND: ("&", AND),
    Op.BITOR: ("|", OR),
    Op.BITXOR: ("^", XOR),
    Op.AND: ("&", AND),
    Op.OR: ("|", OR),
    Op.LT: ("<", COMPARE),
    Op.LE: ("<=", COMPARE),
    Op.EQ: ("==", COMPARE),
    Op.NE: ("!=", COMPARE),
}
"""Operations that Triton has a symbol for, and how tightly it binds."""
_MOST_PRODUCTS = 16
"""The largest power of a float that is made of products: each rounds, and errors add up."""
_LEAST_NORMAL, _GREATEST = 2.0**-126, (2.0 - 2.0**-23) * 2.0**127
_UNKNOWN = frozenset({Op.VAR, Op.PARAM, Op.SCORE, Op.LOAD, Op.DOT, Op.SIZE})


class OperandKind(enum.IntEnum):
    """Kind of a text to Triton; an operation's result is of the highest of its operands."""

    NUMBER = 0
    """A Python number."""
    SCALAR = 1
    """A Triton value without dims."""
    BLOCK = 2
    """A Triton value with the dims of a tile, each of full size or 1."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A printed expression."""

    text: str
    level: int
    """Binding strength of the text: ``ATOM`` ... ``COMPARE``."""
    kind: OperandKind
    bits: int = 32
    """Width of an int: 32 or 64."""


def known_value(item: Node, head_dim: int, known: dict[Node, Value]) -> Value | None:
    """The value of an expression that is the same in all calls of a kernel, or None.

    Args:
        item: The expression.
        head_dim: That of q and k, which a kernel is generated for.
        known: The values of its operands, as far as they are known.
    """
    if item.op is Op.CONST:
        assert isinstance(item.value, bool | int | float)
        return item.value
    if item.op is Op.SIZE and item.value == "head_dim":
        return head_dim
    if item.op is Op.POW and known.get(item.args[1]) == 0:
        return 1 if item.dtype is DType.INT else 1.0
    if item.op in _UNKNOWN or any(arg not in known for arg in item.args):
        return None
    return apply(item, [known[arg] for arg in item.args])


def number(value: Value, shape: str) -> Operand:
    """A known value; ``shape`` is that of constants which have to be Triton's."""
    if isinstance(value, bool):
        kind = OperandKind.SCALAR if shape == "[]" else OperandKind.BLOCK
        return Operand(f"tl.full({shape}, {value}, tl.int1)", ATOM, kind)
    if isinstance(value, int):
        if not fits((value, value)):
            return Operand(f"tl.full([], {value}, tl.int64)", ATOM, OperandKind.SCALAR, 64)
        return Operand(str(value), ATOM if value >= 0 else UNARY, OperandKind.NUMBER)
    if not math.isfinite(value):
        return Operand(f'float("{value}")', ATOM, OperandKind.NUMBER)
    if not is_normal(value):
        return Operand(f"tl.full([], {value!r}, tl.float32)", ATOM, OperandKind.SCALAR)
    return Operand(
        repr(value), UNARY if math.copysign(1.0, value) < 0 else ATOM, OperandKind.NUMBER
    )


def is_small_power(exponent: float) -> bool:
    """Return True if a power is made of products, of a root or of a reciprocal."""
    return exponent == 0.5 or (exponent.is_integer() and 0 < abs(exponent) <= _MOST_PRODUCTS)


def has_fraction(value: float) -> bool:
    """Return True if ``value``, rounded to 32 bits, is finite and no whole number."""
    if not abs(value) < 2.0**23:
        return False
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return not rounded.is_integer()


def is_normal(value: float) -> bool:
    """Return True if Triton takes a Python float for one of 32 bits rather than of 64."""
    return value == 0.0 or _LEAST_NORMAL <= abs(value) <= _GREATEST
