"""The result of all passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attndsl.ir import Program

    from .differentiate import Derivative
    from .tiles.plan import TilePlan


@dataclass(frozen=True, slots=True)
class Lowered:
    """What backends get."""

    program: Program
    derivative: Derivative
    plan: TilePlan
    digest: str
    """Hex digest of the program's meaning: the same after renaming a local or reformatting."""
