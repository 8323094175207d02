"""Text to checked IR. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .declare import Absent, Bound, Declared, ParamSpec, TensorSpec, tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.errors import ProgramWarning
    from attndsl.ir import Node, Program
    from attndsl.source import Source, Span

__all__ = [
    "Absent",
    "Bound",
    "Declared",
    "ParamSpec",
    "TensorSpec",
    "read",
    "read_locals",
    "read_mask_span",
    "read_unused",
    "tensor",
]


def read(source: Source, declared: Mapping[str, Declared]) -> Program:
    """The checked program of ``source``.

    Raises:
        AttnDSLError: All that is wrong with it.
    """
    from .check import check
    from .imports import expand
    from .parse import parse

    return check(parse(expand(source)), declared)


def read_locals(source: Source, declared: Mapping[str, Declared]) -> dict[str, Node]:
    """What the local names of ``source`` stand for, in the order of their lines.

    Raises:
        AttnDSLError: All that is wrong with it.
    """
    from .check import locals_of
    from .imports import expand
    from .parse import parse

    return locals_of(parse(expand(source)), declared)


def read_unused(source: Source) -> list[ProgramWarning]:
    """What the text of a program without errors has and does not use.

    An imported file may have more than this program uses.
    """
    from .imports import expand
    from .parse import parse
    from .unused import unused

    found = unused(parse(expand(source)))
    return [x for x in found if x.span is None or x.span.origin().source.name == source.name]


def read_mask_span(source: Source) -> Span | None:
    """Where a program without errors says its mask first; None where a score does.

    Nodes keep the span of the text that first had them, which may be another one.
    """
    from . import surface as s
    from .imports import expand
    from .parse import parse

    for statement in parse(expand(source)).statements:
        if isinstance(statement, s.Bare):
            return statement.value.span
        if isinstance(statement, s.Assign) and statement.name.name == "mask":
            return statement.value.span
    return None
