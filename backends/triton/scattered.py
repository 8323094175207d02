"""Exact sums that any pairs may meet in: tables looked up by what the program computes.

Numbers are rounded to multiples of a power of two and added as integers, which gives the same sum
in any order; so GPUs may add with atomics and yet find the same bits each time (the idea of J.
Demmel and H. D. Nguyen, Fast reproducible floating-point summation, ARITH 2013: one unit in the
last place for all terms, chosen from a bound). Two kernels make the terms: the first finds R, the
greatest sum of sizes of the terms of a row (of one query of one head, added up in a fixed order);
the second adds.

With N rows in the call, no element's sum exceeds N * R. The unit is the power of two that makes
this less than 2^62, with a factor of 2 for the rounding of R; each term errs by at most half of it,
less than N * R * 2^-60. At 2^20 rows that is 2^-40 R, and terms come as fp32 numbers. Infinities
and NaN are not part of the sums: what they are at each element is noted, in any order too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..base import Call

_ROOM = 61
_OVERFLOWN = 160
"""A row's sum of sizes is less than two to this power, whatever fp32 numbers they are."""
_COPIES = 64
_ELEMENTS = 1 << 18
"""Small tables are added up in copies, up to that many elements, lest all programs meet."""
INF, MINUS_INF, NAN = 1, 2, 4
"""What kernels note of an element (``library.note_infinities``)."""


@dataclass(frozen=True, slots=True)
class Exact:
    """Buffers of the second kernel for one tensor."""

    name: str
    sums: torch.Tensor
    """(copies, elements) int64."""
    notes: torch.Tensor
    """(elements,) int32."""
    steps: tuple[int, ...]
    """Strides of the tensor's dims in them."""

    def arguments(self) -> list[object]:
        """In the order of ``generate_gradients.sum_parameters``."""
        return [self.sums, self.notes, *self.sums.shape, *self.steps]


def buffers(names: Iterable[str], call: Call) -> list[Exact]:
    """Zeros for the tensors ``names``, in order."""
    found = []
    for name in sorted(names):
        shape = call.tensors[name].shape
        count = shape.numel()
        copies = max(1, min(_COPIES, _ELEMENTS // count))
        sums = torch.zeros((copies, count), dtype=torch.int64, device=call.q.device)
        notes = torch.zeros(count, dtype=torch.int32, device=call.q.device)
        found.append(Exact(name, sums, notes, notes.view(shape).stride()))
    return found


def scales_of(bounds: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors of the terms, and what undoes them: fp64 powers of two, on the device.

    Args:
        bounds: int32: the bits of R, an fp32 number, of each tensor.
        rows: The number of rows of all heads and batch entries.
    """
    exponent = (bounds >> 23).long()
    top = torch.where(exponent == 255, _OVERFLOWN, exponent - 126)
    shift = _ROOM - (rows - 1).bit_length() - top
    return _power(shift), _power(-shift)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Two to a power that normal fp64 numbers have."""
    return ((1023 + exponent) << 52).view(torch.float64)


def gradient_of(found: Exact, inverse: torch.Tensor, call: Call) -> torch.Tensor:
    """The gradient, once the second kernel has added to ``found``.

    Args:
        found: Its buffers.
        inverse: 0-d, of :func:`scales_of`.
        call: As of the backward.
    """
    like = call.tensors[found.name]
    total = found.sums.sum(0).double() * inverse
    notes = found.notes
    special = torch.where(notes == INF, torch.inf, -torch.inf)
    special = torch.where(notes > MINUS_INF, torch.nan, special)
    total = torch.where(notes == 0, total, special)
    return total.to(like.dtype).view(like.shape)
