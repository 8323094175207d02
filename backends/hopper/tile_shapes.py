"""Tiles of Hopper kernels: how wide they are, how many bytes elements take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..kernels.kernel import Task

if TYPE_CHECKING:
    from triton.experimental.gluon.language import NVMMASharedLayout

    from ..emit.facts import KernelFacts

BYTES_OF_TYPES = {"fp32": 4, "fp16": 2, "bf16": 2, "i8": 1}
COLUMN_BLOCK = 64
"""Columns that the tensor memory accelerator swizzles together, of 16 bits."""
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


def key_blocks(task: Task, facts: KernelFacts) -> int:
    """Number of blocks of 64 columns that rows of q and k are cut into; 1 if they are not.

    Tiles have powers of two columns. Rows of 192 in tiles of 256 leave no room for 128 keys: see
    M67 in docs/dev/measured.md.
    """
    thirds = 128 < facts.head_dim <= 192 and block_width(facts.value_dim) == 128
    return 3 if thirds and task is Task.FORWARD else 1


def key_width(task: Task, facts: KernelFacts) -> int:
    """Columns of the tiles of q and k."""
    number = key_blocks(task, facts)
    return block_width(facts.head_dim) if number == 1 else number * COLUMN_BLOCK


def config_width(task: Task, facts: KernelFacts) -> int:
    """Columns by which configs are listed: those of the wider tiles."""
    return max(key_width(task, facts), block_width(facts.value_dim))


def widest(facts: KernelFacts) -> int:
    """Columns of the wider ones of a kernel's tiles."""
    return max(map(block_width, (facts.head_dim, facts.value_dim)))


def is_above_128(facts: KernelFacts, task: Task) -> bool:
    """Return True for the backward at head dims above 128, whose consumers share the work."""
    return task is Task.BACKWARD and widest(facts) > 128
