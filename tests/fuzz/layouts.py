"""Every way in which a tensor can lie in a buffer: any strides, offsets and lazy signs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

_FAR = (0, 1, 2, 7, 64, 1 << 20, 1 << 33)
"""Strides of dims of size 1, which nothing steps over."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the elements of a tensor are in its buffer."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    negative: bool = False
    """Whether the tensor is the buffer with a lazy minus sign (torch's negative bit)."""

    @property
    def length(self) -> int:
        """Elements of the buffer."""
        if 0 in self.shape:
            return self.offset
        last = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return self.offset + last + 1

    def view(self, buffer: str) -> str:
        """Python for the tensor in the buffer of that name."""
        found = f"{buffer}.as_strided({self.shape}, {self.strides}, {self.offset})"
        return f"torch._neg_view({found})" if self.negative else found


def plain(shape: tuple[int, ...]) -> Memory:
    """Rows one behind the other."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return Memory(shape, tuple(reversed(strides)))


def draw(rng: random.Random, shape: tuple[int, ...], signed: bool) -> Memory:
    """Dims in any order, apart, over each other, expanded; ``signed`` ones now and then negated."""
    some = rng.random()
    if some < 0.25:
        return plain(shape)
    if some < 0.45:
        # Rows that are one, or shifts of one signal.
        steps = tuple(rng.choice((0, 0, 1, 1, 2, 4, 64)) for _ in shape[:-1])
        return Memory(shape, (*steps, 1)[: len(shape)], rng.choice((0, 1)))
    order = list(range(len(shape)))
    if rng.random() < 0.6:
        rng.shuffle(order)
    strides, step = [0] * len(shape), rng.choice((1, 1, 1, 1, 2))
    for dim in reversed(order):
        strides[dim] = step
        step *= max(1, shape[dim])
        step += rng.choice((1, 3, 8)) if rng.random() < 0.2 else 0
    for dim, size in enumerate(shape):
        some = rng.random()
        if size == 1 and some < 0.6:
            strides[dim] = rng.choice(_FAR)
        elif some < 0.1:
            strides[dim] = 0
        elif some < 0.16:
            strides[dim] = rng.choice((1, 2, 3))
    offset = rng.choice((0, 0, 0, 1, 3, 8))
    return Memory(shape, tuple(strides), offset, signed and rng.random() < 0.1)
