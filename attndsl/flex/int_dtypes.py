"""torch's int dtypes: results of the narrow ones wrap round, and the language's ints do not.

What may leave a dtype's range is written with the bits that the dtype keeps. Ranges tell where that
is, so that comparisons, masks of bits and quotients stay as they are.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

import torch

from attndsl.ir import Node, Op, const, node
from attndsl.passes.int_ranges import fits, ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from attndsl.passes.int_ranges import Range

RANGES: dict[torch.dtype, Range] = {
    torch.uint8: (0, 255),
    torch.int8: (-(1 << 7), (1 << 7) - 1),
    torch.int16: (-(1 << 15), (1 << 15) - 1),
    torch.int32: (-(1 << 31), (1 << 31) - 1),
}
"""Bounds of dtypes that are narrower than the language's ints."""


def joined(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """The dtype of an int result of 0-d tensors of ``dtypes``; None stands for a Python number."""
    known = [dtype for dtype in dtypes if dtype is not None]
    if not known:
        return None
    found = reduce(torch.promote_types, known)
    return torch.int64 if found is torch.bool else found


def wrapped(value: Node, dtype: torch.dtype | None, known: Mapping[str, Range]) -> Node:
    """The int ``value`` as ``dtype`` holds it.

    Args:
        value: Of 64 bits.
        dtype: None, or one that is not narrower, changes nothing.
        known: Ranges of int tensors and params by name.
    """
    limits = RANGES.get(dtype) if dtype is not None else None
    if limits is None or fits(ranges((value,), {}, known=known)[value], limits):
        return value
    low, high = limits
    if value.op is Op.CONST and isinstance(value.value, int):
        return const((value.value - low) % (high - low + 1) + low)
    kept = node(Op.BITAND, value, const(high - low))
    # The upper half of the bits stands for the negative numbers.
    return node(Op.SUB, node(Op.BITXOR, kept, const(-low)), const(-low)) if low else kept


def literal(value: int, dtype: torch.dtype | None) -> int:
    """A Python int beside ints of ``dtype``, which torch converts it to.

    Raises:
        OverflowError: ``dtype`` cannot hold it. (torch takes negative numbers for unsigned ones.)
    """
    limits = RANGES.get(dtype) if dtype is not None else None
    if limits is None or limits[0] <= value <= limits[1]:
        return value
    if limits[0] == 0 and -limits[1] <= value < 0:
        return value + limits[1] + 1
    raise OverflowError(value)
