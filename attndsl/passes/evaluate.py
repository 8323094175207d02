"""Scalar evaluation of expressions: the meaning of each op on Python numbers.

Ints are 64-bit and wrap; floats are IEEE doubles, so that nothing raises: the root of -1 is NaN,
the logarithm of 0 is -inf.

Non-goals: speed, arrays, captured tensors other than through a callable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attndsl.ir import DType, Node, Op, sides, toposort

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Value = bool | int | float
_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class Environment:
    """Values of leaves."""

    names: Mapping[str, Value] = field(default_factory=dict)
    """Values by the name of a variable, size or param; the raw score is ``score``."""
    load: Callable[[str, tuple[int, ...]], Value] | None = None
    """Element of a captured tensor."""
    row: Callable[[str, tuple[int, ...]], Sequence[float]] | None = None
    """Row of one, along its last dim."""


def evaluate(root: Node, environment: Environment = Environment()) -> Value:
    """The value of ``root``.

    Raises:
        KeyError: A leaf that ``environment`` has no value for.
    """
    return evaluate_in(toposort(root), environment)


def evaluate_in(order: Sequence[Node], environment: Environment) -> Value:
    """The value of the last of some nodes that stand behind their operands.

    Raises:
        KeyError: A leaf that ``environment`` has no value for.
    """
    values: dict[Node, Value] = {}
    for item in order:
        values[item] = _value(item, [values[arg] for arg in item.args], environment)
    return values[order[-1]]


def apply(item: Node, args: list[Value]) -> Value:
    """The operation of ``item`` (no leaf) on operand values."""
    if item.op is Op.CAST:
        return _cast(item.dtype, args[0])
    if item.op is Op.WHERE:
        return args[1] if args[0] else args[2]
    rule = RULES[item.op]
    result: Value = rule(*args)
    return wrap(result) if item.dtype is DType.INT and isinstance(result, int) else result


def wrap(value: int) -> int:
    """``value`` as a 64-bit two's complement integer."""
    return (value + _WORD // 2) % _WORD - _WORD // 2


def _value(item: Node, args: list[Value], environment: Environment) -> Value:
    if item.op is Op.CONST:
        assert isinstance(item.value, bool | int | float)
        return item.value
    if item.op is Op.SCORE:
        return environment.names["score"]
    if item.op in (Op.VAR, Op.SIZE, Op.PARAM):
        return environment.names[str(item.value)]
    if item.op is Op.LOAD:
        if environment.load is None:
            raise KeyError(item.value)
        return environment.load(str(item.value), tuple(int(a) for a in args))
    if item.op is Op.DOT:
        if environment.row is None:
            raise KeyError(item.value)
        places = tuple(int(a) for a in args)
        left, right = sides(item)
        first = len(left.indices)
        rows = (
            environment.row(left.name, places[:first]),
            environment.row(right.name, places[first:]),
        )
        return math.fsum(a * b for a, b in zip(*rows, strict=True))
    if item.op is Op.IN:
        if environment.row is None:
            raise KeyError(item.value)
        element, *indices = (int(a) for a in args)
        return element in environment.row(str(item.value), tuple(indices))
    return apply(item, args)


def _cast(dtype: DType, value: Value) -> Value:
    if dtype is DType.BOOL:
        return value != 0
    if dtype is DType.FLOAT:
        return float(value)
    if isinstance(value, float) and not math.isfinite(value):
        return -(1 << 63)
    return wrap(int(value))


def _total(function: Callable[..., float], domain: float = math.nan) -> Callable[..., float]:
    """``function`` with IEEE results where Python raises."""

    def safe(*args: float) -> float:
        try:
            return function(*args)
        except OverflowError:
            return math.inf
        except ValueError:
            return domain

    return safe


def _divide(a: float, b: float) -> float:
    if b != 0.0:
        return a / b
    if a == 0.0 or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


def _floordiv(a: Value, b: Value) -> Value:
    if isinstance(a, float) or isinstance(b, float):
        return _round(math.floor, _divide(float(a), float(b)))
    return 0 if b == 0 else a // b


def _mod(a: Value, b: Value) -> Value:
    if isinstance(a, float) or isinstance(b, float):
        return float(a) - _round(math.floor, _divide(float(a), float(b))) * float(b)
    return 0 if b == 0 else a % b


def _power(a: Value, b: Value) -> Value:
    if isinstance(a, int) and isinstance(b, int):
        return int(a**b) if b >= 0 else float(a**b)
    if a == 0.0 and b < 0.0:
        odd = float(b).is_integer() and b % 2 == 1
        return math.copysign(math.inf, a) if odd else math.inf
    try:
        result = float(a) ** float(b)
    except OverflowError:
        return -math.inf if a < 0 and b % 2 == 1 else math.inf
    return math.nan if isinstance(result, complex) else result


def _log(function: Callable[[float], float], pole: float) -> Callable[[float], float]:
    def safe(x: float) -> float:
        if x == pole:
            return -math.inf
        return _total(function)(x)

    return safe


def _round(function: Callable[[float], int], x: float) -> float:
    return math.copysign(float(function(x)), x) if math.isfinite(x) else x


def _extremum(pick: Callable[[Value, Value], Value]) -> Callable[[Value, Value], Value]:
    return lambda a, b: math.nan if a != a or b != b else pick(a, b)


def _sign(x: Value) -> Value:
    if x != x:
        return x
    result = (x > 0) - (x < 0)
    return float(result) if isinstance(x, float) else result


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else (e := _total(math.exp)(x)) / (1.0 + e)


def _clamp_shift(amount: int) -> int:
    return max(0, min(amount, 63))


RULES: dict[Op, Callable[..., Value]] = {
    Op.ADD: lambda a, b: a + b,
    Op.SUB: lambda a, b: a - b,
    Op.MUL: lambda a, b: a * b,
    Op.NEG: lambda a: -a,
    Op.DIV: _divide,
    Op.FLOORDIV: _floordiv,
    Op.MOD: _mod,
    Op.POW: _power,
    Op.MIN: _extremum(min),
    Op.MAX: _extremum(max),
    Op.ABS: abs,
    Op.SIGN: _sign,
    Op.BITAND: lambda a, b: a & b,
    Op.BITOR: lambda a, b: a | b,
    Op.BITXOR: lambda a, b: a ^ b,
    Op.BITNOT: lambda a: ~a,
    Op.SHL: lambda a, b: a << _clamp_shift(b),
    Op.SHR: lambda a, b: a >> _clamp_shift(b),
    Op.LT: lambda a, b: a < b,
    Op.LE: lambda a, b: a <= b,
    Op.EQ: lambda a, b: a == b,
    Op.NE: lambda a, b: a != b,
    Op.AND: lambda a, b: a and b,
    Op.OR: lambda a, b: a or b,
    Op.NOT: lambda a: not a,
    Op.FLOOR: lambda x: _round(math.floor, x),
    Op.CEIL: lambda x: _round(math.ceil, x),
    Op.ROUND: lambda x: _round(round, x),
    Op.SQRT: _total(math.sqrt),
    Op.RSQRT: lambda x: _divide(1.0, _total(math.sqrt)(x)),
    Op.EXP: _total(math.exp),
    Op.EXP2: _total(lambda x: math.pow(2.0, x)),
    Op.LOG: _log(math.log, 0.0),
    Op.LOG2: _log(math.log2, 0.0),
    Op.LOG1P: _log(math.log1p, -1.0),
    Op.EXPM1: _total(math.expm1),
    Op.SIN: _total(math.sin),
    Op.COS: _total(math.cos),
    Op.TAN: _total(math.tan),
    Op.TANH: math.tanh,
    Op.SIGMOID: _sigmoid,
    Op.SILU: lambda x: x * _sigmoid(x) if x != -math.inf else math.nan,
    Op.RELU: lambda x: x if x > 0 or x != x else 0.0,
    Op.GELU: lambda x: 0.5 * x * (1.0 + math.erf(x * math.sqrt(0.5))),
    Op.ERF: math.erf,
    Op.SOFTPLUS: lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))) if x == x else x,
}
"""One function of Python numbers an op; CAST and WHERE stand in :func:`apply`."""
