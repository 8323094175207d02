"""Causal calls of plain scores: torch's own attention over few large squares in place of many rows.

The tiles on the diagonal are triangles. All pairs below them are live, and lie in squares: two
tiles side by side have one of one tile between them, two such pairs one of two tiles, and so on::

    \
    1 \
    2 2 \
    2 2 1 \

So ``n`` tiles take ``1 + log2(n)`` calls, since squares of one size lie equally far apart. Which
squares a row meets, and in which order, depends on its position among the keys alone: rows of a
part have the bits of the whole where the part begins and ends at tiles. torch's results for a row
are the same for any number of whole tiles. See M58 in docs/dev/measured.md.

Non-goals: masks other than ``row + first >= key`` (:mod:`.step_plan`), sinks,
gradients of captures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attndsl.foundation.caches import BoundedCache
from attndsl.passes.int_ranges import POSITION_LIMIT

from ..base import CallGradients
from ..log_sum import LogSumParts, of_one_number, public_lse
from . import step_plan
from .live_masks import is_by_distance
from .matrices import StepResults, add_part, gradient_like, matrices
from .scalar_bounds import boundary, bounds_of
from .sdpa import flash_attention, flash_gradients, is_nan, is_spoilt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attndsl.pipeline import Lowered

    from ..base import Backward, Call
    from .scalar_bounds import ScalarBounds


_FAR = POSITION_LIMIT // 2
_MOST = _FAR // 2
"""Limit of the least live distance, in size."""
_MAX_TRIANGLES = 32


@dataclass(frozen=True, slots=True)
class Squares:
    """Equal squares, or rectangles, whose corners lie on a diagonal."""

    row: int
    """The first row of the first one."""
    key: int
    """Its first key."""
    rows: int
    keys: int
    number: int = 1
    apart: int = 1
    """Rows, and keys, from one to the next; any number for one alone."""
    causal: bool = False
    """True if they are triangles: the n-th row sees n keys."""

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """A view (matrices, number, rows, width) of ``x`` (matrices, length, width)."""
        return _stacked(x, self.row, self.rows, self.number, self.apart)

    def of_keys(self, x: torch.Tensor) -> torch.Tensor:
        """The same of keys."""
        return _stacked(x, self.key, self.keys, self.number, self.apart)


def _stacked(x: torch.Tensor, first: int, size: int, number: int, apart: int) -> torch.Tensor:
    part = x.narrow(1, first, (number - 1) * apart + size)
    return part.unfold(1, size, apart).transpose(2, 3)


@dataclass(frozen=True, slots=True)
class Triangle:
    """The live pairs of a call whose row ``r`` sees the keys up to ``r + first``."""

    first: int
    """A multiple of ``side``."""
    rows: int
    side: int
    """Rows of a tile."""

    def squares(self) -> Iterator[Squares]:
        """All pairs, each once: those on the diagonal first, which meet all rows."""
        side, whole = self.side, self.rows // self.side
        if whole:
            yield Squares(0, self.first, side, side, whole, side, causal=True)
        if rest := self.rows - whole * side:
            done = whole * side
            yield Squares(done, self.first + done, rest, rest, causal=True)
        size = side
        while size < self.first + self.rows:
            yield from self._of_size(size)
            size *= 2

    def _of_size(self, size: int) -> Iterator[Squares]:
        """The squares of ``size`` below the diagonal, those that are whole at once."""
        last = self.first + self.rows
        whole: list[int] = []
        clipped = []
        for key in range(self.first // (2 * size) * 2 * size, last, 2 * size):
            start, stop = max(self.first, key + size), min(last, key + 2 * size)
            if stop - start == size:
                whole.append(key)
            elif start < stop:
                clipped.append(Squares(start - self.first, key, stop - start, size))
        if whole:
            row = whole[0] + size - self.first
            yield Squares(row, whole[0], size, size, len(whole), 2 * size)
        yield from clipped

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See :class:`.cpu.Strategy`."""
        q, k, v = _operands(call)
        results = StepResults(call)
        for squares in self.squares():
            keys, values = squares.of_keys(k), squares.of_keys(v)
            for member in range(q.shape[1]):
                part, lse = flash_attention(
                    squares.of_rows(q[:, member]), keys, values, is_causal=squares.causal,
                    scale=call.scale,
                )  # fmt: skip
                if is_spoilt(part, lse):
                    return None
                total = squares.of_rows(results.out[:, member])
                total_lse = [squares.of_rows(x[:, member]) for x in results.lse]
                own_lse = LogSumParts(*of_one_number(lse.unsqueeze(-1)))
                if squares.causal:
                    total.copy_(part)
                else:
                    # An exponential's last bit depends on where in memory its power lies.
                    before = LogSumParts(*(x.contiguous() for x in total_lse))
                    own_lse = add_part(total, before, part, own_lse)
                for x, own in zip(total_lse, own_lse, strict=True):
                    x.copy_(own)
        return results.as_given()

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> CallGradients | None:
        """See :class:`.cpu.Strategy`."""
        q, k, v = _operands(call)
        out, grad_out = matrices(backward.out, call), matrices(backward.grad_out, call)
        lse = matrices(public_lse(backward.lse).unsqueeze(-1), call)
        # exp(score - inf) is 0: rows whose scores are all -inf have no weights.
        lse = torch.where(lse == -torch.inf, torch.inf, lse)
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for squares in self.squares():
            keys, values = squares.of_keys(k), squares.of_keys(v)
            for member in range(q.shape[1]):
                part_q, part_k, part_v = flash_gradients(
                    squares.of_rows(grad_out[:, member]),
                    (squares.of_rows(q[:, member]), keys, values),
                    (squares.of_rows(out[:, member]), squares.of_rows(lse[:, member]).squeeze(-1)),
                    is_causal=squares.causal, scale=call.scale,
                )  # fmt: skip
                total = squares.of_rows(dq[:, member])
                if not squares.causal:
                    total.add_(part_q)
                elif is_nan(part_q, part_v):
                    return None
                else:
                    total.copy_(part_q)
                squares.of_keys(dk).add_(part_k)
                squares.of_keys(dv).add_(part_v)
        wants = backward.wanted
        return CallGradients(
            q=gradient_like(dq, call.q, wants) if wants.q else None,
            k=gradient_like(dk, call.k, wants) if wants.k else None,
            v=gradient_like(dv, call.v, wants) if wants.v else None,
        )


