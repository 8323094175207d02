"""The language's operators and functions: how each is written, and its meaning in plain torch.

Written from docs/language.md. Ints are 64-bit and wrap; derivatives are those of torch where both
agree, and ``//`` and ``%`` of floats have none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch

from .program import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

INT, FLOAT, BOOL = Kind.INT, Kind.FLOAT, Kind.BOOL


class Form(Enum):
    """How an operation is written."""

    INFIX = "x + y"
    PREFIX = "-x"
    CALL = "f(x, y)"
    TERNARY = "x if c else y"
    BETWEEN = "x <= y < z"
    PROMOTION = "an int where a float is needed"


class Rounding(Enum):
    """What a result in fp32 may differ by from the exact one."""

    NEVER = "the result is one of the operands, or a whole number"
    INEXACT = "by rounding, where fp32 does not hold the result"
    ALWAYS = "by a few units in the last place"
    OPERAND = "by a few units in the last place of the operand, which may be the larger one"


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """An operator or function of operands of certain types."""

    word: str
    takes: tuple[Kind, ...]
    gives: Kind
    rule: Callable[..., torch.Tensor]
    form: Form = Form.CALL
    level: int = 13
    """How tight it binds, from 0 (a ternary) to 13 (a name)."""
    rounding: Rounding = Rounding.NEVER
    decides: Callable[..., torch.Tensor] | None = None
    """Which side of a jump or kink the operands are on."""
    lazy: bool = False
    """Whether only the chosen branch is evaluated."""
    rough: bool = False
    """Whether the derivative is off by as much where it is small as where it is 1."""


def _whole_quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # Machines trap where the least int is divided by -1; the quotient wraps.
    odd = (b == 0) | (b == -1)
    found = torch.div(a, torch.where(odd, 1, b), rounding_mode="floor")
    return torch.where(b == 0, 0, torch.where(b == -1, -a, found))


def _whole_rest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    odd = (b == 0) | (b == -1)
    return torch.where(odd, 0, torch.remainder(a, torch.where(odd, 1, b)))


_MOST_QUOTIENT = 2.0**50


def _quotient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.floor(a.detach() / b.detach())


def _rest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    whole = _quotient(a, b)
    # Beyond, rounding the quotient decides on the rest.
    return torch.where(whole.abs() < _MOST_QUOTIENT, a - whole * b, torch.nan)


def _amount(b: torch.Tensor) -> torch.Tensor:
    return b.clamp(0, 63)


def _int_power(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    found = torch.ones_like(a)
    for _ in range(int(b.max()) if b.numel() else 0):
        found = found * a
    return found


def _power(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.pow(a, b)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(x, torch.zeros_like(x))


def _order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.sign(a - b)


def _infix(
    word: str, kind: Kind, rule: Callable[..., torch.Tensor], level: int, gives: Kind | None = None
) -> Operation:
    rounding = Rounding.INEXACT if kind is FLOAT and gives is None else Rounding.NEVER
    decides = None
    if kind is FLOAT and word in ("<", "<=", ">", ">=", "==", "!="):
        decides = _order
    if kind is FLOAT and word in ("//", "%"):
        decides = _quotient
    if word in ("/", "**") and kind is FLOAT:
        rounding = Rounding.ALWAYS
    return Operation(word, (kind, kind), gives or kind, rule, Form.INFIX, level, rounding, decides)


_COMPARISONS = {
    "<": torch.lt, "<=": torch.le, ">": torch.gt, ">=": torch.ge, "==": torch.eq, "!=": torch.ne,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "exp": torch.exp, "exp2": torch.exp2,
    "log": torch.log, "log2": torch.log2, "log1p": torch.log1p, "expm1": torch.expm1,
    "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu, "gelu": _gelu, "erf": torch.erf,
    "softplus": _softplus,
}  # fmt: skip
_OF_RESULT = ("tanh", "sigmoid", "expm1", "gelu")
"""Their derivatives are sums of the result, or of a part of it, and of 1: torch's are too."""
_BY_OPERAND = ("sin", "cos", "tan", "gelu", "silu")
"""Computed from sums that cancel, or from what is left of the operand after whole turns."""
_WHOLE: dict[str, Callable[..., torch.Tensor]] = {
    "floor": torch.floor, "ceil": torch.ceil, "round": torch.round,
}  # fmt: skip


