"""Names that the statements of a program read, by way of its local names and functions too.

Non-goals: values that make no difference; what functions make of their arguments.
"""

from __future__ import annotations

from . import surface as s
from .reserved_names import TARGETS


def is_target(statement: s.Statement) -> bool:
    """Tell whether a statement gives the program something, such as its mask."""
    named = isinstance(statement, s.Assign) and statement.name.name in TARGETS
    return named or isinstance(statement, s.Bare)


class Reached:
    """The names that statements of one program read."""

    def __init__(self, tree: s.Tree) -> None:
        self._reads: dict[str, set[str]] = {}
        self._numbers: dict[str, int] = {}
        for number, statement in enumerate(tree.statements):
            if isinstance(statement, s.Define | s.Assign) and not is_target(statement):
                name = statement.name.name
                self._reads.setdefault(name, s.names_in(statement))
                self._numbers.setdefault(name, number)

    def names(self, statement: s.Statement) -> set[str]:
        """The names that ``statement`` reads, directly or not."""
        found: set[str] = set()
        ahead = [*s.names_in(statement)]
        while ahead:
            name = ahead.pop()
            if name not in found:
                found.add(name)
                ahead += self._reads.get(name, ())
        return found

    def numbers(self, statement: s.Statement) -> set[int]:
        """The lines and functions that ``statement`` reads, by their numbers in the program."""
        names = self.names(statement)
        return {number for name, number in self._numbers.items() if name in names}
