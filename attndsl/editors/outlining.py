"""The statements of a file's programs by name, for lists of symbols."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attndsl.frontend import surface as s
from attndsl.frontend.tolerant import statements_of

if TYPE_CHECKING:
    from .embedded import Found, Program

_MOST = 2000
"""Symbols of a file."""
_KINDS = {s.Param: "param", s.Tensor: "tensor", s.Define: "function", s.Assign: "local",
          s.Import: "import"}  # fmt: skip


class Symbol(NamedTuple):
    """A statement, or a program with its statements."""

    name: str
    kind: str
    start: int
    end: int
    """Of the whole, in the file."""
    children: tuple[Symbol, ...] = ()


def symbols_in(found: Found) -> list[Symbol]:
    """The symbols of a file: statements of a program file, programs of a configuration."""
    symbols: list[Symbol] = []
    count = 0
    for program in found.programs:
        inner = _statements(program)[: max(0, _MOST - count)]
        count += len(inner) + 1
        if program.places is None:
            return inner
        start, end = program.in_file(0, len(program.source.text))
        symbols.append(Symbol(program.name, "program", start, end, tuple(inner)))
    return symbols[:_MOST]


def _statements(program: Program) -> list[Symbol]:
    symbols = []
    for statement in statements_of(program.source):
        kind = _KINDS.get(type(statement), "local")
        if isinstance(statement, s.Import):
            name = statement.file
        else:
            name = "expression" if isinstance(statement, s.Bare) else statement.name.name
        start, end = program.in_file(statement.span.start, statement.span.end)
        symbols.append(Symbol(name or "import", kind, start, end))
    return symbols
