"""Score lines that never read the score: all lines before, and q . k itself, are lost.

Non-goals: what a line makes of the score that it reads, such as 0 times it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import ProgramWarning

from .. import surface as s
from ..reachable_names import Reached

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from attndsl.source import Span


def unscored(tree: s.Tree, lines: Collection[Span | None]) -> Iterator[ProgramWarning]:
    """A warning for each such line, in the order of the text.

    Args:
        tree: A program without errors.
        lines: Where its score lines stand.
    """
    reached = Reached(tree)
    for statement in tree.statements:
        if statement.span in lines and "score" not in reached.names(statement):
            form = "score + ..." if isinstance(statement, s.Bare) else "score = score + ..."
            yield ProgramWarning(
                "this line does not read the score, which is lost",
                statement.span,
                f"write '{form}' to add to it",
            )
