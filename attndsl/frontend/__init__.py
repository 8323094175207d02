"""Text to checked IR. Never imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import NameResolutionError

from .declare import CALL_ARGUMENTS, Bound, Declared, ParamSpec, TensorSpec, tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from attndsl.ir import ParamDecl, Program, TensorDecl
    from attndsl.source import Source

__all__ = ["Bound", "Declared", "ParamSpec", "TensorSpec", "check_call_names", "read", "tensor"]


def read(source: Source, declared: Mapping[str, Declared]) -> Program:
    """The checked program of ``source``.

    Raises:
        AttnDSLError: All that is wrong with it.
    """
    from .check import check
    from .parse import parse

    return check(parse(source), declared)


def check_call_names(program: Program, valued: Collection[str] = ()) -> None:
    """Refuse tensors and params that a call cannot be given, since it has arguments of their names.

    Args:
        program: The program.
        valued: Names of tensors and params that have a value without a call's.

    Raises:
        NameResolutionError: Names the first of them.
    """
    declared: list[TensorDecl | ParamDecl] = [*program.tensors, *program.params]
    for decl in declared:
        if decl.name in CALL_ARGUMENTS and decl.name not in valued:
            raise NameResolutionError(
                f"'{decl.name}' is an argument of every call and cannot be given as a capture",
                decl.span,
                "choose another name",
            )
