"""The lowered program, which is the result of all passes and the input of backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .fold_dots import Widened, widen

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.ir import Node, Program

    from .differentiate import Derivative
    from .fold_dots import DotTerm
    from .split_score import Placed
    from .tiles.sparsity import Sparsity


@dataclass(frozen=True, slots=True)
class Lowered:
    """The input of backends."""

    program: Program
    derivative: Derivative
    placed: Placed
    """The score as a sum of parts of pairs, rows and columns."""
    sparsity: Sparsity
    """Plan to find tiles; ``sparsity.loop`` plans one loop when tile sizes are known."""
    digest: str
    """Hex digest of the program's meaning: the same after renaming a local or reformatting."""
    contractions: Contractions | None = None
    """The program's contractions; None where it has none."""
    by_token: Program | None = None
    """The program as it was written, with ``token`` and ``tokens``; None where it has neither."""

    @property
    def written(self) -> Program:
        """The program that parts of larger calls start from."""
        return self.program if self.by_token is None else self.by_token


def contractions_of(program: Program, lower: Callable[[Program], Lowered]) -> Contractions | None:
    """Contractions of ``program``, if any; ``lower`` lowers the program without them."""
    found = widen(program)
    if isinstance(found, Widened):
        return Contractions(lower(found.program), found.terms, found.row)
    return None if found is None else Contractions(None, why_not=found)


@dataclass(frozen=True, slots=True)
class Contractions:
    """Way in which a program's contractions run."""

    wide: Lowered | None
    """The same program without them: its raw score is the other's plus ``terms``, and its score the
    other's plus ``row``. None where they do not only add."""
    terms: tuple[DotTerm, ...] = ()
    row: Node | None = None
    """FLOAT; the part of the score that is added to whole rows, which a softmax does not see."""
    why_not: str = ""
    """Reason why there is no such program."""
