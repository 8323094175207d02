"""Text to checked IR. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .declare import Absent, Bound, Declared, ParamSpec, TensorSpec, tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node, Program
    from attndsl.source import Source

__all__ = [
    "Absent",
    "Bound",
    "Declared",
    "ParamSpec",
    "TensorSpec",
    "read",
    "read_locals",
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
