"""Numbers as users have them: Python's, those of numpy, and whole floats where ints are asked for.

Numpy is never imported: where it has not been, there are no numbers of it. Torch is none of this
module's business, and its 0-d tensors are no numbers here.
"""

from __future__ import annotations

import sys
from numbers import Integral, Real

_PLAIN = frozenset({bool, int, float})


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