def _operands(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries (matrices, group, rows, dim), and keys and values (matrices, keys, dim)."""
    return matrices(call.q, call), matrices(call.k, call)[:, 0], matrices(call.v, call)[:, 0]


class Triangles:
    """Finds triangles; remembers those that depend on nothing but numbers."""

    def __init__(self) -> None:
        self._kept: BoundedCache[tuple[Triangle | None]] = BoundedCache(
            "triangles by mask, numbers", _MAX_TRIANGLES
        )

    def of(self, lowered: Lowered, call: Call) -> Triangle | None:
        """The live pairs of a call of plain scores, or None where they are no such triangle.

        None too where torch would be wrong: it gives dead scores -inf before it scales them.
        """
        if not call.scale > 0.0:  # What is kept is a matter of the mask.
            return None
        numbers = step_plan.numbers_of(lowered, call)
        if numbers is None:
            return triangle_of(lowered, call)
        return self._kept.get_or_make(numbers, lambda: (triangle_of(lowered, call),))[0]


def triangle_of(lowered: Lowered, call: Call) -> Triangle | None:
    """The live pairs of a call of plain scores, or None where they are no such triangle."""
    mask, rows, side = lowered.program.mask, call.q.shape[2], step_plan.BLOCK_M
    if (
        mask is None or lowered.program.sink is not None or 0 in (*call.q.shape, *call.k.shape)
        or not is_by_distance(mask)
    ):  # fmt: skip
        return None
    bounds = bounds_of(lowered, call)
    if bounds is None or bounds.of_one_row or (least := _least_distance(bounds)) is None:
        return None
    first = bounds.q_offset - bounds.kv_offset - least
    if first < 0 or first % side or first + rows > call.k.shape[2]:
        return None
    return Triangle(first, rows, side)


def _least_distance(bounds: ScalarBounds) -> int | None:
    """The least live ``q - kv`` of a mask of distances, where no greater one is dead; or None.

    It is a matter of all distances, not of those that a call has: one process may have all rows of
    a call, and others parts of them, whose results are to have the same bits.
    """

    def all_live_from(distance: int) -> bool:
        return bounds.must((_FAR + distance, 2 * _FAR), (0, _FAR + 1))

    if all_live_from(-_MOST) or not all_live_from(_MOST):
        return None
    live = boundary(all_live_from, _MOST, -_MOST)
    return None if bounds.may((0, _FAR), (_FAR - live, 2 * _FAR)) else live
