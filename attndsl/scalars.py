"""Numbers as users have them: written, of Python, of numpy, and whole floats for ints.

Numpy is never imported: where it has not been, there are no numbers of it. Torch is none of this
module's business, and its 0-d tensors are no numbers here.
"""

from __future__ import annotations

import math
import sys
from numbers import Integral, Real

_PLAIN = frozenset({bool, int, float})
_LONGEST = 400
"""Characters of a number that somebody writes."""


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
