"""Upgrade of texts of version 0.1: calls that read the score get it as an argument.

Nothing else of a text changes, so comments and layout stay, and a text of today is left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attndsl.errors import TypeMismatchError, raise_all

from . import parsed
from .legacy_calls import Insertion, former_calls, hides_score, inserted, insertions

if TYPE_CHECKING:
    from attndsl.source import Source


class Upgrade(NamedTuple):
    """The insertions that make a program one of today."""

    insertions: tuple[Insertion, ...]
    """Insertions in its own text and in those of files that it imports."""
    sources: tuple[Source, ...]
    """These texts, those without insertions too."""

    def of(self, source: Source) -> list[Insertion]:
        """The insertions in one of them."""
        return [each for each in self.insertions if each.span.source == source]


def upgrade_of(source: Source) -> Upgrade:
    """The insertions that make the program of ``source`` one of today.

    Raises:
        AttnDSLError: It does not parse, or some call of it may be of either version.
    """
    tree = parsed(source)
    former = former_calls(tree)
    errors = [
        TypeMismatchError(
            f"'{call.name}' stands beside the score here, and other calls of this program are of "
            "version 0.1, in which it read the score too",
            call.span,
            "write the line as it is meant: 'score + alibi()' has the score once now",
        )
        for call in former.unclear
    ]
    found: list[Insertion] = []
    for number, calls in former.calls.items():
        statement = tree.statements[number]
        if hides_score(statement):
            errors.append(
                TypeMismatchError(
                    "this function has a parameter 'score', which hides the score from "
                    f"'{calls[0].name}'",
                    calls[0].span,
                    "rename the parameter",
                )
            )
        found += insertions(statement, calls)
    raise_all(errors)
    sources = dict.fromkeys([source, *(statement.span.source for statement in tree.statements)])
    return Upgrade(tuple(found), tuple(sources))


def upgraded(source: Source) -> str:
    """The text of ``source`` as one of today.

    Raises:
        AttnDSLError: As :func:`upgrade_of`.
    """
    return inserted(source.text, [each.edit for each in upgrade_of(source).of(source)])
