"""The statements of a file's programs by name, for lists of symbols."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attndsl.frontend import surface as s
from attndsl.frontend.error_recovery import statements_of

if TYPE_CHECKING:
    from .embedded_programs import EmbeddedProgram, Found

_MOST = 2000
"""Symbols of a file."""
_KINDS = {s.ParamDef: "param", s.TensorDef: "tensor", s.Define: "function", s.Assign: "local",
          s.Import: "import"}  # fmt: skip


class DocumentSymbol(NamedTuple):
    """A statement, or a program with its statements."""

    name: str
    kind: str
    start: int
    end: int
    """End of the whole statement or program, in the file."""
    children: tuple[DocumentSymbol, ...] = ()


def symbols_in(found: Found) -> list[DocumentSymbol]:
    """The symbols of a file: statements of a program file, programs of a configuration."""
    symbols: list[DocumentSymbol] = []
    count = 0
    for program in found.programs:
        inner = _statements(program)[: max(0, _MOST - count)]
        count += len(inner) + 1
        if program.places is None:
            return inner
        start, end = program.in_file(0, len(program.source.text))
        symbols.append(DocumentSymbol(program.name, "program", start, end, tuple(inner)))
    return symbols[:_MOST]


def _statements(program: EmbeddedProgram) -> list[DocumentSymbol]:
    symbols = []
    for statement in statements_of(program.source):
        kind = _KINDS.get(type(statement), "local")
        if isinstance(statement, s.Import):
            name = statement.file
        else:
            name = "expression" if isinstance(statement, s.Bare) else statement.name.name
        start, end = program.in_file(statement.span.start, statement.span.end)
        symbols.append(DocumentSymbol(name or "import", kind, start, end))
    return symbols
