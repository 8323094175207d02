"""The surface tree: the text as written, with unresolved names and no types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attndsl.source import Source, Span


@dataclass(frozen=True, slots=True)
class Number:
    """A literal; ``text`` as written, without underscores."""

    text: str
    span: Span


@dataclass(frozen=True, slots=True)
class Name:
    """A name used as a value."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Unary:
    """``-``, ``+``, ``~`` or ``not``."""

    op: str
    operand: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Binary:
    """An operator between two operands, ``and`` and ``or`` included."""

    op: str
    left: Expr
    right: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Compare:
    """A chain of comparisons: one more operand than operators."""

    ops: tuple[str, ...]
    operands: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Ternary:
    """``yes if condition else no``."""

    condition: Expr
    yes: Expr
    no: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function applied to arguments."""

    name: str
    args: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Index:
    """An element of a captured tensor, or a row of it where the last index is :class:`Whole`."""

    name: str
    indices: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Whole:
    """``:`` in place of an index: all elements along the dim."""

    span: Span


@dataclass(frozen=True, slots=True)
class Group:
    """An expression in parentheses."""

    inner: Expr
    span: Span


Expr = Number | Name | Unary | Binary | Compare | Ternary | FunctionCall | Index | Whole | Group


@dataclass(frozen=True, slots=True)
class Param:
    """``param NAME: TYPE [= literal]``."""

    name: Name
    dtype: Name
    default: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class Tensor:
    """``tensor NAME[dim, ...]: TYPE``."""

    name: Name
    dims: tuple[Expr, ...]
    dtype: Name
    span: Span


@dataclass(frozen=True, slots=True)
class Define:
    """``def NAME(parameter, ...) = body``."""

    name: Name
    parameters: tuple[Name, ...]
    body: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Assign:
    """``NAME = value``."""

    name: Name
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Bare:
    """A program of one expression."""

    value: Expr
    span: Span


Statement = Param | Tensor | Define | Assign | Bare


@dataclass(frozen=True, slots=True)
class Tree:
    """A program."""

    source: Source
    statements: tuple[Statement, ...]
