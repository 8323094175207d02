"""Lookups that stay inside their tensor, so that a kernel need not clamp their indices.

There are two ways to know. :func:`stays_inside` reads the program alone: its answer holds for every
call. :func:`reads_inside` reads the numbers of one call.

Positions are never inside by the program alone: a tile has rows beyond the lengths, and a call may
shift its positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.ir import Node

    from .int_ranges import Range

Dim = str | int | None
"""A dim as it is declared: the name of a size, a constant, or None for any other expression."""

_EXTENTS = {"b": "batch", "h": "heads", "hkv": "kv_heads"}
"""Name of the size that is each variable's number of values, which count from 0."""
_AT_MOST = {("kv_heads", "heads")}
"""Pairs of sizes of which the first is never the larger one."""


def dim_of(declared: Node) -> Dim:
    """``declared``, a dim of a tensor's declaration, as :func:`stays_inside` takes it."""
    if declared.op is Op.SIZE:
        return str(declared.value)
    return declared.value if isinstance(declared.value, int) else None


def stays_inside(index: Node, dim: Dim, found: Range) -> bool:
    """Return True if each value of ``index`` lies in ``0 ... dim - 1``, in every call.

    Args:
        index: INT.
        dim: The dim that it looks up along.
        found: The range of ``index`` (:func:`attndsl.passes.int_ranges.ranges`).
    """
    if isinstance(dim, int):
        return found[0] >= 0 and found[1] < dim
    if dim is None:
        return False
    if index.op is Op.VAR:
        extent = _EXTENTS.get(str(index.value))
        return extent is not None and (extent == dim or (extent, dim) in _AT_MOST)
    # A remainder has the divisor's sign, and a size is not negative.
    return index.op is Op.MOD and index.args[1].op is Op.SIZE and index.args[1].value == dim


def reads_inside(spans: Sequence[Range], shape: Sequence[int]) -> bool:
    """Return True if indices ``start <= index < stop``, one span a dim, lie inside a tensor."""
    return all(
        start >= 0 and stop <= size for (start, stop), size in zip(spans, shape, strict=True)
    )
