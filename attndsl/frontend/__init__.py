"""Text to checked IR. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.source import Source

from .declare import Absent, Bound, Declared, ParamSpec, TensorSpec, tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.errors import ProgramWarning
    from attndsl.ir import Node, Program
    from attndsl.source import Span

    from .surface import Tree

__all__ = [
    "Absent",
    "Bound",
    "Declared",
    "ParamSpec",
    "TensorSpec",
    "parsed",
    "read",
    "read_fractions",
    "read_large_numbers",
    "read_locals",
    "read_mask_span",
    "read_unscored",
    "read_unused",
    "tensor",
]


def parsed(source: Source) -> Tree:
    """The statements of ``source``, with those of the files that it imports.

    Whoever asks several questions about one text parses it once, and asks them of the result.

    Raises:
        AttnDSLError: All that does not parse.
    """
    from .parse import parse
    from .program_imports import expand

    return parse(expand(source))


def read(text: Source | Tree, declared: Mapping[str, Declared]) -> Program:
    """The checked program of a text, or of what :func:`parsed` made of one.

    Raises:
        AttnDSLError: All that is wrong with it.
    """
    from .check import check

    return check(_tree(text), declared)


def read_locals(text: Source | Tree, declared: Mapping[str, Declared]) -> dict[str, Node]:
    """Values of the local names of a text, in the order of their lines.

    Raises:
        AttnDSLError: All that is wrong with it.
    """
    from .check import locals_of

    return locals_of(_tree(text), declared)


def read_unused(text: Source | Tree) -> list[ProgramWarning]:
    """Warnings about all that the text of a program without errors has and does not use.

    An imported file may have more than this program uses.
    """
    from .lints.unused import unused

    tree = _tree(text)
    name = tree.source.name
    return [x for x in unused(tree) if x.span is None or x.span.origin().source.name == name]


def read_unscored(text: Source | Tree, program: Program) -> list[ProgramWarning]:
    """Lines of a text that do not read the score, and replace it in its ``program``."""
    from .lints.unread_score import unscored

    return list(unscored(_tree(text), {line.span for line in program.lines}))


def read_large_numbers(text: Source | Tree) -> list[ProgramWarning]:
    """Large negative numbers in the text of a program without errors, such as ``-1e9``."""
    from .lints.huge_constants import large_numbers

    return list(large_numbers(_tree(text)))


def read_fractions(
    text: Source | Tree, declared: Mapping[str, Declared], mask: Node
) -> list[ProgramWarning]:
    """Fractions that the caller of a program without errors gives where its mask has positions."""
    from .type_inference import fractions

    return list(fractions(_tree(text), declared, mask))


def read_mask_span(text: Source | Tree) -> Span | None:
    """Span of the first mask or only expression of a correct program; None where a score masks.

    Nodes keep the span of the text that first had them, which may be another one.
    """
    from . import surface as s

    for statement in _tree(text).statements:
        if isinstance(statement, s.Bare):
            return statement.value.span
        if isinstance(statement, s.Assign) and statement.name.name == "mask":
            return statement.value.span
    return None


def _tree(text: Source | Tree) -> Tree:
    return parsed(text) if isinstance(text, Source) else text
