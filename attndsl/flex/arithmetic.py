"""torch's arithmetic on IR nodes: bool joins int joins float, as between 0-d tensors.

The language is stricter than torch (a bool is no number there), so that casts are written out here.
Python numbers stand for constants.

Non-goals: precision. The language has one float type; what torch rounds to halves is not rounded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attndsl.ir import DType, Node, Op, cast, const, node, reads_score
from attndsl.passes.int_ranges import ranges

if TYPE_CHECKING:
    from collections.abc import Callable

Value = Node | bool | int | float
"""A traced value, or a Python number that stands for a constant."""

_MOST_SHIFT = 63
_RANK = {DType.BOOL: 0, DType.INT: 1, DType.FLOAT: 2}
TRUE, FALSE = const(True), const(False)


def lift(value: Value) -> Node:
    """``value`` as a node."""
    if isinstance(value, Node):
        return value
    # Enums and numpy's floats are numbers of other classes.
    kind = bool if isinstance(value, bool) else int if isinstance(value, int) else float
    return const(kind(value))


def to(value: Value, dtype: DType) -> Node:
    """``value`` as ``dtype``; constants are converted here."""
    x = lift(value)
    if x.dtype is dtype:
        return x
    if x.op is Op.CONST and not isinstance(x.value, str | None):
        if dtype is DType.BOOL:
            return const(bool(x.value))
        if dtype is DType.FLOAT:
            return const(float(x.value))
        if math.isfinite(x.value):
            return const(int(x.value))
    return cast(x, dtype)


def number(value: Value) -> Node:
    """``value`` as an int where it is a bool."""
    x = lift(value)
    return to(x, DType.INT) if x.dtype is DType.BOOL else x


def floating(value: Value) -> Node:
    """``value`` as a float."""
    return to(value, DType.FLOAT)


def boolean(value: Value) -> Node:
    """Condition that ``value`` is not 0."""
    return to(value, DType.BOOL)


def join(a: Value, b: Value) -> tuple[Node, Node]:
    """``a`` and ``b`` in the higher of their types."""
    x, y = lift(a), lift(b)
    dtype = max(x.dtype, y.dtype, key=_RANK.__getitem__)
    return to(x, dtype), to(y, dtype)


def _numeric(op: Op) -> Callable[[Value, Value], Node]:
    def apply(a: Value, b: Value) -> Node:
        return node(op, *join(number(a), number(b)))

    return apply


sub = _numeric(Op.SUB)
minimum = _numeric(Op.MIN)
maximum = _numeric(Op.MAX)


def add(a: Value, b: Value) -> Node:
    """``a + b``; of two bools, whether any holds."""
    x, y = join(a, b)
    return either(x, y) if x.dtype is DType.BOOL else node(Op.ADD, x, y)


def mul(a: Value, b: Value) -> Node:
    """``a * b``; of two bools, whether both hold."""
    x, y = join(a, b)
    return both(x, y) if x.dtype is DType.BOOL else node(Op.MUL, x, y)


def floordiv(a: Value, b: Value) -> Node:
    """``a // b``, rounded down."""
    return node(Op.FLOORDIV, *join(number(a), number(b)))


def mod(a: Value, b: Value) -> Node:
    """``a % b``, with the sign of ``b``."""
    return node(Op.MOD, *join(number(a), number(b)))


def div(a: Value, b: Value, rounding_mode: str | None = None) -> Node:
    """``a / b``; rounded as torch's ``rounding_mode`` says."""
    if rounding_mode == "floor":
        return floordiv(a, b)
    if rounding_mode == "trunc":
        x, y = join(number(a), number(b))
        if x.dtype is DType.FLOAT:
            return trunc(node(Op.DIV, x, y))
        signs = node(Op.MUL, node(Op.SIGN, x), node(Op.SIGN, y))
        return node(Op.MUL, signs, node(Op.FLOORDIV, absolute(x), absolute(y)))
    return node(Op.DIV, floating(a), floating(b))


def fmod(a: Value, b: Value) -> Node:
    """The rest of a division rounded towards 0: it has the sign of ``a``."""
    x, y = join(number(a), number(b))
    if x.dtype is DType.INT:
        return node(Op.MUL, node(Op.SIGN, x), node(Op.MOD, absolute(x), absolute(y)))
    # A sign is flat at 0, where the rest's gradient is 1 as everywhere.
    minus = node(Op.NEG, node(Op.MOD, node(Op.NEG, x), absolute(y)))
    return node(Op.WHERE, node(Op.LT, x, const(0.0)), minus, node(Op.MOD, x, absolute(y)))


def power(a: Value, b: Value) -> Node:
    """``a ** b``; ints give an int, for which one of them has to be a constant.

    Raises:
        ValueError: An int power that ints of the language cannot say.
    """
    x, y = join(number(a), number(b))
    if x.dtype is DType.FLOAT:
        return node(Op.POW, x, y)
    if y.op is Op.CONST:
        if not isinstance(y.value, int) or not 0 <= y.value <= 64:
            raise ValueError(f"an int to the power of {y.value}")
        return node(Op.POW, x, y)
    if x is const(2):
        return shift(Op.SHL, 1, y)
    raise ValueError("an int to the power of an int that varies")