def _between(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (x <= y) & (y < z)


def _clamp(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return torch.minimum(torch.maximum(x, low), high)


def _clamp_sides(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    return 3 * _order(x, low) + _order(torch.maximum(x, low), high)


def _on_both(name: str, kind: Kind) -> list[Operation]:
    """Operations that ints and floats have."""
    rest, decide = kind is INT, kind is FLOAT
    kinks = _order if decide else None
    found = [
        _infix("+", kind, torch.add, 9),
        _infix("-", kind, torch.sub, 9),
        _infix("*", kind, torch.mul, 10),
        _infix("//", kind, _whole_quotient if rest else _quotient, 10),
        _infix("%", kind, _whole_rest if rest else _rest, 10),
        Operation("-", (kind,), kind, torch.neg, Form.PREFIX, 11),
        Operation("+", (kind,), kind, torch.clone, Form.PREFIX, 11),
        Operation("min", (kind, kind), kind, torch.minimum, decides=kinks),
        Operation("max", (kind, kind), kind, torch.maximum, decides=kinks),
        Operation("clamp", (kind,) * 3, kind, _clamp, decides=_clamp_sides if decide else None),
        Operation("abs", (kind,), kind, torch.abs, decides=torch.sign if decide else None),
        Operation("sign", (kind,), kind, torch.sign, decides=torch.sign if decide else None),
        Operation(
            "<=", (kind,) * 3, BOOL, _between, Form.BETWEEN, 4,
            decides=(lambda x, y, z: 3 * _order(x, y) + _order(y, z)) if decide else None,
        ),
    ]  # fmt: skip
    found += [_infix(word, kind, rule, 4, BOOL) for word, rule in _COMPARISONS.items()]
    return found


def _choices(kind: Kind) -> list[Operation]:
    return [
        Operation("where", (BOOL, kind, kind), kind, torch.where, lazy=True),
        Operation("if", (BOOL, kind, kind), kind, torch.where, Form.TERNARY, 0, lazy=True),
    ]


OPERATIONS = (
    *_on_both("int", INT),
    *_on_both("float", FLOAT),
    *(operation for kind in Kind for operation in _choices(kind)),
    _infix("<<", INT, lambda a, b: torch.bitwise_left_shift(a, _amount(b)), 8),
    _infix(">>", INT, lambda a, b: torch.bitwise_right_shift(a, _amount(b)), 8),
    _infix("&", INT, torch.bitwise_and, 7),
    _infix("^", INT, torch.bitwise_xor, 6),
    _infix("|", INT, torch.bitwise_or, 5),
    Operation("~", (INT,), INT, torch.bitwise_not, Form.PREFIX, 11),
    _infix("**", INT, _int_power, 12),
    _infix("/", FLOAT, torch.div, 10),
    _infix("**", FLOAT, _power, 12),
    _infix("and", BOOL, torch.logical_and, 2),
    _infix("or", BOOL, torch.logical_or, 1),
    _infix("&", BOOL, torch.logical_and, 7),
    _infix("|", BOOL, torch.logical_or, 5),
    _infix("^", BOOL, torch.logical_xor, 6),
    _infix("==", BOOL, torch.eq, 4, BOOL),
    _infix("!=", BOOL, torch.ne, 4, BOOL),
    Operation("not", (BOOL,), BOOL, torch.logical_not, Form.PREFIX, 3),
    Operation("~", (BOOL,), BOOL, torch.logical_not, Form.PREFIX, 11),
    Operation("int", (BOOL,), INT, lambda x: x.long()),
    Operation("int", (FLOAT,), INT, lambda x: torch.trunc(x.detach()).long(), decides=torch.trunc),
    Operation("int", (INT,), INT, torch.clone),
    Operation("float", (BOOL,), FLOAT, lambda x: x.double()),
    Operation("float", (INT,), FLOAT, lambda x: x.double(), rounding=Rounding.INEXACT),
    Operation("bool", (INT,), BOOL, lambda x: x != 0),
    Operation("bool", (FLOAT,), BOOL, lambda x: x != 0, decides=lambda x: x != 0),
    Operation(
        "", (INT,), FLOAT, lambda x: x.double(), Form.PROMOTION, 13, rounding=Rounding.INEXACT
    ),
    Operation("relu", (FLOAT,), FLOAT, torch.relu, decides=torch.sign),
    *(
        Operation(word, (FLOAT,), FLOAT, rule, decides=rule)
        for word, rule in _WHOLE.items()
    ),
    *(
        Operation(
            word, (FLOAT,), FLOAT, rule,
            rounding=Rounding.OPERAND if word in _BY_OPERAND else Rounding.ALWAYS,
            rough=word in _OF_RESULT,
        )
        for word, rule in _FUNCTIONS.items()
    ),
)  # fmt: skip
_BY_WORD = {(item.word, item.takes, item.form): item for item in OPERATIONS}


def operation(word: str, *takes: Kind, form: Form | None = None) -> Operation:
    """The operation of that word on operands of those types."""
    if form is not None:
        return _BY_WORD[word, takes, form]
    return next(x for x in OPERATIONS if x.word == word and x.takes == takes)


PROMOTE = operation("", INT)
