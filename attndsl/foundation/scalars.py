"""Conversion of users' numbers: text, Python's, numpy's, whole floats for ints; and their keys.

Numpy is never imported: where it has not been, there are no numbers of it. Torch is none of this
module's business, and its 0-d tensors are no numbers here.
"""

from __future__ import annotations

import math
import sys
from numbers import Integral, Real

_PLAIN = frozenset({bool, int, float})
_LONGEST = 400
"""The most characters of a number in a text."""


def as_number(value: object) -> bool | int | float | None:
    """``value`` as a plain bool, int or float; None if it is no number.

    Numpy's scalars and its 0-d arrays are numbers, and so is what says that it is by
    :class:`numbers.Real`.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value  # type: ignore[return-value]
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)):
        if value.shape != ():
            return None
        value = value.item()
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, Integral):
        return int(value)
    try:
        return float(value) if isinstance(value, Real) else None
    except OverflowError:
        return None


def number_key(value: object) -> tuple[type, object]:
    """The part that ``value`` has in the key of something that is kept: its type and its bits.

    Programs tell ``0.0`` from ``-0.0``, and True from 1 and 1.0, which are equal. They do not tell
    NaNs apart, and these equal nothing, so that what is kept by one would never be found again.
    Others than numbers stand for themselves.
    """
    kind = type(value)
    if kind is float:
        return kind, _bits(value)  # type: ignore[arg-type]
    if kind in _PLAIN or kind is str or value is None:
        return kind, value
    if isinstance(value, complex):
        return kind, (_bits(value.real), _bits(value.imag))
    number = as_number(value)
    if number is None:
        return kind, value
    return kind, _bits(number) if isinstance(number, float) else number


def _bits(number: float) -> tuple[float | None, float]:
    """The number and its sign, which graphs of torch.compile can follow; one pair for all NaNs."""
    return (number, math.copysign(1.0, number)) if number == number else (None, 1.0)


def as_int(value: object) -> int | None:
    """``value`` as a plain int, if it is an int or a whole float; bools are no ints."""
    number = as_number(value)
    if isinstance(number, float) and number.is_integer():
        return int(number)
    return None if isinstance(number, bool | float) else number


def read_number(text: str) -> bool | int | float | None:
    """The number that ``text`` is, in any case and between blanks; None if it is no number.

    Nothing becomes infinite without saying so, and texts that are longer than numbers are not read.
    """
    text = text.strip().lower()
    if len(text) > _LONGEST:
        return None
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isinf(value) and "inf" not in text else value