def negative(a: Value) -> Node:
    """``-a``."""
    x = number(a)
    if x.op is Op.CONST and not isinstance(x.value, str | None):
        return const(-x.value)
    return node(Op.NEG, x)


def absolute(a: Value) -> Node:
    """``abs(a)``."""
    return node(Op.ABS, number(a))


def sign(a: Value) -> Node:
    """-1, 0 or 1, in the type of ``a``."""
    return node(Op.SIGN, number(a))


def trunc(a: Value) -> Node:
    """``a`` rounded towards 0, in its own type."""
    x = number(a)
    if x.dtype is DType.INT:
        return x
    return where(compare("<", x, 0.0), node(Op.CEIL, x), node(Op.FLOOR, x))


def rounded(op: Op, a: Value) -> Node:
    """``floor``, ``ceil`` or ``round``; ints stay as they are."""
    x = number(a)
    return x if x.dtype is DType.INT else node(op, x)


def unary(op: Op, a: Value) -> Node:
    """A function of floats."""
    return node(op, floating(a))


def compare(op: str, a: Value, b: Value) -> Node:
    """``a op b``."""
    x, y = join(a, b)
    if x.dtype is DType.BOOL and op not in ("==", "!="):
        x, y = number(x), number(y)
    if op in (">", ">="):
        x, y = y, x
    table = {"<": Op.LT, ">": Op.LT, "<=": Op.LE, ">=": Op.LE, "==": Op.EQ, "!=": Op.NE}
    return node(table[op], x, y)


def both(a: Value, b: Value) -> Node:
    """Condition that both hold; constants are left out."""
    x, y = boolean(a), boolean(b)
    if x is FALSE or y is FALSE:
        return FALSE
    if x is TRUE:
        return y
    return x if y is TRUE else node(Op.AND, x, y)


def either(a: Value, b: Value) -> Node:
    """Condition that at least one holds; constants are left out."""
    x, y = boolean(a), boolean(b)
    if x is TRUE or y is TRUE:
        return TRUE
    if x is FALSE:
        return y
    return x if y is FALSE else node(Op.OR, x, y)


def negation(a: Value) -> Node:
    """Condition that ``a`` does not hold."""
    x = boolean(a)
    return const(x is FALSE) if x in (TRUE, FALSE) else node(Op.NOT, x)


def bitwise(op: Op, a: Value, b: Value) -> Node:
    """``a & b``, ``a | b`` or ``a ^ b``: of bools logical, of ints bit by bit.

    Raises:
        ValueError: An operand is a float.
    """
    x, y = join(a, b)
    if x.dtype is DType.BOOL:
        if op is Op.BITXOR:
            return node(Op.NE, x, y)
        return both(x, y) if op is Op.BITAND else either(x, y)
    if x.dtype is DType.FLOAT:
        raise ValueError("bits of a float")
    return node(op, x, y)


def invert(a: Value) -> Node:
    """``~a``.

    Raises:
        ValueError: ``a`` is a float.
    """
    x = lift(a)
    if x.dtype is DType.BOOL:
        return negation(x)
    if x.dtype is DType.FLOAT:
        raise ValueError("bits of a float")
    return node(Op.BITNOT, x)


def shift(op: Op, a: Value, b: Value) -> Node:
    """``a << b`` or ``a >> b``.

    Raises:
        ValueError: An operand is a float.
    """
    x, y = join(number(a), number(b))
    if x.dtype is DType.FLOAT:
        raise ValueError("bits of a float")
    # The language limits amounts to 0 ... 63. torch shifts all bits out by any other.
    low, high = ranges((y,), {}, from_zero=True)[y]
    inside = TRUE if low >= 0 else compare("<=", 0, y)
    if op is Op.SHR:
        return where(inside, node(op, x, y), node(op, x, const(_MOST_SHIFT)))
    if high > _MOST_SHIFT:
        inside = both(inside, compare("<=", y, _MOST_SHIFT))
    return where(inside, node(op, x, y), 0)


def where(condition: Value, yes: Value, no: Value) -> Node:
    """``yes`` where ``condition`` holds, else ``no``."""
    x, y = join(yes, no)
    test = boolean(condition)
    if test in (TRUE, FALSE):
        return x if test is TRUE else y
    return node(Op.WHERE, test, x, y)


def clamp(a: Value, low: Value | None = None, high: Value | None = None) -> Node:
    """``a`` within the bounds that are given.

    At a bound the whole gradient is that of ``a``, where ``maximum`` would split it. Captures begin
    at such numbers, and scores are never just there: of these passes know more as an extremum.
    """
    x = number(a)
    for bound, extreme in ((low, maximum), (high, minimum)):
        if bound is None:
            continue
        y, limit = join(x, number(bound))
        if is_extremum(y, limit):
            x = extreme(y, limit)
            continue
        beyond = node(Op.LT, *((y, limit) if extreme is maximum else (limit, y)))
        x = node(Op.WHERE, beyond, limit, y)
    return x


def is_extremum(x: Node, limit: Node) -> bool:
    """Return True if ``maximum`` or ``minimum`` bounds ``x``: ints (without gradients), scores."""
    return x.dtype is DType.INT or reads_score(x) or reads_score(limit)
