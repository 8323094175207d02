"""Memory order of tensors: rows that kernels read, and results as the input that they belong to.

Kernels read rows whose elements lie side by side. :func:`rows_contiguous` sees to that, after the
last conversion: torch lays out copies by the order of strides, in which the last dim need not be
the innermost one where dims are expanded or rows overlap.

An output has the order of q's dims, and a gradient has the order of its input's dims. Results are
dense, and the last dim is the innermost one. The order is the one that ``torch.empty_like`` gives:
dims are sorted by their strides. A dim of stride 0 (an expanded one) says nothing about the order:
it keeps its place where no other dim decides.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .base import Call

_ALIGNED = 16
"""Bytes that addresses of results are multiples of."""


@dataclass(frozen=True, slots=True)
class MemoryOrder:
    """Memory order of a dense tensor (batch, heads, length, width), width innermost."""

    shape: tuple[int, int, int, int]
    rows: tuple[int, int, int]
    """Rows of ``width`` elements from one batch entry, head or row to the next."""
    strides: tuple[int, int, int, int]
    """The same in elements, and 1."""

    def empty(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new tensor of this order, of the device of ``like``, and its dtype by default."""
        if dtype is None:
            return like.new_empty_strided(self.shape, self.strides)
        return like.new_empty_strided(self.shape, self.strides, dtype=dtype)


@dataclass(frozen=True, slots=True)
class ResultOrders:
    """Memory orders of the results of one call."""

    out: MemoryOrder
    q: MemoryOrder
    """Memory order of q's gradient."""
    k: MemoryOrder
    v: MemoryOrder

    @property
    def longest_step(self) -> int:
        """Elements from one row of a result to the next, of the result with the most."""
        return max(each.strides[2] for each in (self.out, self.q, self.k, self.v))


def rows_contiguous(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``tensor`` in ``dtype``, its own by default, with last stride 1; copied where need be."""
    if dtype is not None and tensor.dtype is not dtype:
        tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def rows_apart(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as :func:`rows_contiguous`, whose ``torch.empty_like`` has last stride 1 too.

    It has that where no two rows overlap, whatever the strides of dims of size 1 are.
    """
    if tensor.is_contiguous():
        return tensor
    width = tensor.shape[-1]
    *steps, last = zip(tensor.stride(), tensor.shape, strict=True)
    is_apart = last[0] == 1 and all(step >= width or size <= 1 for step, size in steps)
    return tensor if is_apart else tensor.contiguous()


def strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides, with 0 for dims of size 1 or less, whose strides mean nothing."""
    return tuple(s if n > 1 else 0 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def order_of(
    sizes: Sequence[int], strides: Sequence[int], less: Callable[[int, int], bool] = operator.lt
) -> tuple[int, int, int]:
    """The dims batch (0), heads (1) and length (2), from the slowest to the fastest.

    An insertion sort by strides, with the comparisons of ``at::infer_dense_strides``.

    Args:
        sizes: Of a tensor (batch, heads, length, width).
        strides: Of the same tensor, in elements.
        less: Whether one number is less than another; False where a graph cannot know.
    """
    found = [2, 1, 0]
    for place in (1, 2):
        own = place
        for other in range(place - 1, -1, -1):
            a, b = found[other], found[own]
            if strides[a] == 0 or strides[b] == 0:
                continue
            if less(strides[a], strides[b]):
                break
            if less(strides[b], strides[a]) or less(sizes[b], sizes[a]):
                found[other], found[own] = b, a
                own = other
    return found[2], found[1], found[0]


def memory_order(
    like: torch.Tensor, width: int, less: Callable[[int, int], bool] = operator.lt
) -> MemoryOrder:
    """The order of a result that belongs to ``like`` and has rows of ``width`` elements.

    ``less`` is that of :func:`order_of`.
    """
    sizes = like.shape
    rows, step = [0, 0, 0], 1
    for dim in reversed(order_of(sizes, like.stride(), less)):
        rows[dim] = step
        step *= _at_least_one(sizes[dim])
    batch, heads, length = rows
    unit = _at_least_one(width)
    return MemoryOrder(
        (sizes[0], sizes[1], sizes[2], width),
        (batch, heads, length),
        (batch * unit, heads * unit, length * unit, 1),
    )


def _at_least_one(size: int) -> int:
    """``size``, or 1 for 0. A size that a graph leaves open gets no guard."""
    if type(size) is int:
        return max(size, 1)
    found: int = torch.sym_max(size, 1)  # type: ignore[no-untyped-call]
    return found


def result_orders(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> ResultOrders:
    """The orders of the results of a call with these operands."""
    return ResultOrders(
        memory_order(q, v.shape[3]), *(memory_order(x, x.shape[3]) for x in (q, k, v))
    )


def empty_fp32(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """A new contiguous fp32 tensor on the device of ``like``. None of the sizes is 0."""
    # torch is faster where strides are given: see M18 in docs/dev/measured.md.
    steps = [1]
    for size in shape[:0:-1]:
        steps.insert(0, steps[0] * size)
    return like.new_empty_strided(shape, steps, dtype=torch.float32)


def empty_like(
    like: torch.Tensor, width: int | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A new tensor (batch, heads, length, width) that lies in memory as ``like``.

    Args:
        like: Gives device, the other sizes and the order.
        width: ``like``'s own by default.
        dtype: The same.
    """
    return memory_order(like, like.shape[3] if width is None else width).empty(like, dtype)


def arranged(tensor: torch.Tensor, order: MemoryOrder) -> torch.Tensor:
    """``tensor`` in ``order``: itself or a copy, and differentiable any number of times."""
    return tensor if tensor.stride() == order.strides else order.empty(tensor).copy_(tensor)


def arranged_like(
    tensor: torch.Tensor, like: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``tensor`` (batch, heads, length, width) in the memory order of ``like``.

    Args:
        tensor: What to arrange.
        like: Gives the order.
        dtype: Of the result; that of ``like`` by default.
    """
    order = memory_order(like, tensor.shape[3])
    dtype = like.dtype if dtype is None else dtype
    if tensor.dtype is dtype:
        return arranged(tensor, order)
    return order.empty(like, dtype).copy_(tensor)


def is_window(tensor: torch.Tensor, order: MemoryOrder) -> bool:
    """Return True if ``tensor`` lies as ``order`` says, but for steps of heads and batch entries.

    These are whole rows, and it begins where a new tensor could.
    """
    steps = tensor.stride()
    return (
        tensor.shape == order.shape and steps[2:] == order.strides[2:]
        and all(step > 0 and step % order.shape[3] == 0 for step in steps[:2])
        and tensor.data_ptr() % _ALIGNED == 0
    )  # fmt: skip


def given_room(call: Call, order: MemoryOrder, dtype: torch.dtype) -> torch.Tensor | None:
    """``call.room``, if a kernel may write a result of ``order`` and ``dtype`` there."""
    room = call.room
    if room is None or room.dtype is not dtype or room.is_neg() or room.device != call.q.device:
        return None
    return room if is_window(room, order) else None


def wide_dtype(wide: bool) -> torch.dtype | None:
    """The dtype of results that are in fp32 whatever their inputs are in; None for theirs."""
    return torch.float32 if wide else None
