"""Names that a caller declares in Python rather than in the text, and the types of both."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from attndsl.errors import TypeMismatchError
from attndsl.foundation.scalars import number_key
from attndsl.ir import DType

if TYPE_CHECKING:
    from attndsl.source import Span

_TYPES = {t.value: t for t in DType}

GIVEN = "was given to compile()"
COMPILE_ARGUMENTS = frozenset(
    {"text", "backend", "name", "checked", "exact", "first_line", "params", "tensors"}
)
"""Arguments of ``compile()``, which calls do not take."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A param whose value is folded into the program."""

    value: bool | int | float = field(compare=False)
    origin: str = field(default=GIVEN, compare=False)
    """Predicate that follows the name in errors, such as :data:`GIVEN`."""
    span: Span | None = field(default=None, compare=False)
    """Place in a file that binds the name, if one does."""
    key: object = field(init=False, repr=False)
    """The key under which equal values meet."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", number_key(self.value))


@dataclass(frozen=True, slots=True)
class Absent:
    """A capture that the text declares with ``= none`` and that is not there."""

    origin: str = field(default=GIVEN, compare=False)
    """Predicate that follows the name in errors, as that of :class:`Bound`."""
    span: Span | None = field(default=None, compare=False)
    """Place in a file that leaves the name out, if one does."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A run-time param; ``dtype`` is ``int``, ``float`` or ``bool``."""

    dtype: str = "float"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A captured tensor: dims are integers, sizes' names or expressions, as in ``tensor`` lines."""

    dims: tuple[str | int, ...]
    dtype: str = "float"


Declared = Bound | Absent | ParamSpec | TensorSpec


def tensor(*dims: str | int, dtype: str = "float") -> TensorSpec:
    """Declare a captured tensor in a call of ``compile()``: ``gain=attndsl.tensor("heads")``."""
    return TensorSpec(dims, dtype)


def unusable(name: str, given: Bound) -> TypeMismatchError | None:
    """The error of a bound value that no literal of the language could have."""
    if isinstance(given.value, int) and not -(1 << 63) <= given.value < 1 << 63:
        return TypeMismatchError(
            f"'{name}' {given.origin}, and its value does not fit 64 bits",
            given.span,
            "write a float, such as 1e30",
        )
    if given.value != given.value:
        return TypeMismatchError(
            f"'{name}' {given.origin}, and its value is NaN", given.span, "write a number"
        )
    return None


def no_optional(name: str, given: Absent) -> TypeMismatchError:
    """The error of an absent capture that the text does not declare as optional."""
    return TypeMismatchError(
        f"'{name[:40]}' {given.origin} as none, and the program does not declare that it may be",
        given.span,
        f"declare it so: 'param {name[:40]}: float = none', or pass a value",
    )


def origin_of(given: Declared) -> str:
    """Origin of a name's declaration, for errors."""
    return given.origin if isinstance(given, Bound | Absent) else GIVEN


def span_of(given: Declared) -> Span | None:
    """Span of a name's declaration in a file, if one declares it."""
    return given.span if isinstance(given, Bound | Absent) else None


def type_of(name: str, span: Span | None = None) -> DType:
    """The type that a declaration names.

    Raises:
        TypeMismatchError: It is none.
    """
    found = _TYPES.get(name)
    if found is None:
        close = difflib.get_close_matches(name[:40], list(_TYPES), n=1)
        raise TypeMismatchError(
            f"'{name}' is no type",
            span,
            f"did you mean '{close[0]}'?" if close else "write int, float or bool",
        )
    return found
