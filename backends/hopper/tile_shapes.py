"""Tiles of Hopper kernels: how wide they are, how many bytes elements take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..kernels.kernel import Task

if TYPE_CHECKING:
    from triton.experimental.gluon.language import NVMMASharedLayout

    from ..emit.facts import KernelFacts

BYTES_OF_TYPES = {"fp32": 4, "fp16": 2, "bf16": 2, "i8": 1}
ADDRESS_BYTES = 16
"""Addresses and strides that the tensor memory accelerator takes are multiples of this."""


@dataclass(frozen=True, slots=True)
class Block:
    """Block that a descriptor moves at once, and its layout in shared memory."""

    shape: tuple[int, ...]
    dtype: str
    """Triton's name."""
    layout: NVMMASharedLayout

    @property
    def type(self) -> str:
        """Triton's name of the descriptor's type."""
        return f"tensordesc<{self.dtype}[{', '.join(map(str, self.shape))}],{self.layout!r}>"


def block_width(head_dim: int) -> int:
    """Columns of a tile that holds rows of ``head_dim`` elements; the rest is zeros."""
    return max(64, 1 << (head_dim - 1).bit_length())


def widest(facts: KernelFacts) -> int:
    """Columns of the wider ones of a kernel's tiles."""
    return max(map(block_width, (facts.head_dim, facts.value_dim)))


def is_above_128(facts: KernelFacts, task: Task) -> bool:
    """Return True for the backward at head dims above 128, whose consumers share the work."""
    return task is Task.BACKWARD and widest(facts) > 128
