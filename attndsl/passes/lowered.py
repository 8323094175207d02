"""The result of all passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attndsl.ir import Program

    from .differentiate import Derivative
    from .place import Placed
    from .tiles.sparsity import Sparsity


@dataclass(frozen=True, slots=True)
class Lowered:
    """What backends get."""

    program: Program
    derivative: Derivative
    placed: Placed
    """The score as a sum of parts of pairs, rows and columns."""
    sparsity: Sparsity
    """What finds the tiles; ``sparsity.loop`` plans one loop once tile sizes are known."""
    digest: str
    """Hex digest of the program's meaning: the same after renaming a local or reformatting."""
