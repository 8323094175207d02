"""Sines, cosines and tangents of arguments so small that a short reduction will do.

Reducing any fp32 argument takes the bits of 2 / pi up to the largest exponent (M. H. Payne and R.
N. Hanek, 1983): integer arithmetic of 64 bits. Up to :data:`MOST_ANGLE` a multiple of pi / 2 in
three parts is enough (W. J. Cody and W. Waite, "Software manual for the elementary functions",
1980). Arguments that are made of positions have bounds as soon as positions have.

Non-goals: arguments that read the score, captured floats or run-time float params; quotients by
sizes; positions of calls with offsets or lookups of positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import Op, toposort

from .int_ranges import POSITION_LIMIT, ranges
from .magnitude import intervals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node

MOST_ANGLE = 1e5
"""Radians up to which the short reduction is used. It is accurate a little beyond."""
_ROUNDING = 2.0**-20
"""Bound of the relative error of an fp32 operation; bounds of arguments are widened by it."""
_TRIGONOMETRIC = frozenset({Op.SIN, Op.COS, Op.TAN})


def small_angles(
    roots: tuple[Node, ...], bits: Mapping[str, int], from_zero: bool, reach: int | None
) -> frozenset[Node]:
    """The SIN, COS and TAN nodes below ``roots`` whose arguments are at most ``MOST_ANGLE``.

    Args:
        roots: Expressions.
        bits: Width of each int tensor and int param by name; 64 where missing.
        from_zero: Whether logical positions are row numbers, which are not negative.
        reach: What these row numbers and all sizes are below; None where that is not known.
    """
    found = {x for x in toposort(*roots) if x.op in _TRIGONOMETRIC}
    if not found:
        return frozenset()
    arguments = tuple(x.args[0] for x in found)
    known = None
    if reach is not None:
        leaves = (x for x in toposort(*arguments) if x.op in (Op.VAR, Op.SIZE))
        known = {str(x.value): (0, reach - 1) for x in leaves}
    bounds = intervals(arguments, ranges(arguments, bits, from_zero, known), _ROUNDING)
    return frozenset(x for x in found if max(abs(end) for end in bounds[x.args[0]]) <= MOST_ANGLE)


def useful_reach(roots: tuple[Node, ...], bits: Mapping[str, int], below: int) -> int | None:
    """The largest power of two that, as a reach, makes the same angles small as ``below`` does.

    So calls of all lengths share a kernel, as long as their angles are small.

    Args:
        roots: Expressions.
        bits: As in :func:`small_angles`.
        below: What the row numbers and sizes of a call are below.

    Returns:
        None where ``below`` makes no more angles small than are small in every call.
    """
    if not any(x.op in _TRIGONOMETRIC for x in toposort(*roots)):
        return None
    reach = 1 << (below - 1).bit_length()
    if reach > POSITION_LIMIT:
        return None
    found = small_angles(roots, bits, True, reach)
    if found == small_angles(roots, bits, True, None):
        return None
    while 2 * reach <= POSITION_LIMIT and small_angles(roots, bits, True, 2 * reach) == found:
        reach *= 2
    return reach
