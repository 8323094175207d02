"""Programs while they are written: what can be known of a text that has errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from attndsl.errors import AttnDSLError

from . import surface as s
from .check import KnownValues, values_of
from .parse import parse_statement
from .program_imports import expand
from .statements import split_statements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.source import Source

    from .declare import Declared


class Draft(NamedTuple):
    """Statements and known values of a text that may have errors."""

    statements: tuple[s.Statement, ...]
    """Statements that parse, with those of imported files. Each span points to where it was
    written."""
    values: KnownValues


def read_draft(source: Source, declared: Mapping[str, Declared]) -> Draft:
    """The statements of ``source`` that parse, and what the names mean whose lines are right."""
    own = statements_of(source)
    try:
        whole = expand(source)
    except AttnDSLError:
        whole = source
    found = own if whole is source else statements_of(whole)
    # Imports that could not be followed would end the check.
    tree = s.Tree(whole, tuple(x for x in found if not isinstance(x, s.Import)))
    imports = tuple(x for x in own if isinstance(x, s.Import))
    return Draft((*imports, *tree.statements), values_of(tree, declared))


def statements_of(source: Source) -> tuple[s.Statement, ...]:
    """The statements of ``source`` that parse; none of a text that is too large."""
    try:
        spans, _ = split_statements(source)
    except AttnDSLError:
        return ()
    found = []
    for span in spans:
        try:
            found.append(parse_statement(span.origin()))
        except AttnDSLError:
            continue
    return tuple(found)
