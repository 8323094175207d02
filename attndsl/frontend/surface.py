"""The surface tree: the text as written, with unresolved names and no types."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping

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
class Keyword:
    """``NAME=value`` among the arguments of a call."""

    name: Name
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function applied to arguments."""

    name: str
    args: tuple[Expr, ...]
    span: Span
    keywords: tuple[Keyword, ...] = ()
    """Named arguments, which stand behind the others."""


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


def operands(item: Expr) -> tuple[Expr, ...]:
    """The expressions right below ``item``; the condition of a ternary comes first."""
    if isinstance(item, FunctionCall):
        return (*item.args, *(keyword.value for keyword in item.keywords))
    if isinstance(item, Binary):
        return item.left, item.right
    if isinstance(item, Compare):
        return item.operands
    if isinstance(item, Ternary):
        return item.condition, item.yes, item.no
    if isinstance(item, Index):
        return item.indices
    if isinstance(item, Unary):
        return (item.operand,)
    return (item.inner,) if isinstance(item, Group) else ()


def walk(root: Expr) -> Iterator[Expr]:
    """``root`` and all expressions below it; iterative, since long sums are deep trees."""
    stack = [root]
    while stack:
        item = stack.pop()
        yield item
        stack += operands(item)


def changed(root: Expr, change: Callable[[Expr], Expr]) -> Expr:
    """``root`` with ``change`` of each expression in its place, operands first."""
    made: dict[int, Expr] = {}
    for item in reversed(list(walk(root))):
        made[id(item)] = change(_with_operands(item, made))
    return made[id(root)]


def _with_operands(item: Expr, made: Mapping[int, Expr]) -> Expr:
    """``item`` with what its operands have become."""

    def new(*operands: Expr) -> tuple[Expr, ...]:
        return tuple(made[id(operand)] for operand in operands)

    if isinstance(item, FunctionCall):
        keywords = tuple(replace(x, value=made[id(x.value)]) for x in item.keywords)
        return replace(item, args=new(*item.args), keywords=keywords)
    if isinstance(item, Binary):
        return replace(item, left=made[id(item.left)], right=made[id(item.right)])
    if isinstance(item, Compare):
        return replace(item, operands=new(*item.operands))
    if isinstance(item, Ternary):
        condition, yes, no = new(item.condition, item.yes, item.no)
        return replace(item, condition=condition, yes=yes, no=no)
    if isinstance(item, Index):
        return replace(item, indices=new(*item.indices))
    if isinstance(item, Unary):
        return replace(item, operand=made[id(item.operand)])
    return replace(item, inner=made[id(item.inner)]) if isinstance(item, Group) else item


def joined_with(name: str, root: Expr) -> tuple[list[Name], list[Expr]]:
    """Operands that ``and`` joins in ``root``: those that are ``name`` alone, and the others.

    Both are in the order of the text.
    """
    names: list[Name] = []
    others: list[Expr] = []
    stack = [root]
    while stack:
        item = inner = stack.pop()
        while isinstance(inner, Group):
            inner = inner.inner
        if isinstance(inner, Binary) and inner.op == "and":
            stack += [inner.right, inner.left]
        elif isinstance(inner, Name) and inner.name == name:
            names.append(inner)
        else:
            others.append(item)
    return names, others


@dataclass(frozen=True, slots=True)
class Import:
    """``import "FILE"``."""

    file: str
    """Path as written, without quotes."""
    span: Span


@dataclass(frozen=True, slots=True)
class ParamDef:
    """``param NAME: TYPE [= literal]``, or ``= none``."""

    name: Name
    dtype: Name
    default: Expr | None
    span: Span
    optional: bool = False
    """True if calls may leave it out, and nothing stands in its place: ``= none``."""


@dataclass(frozen=True, slots=True)
class TensorDef:
    """``tensor NAME[dim, ...]: TYPE [= none]``."""

    name: Name
    dims: tuple[Expr, ...]
    dtype: Name
    span: Span
    optional: bool = False
    """True if calls may leave it out."""


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


Statement = Import | ParamDef | TensorDef | Define | Assign | Bare


def expressions(statement: Statement) -> tuple[Expr, ...]:
    """The expressions of a statement."""
    if isinstance(statement, Import):
        return ()
    if isinstance(statement, ParamDef):
        return () if statement.default is None else (statement.default,)
    if isinstance(statement, TensorDef):
        return statement.dims
    return (statement.body if isinstance(statement, Define) else statement.value,)


def names_in(statement: Statement) -> set[str]:
    """Names in the expressions of a statement, without the parameters of a function."""
    own = {x.name for x in statement.parameters} if isinstance(statement, Define) else set()
    found = {
        item.name
        for root in expressions(statement)
        for item in walk(root)
        if isinstance(item, Name | Index | FunctionCall)
    }
    return found - own


def lines_of_locals(statements: Iterable[Statement], targets: Container[str]) -> dict[str, Span]:
    """The names that lines bind, such as ``near = ...``, and where each first stands.

    Args:
        statements: Of a program.
        targets: Names that give the program something instead, such as ``mask``.
    """
    found: dict[str, Span] = {}
    for statement in statements:
        if isinstance(statement, Assign) and statement.name.name not in targets:
            found.setdefault(statement.name.name, statement.name.span)
    return found


@dataclass(frozen=True, slots=True)
class Tree:
    """A program."""

    source: Source
    statements: tuple[Statement, ...]


def shown(root: object) -> str:
    """A statement as Python's ``repr`` has it, which a long sum is too deep for."""
    parts: list[str] = []
    stack: list[tuple[bool, object]] = [(False, root)]
    while stack:
        written, item = stack.pop()
        inner: list[tuple[bool, object]] = []
        if written:
            parts.append(str(item))
        elif is_dataclass(item):
            for each in fields(item):
                if each.repr:
                    start = ", " if inner else f"{type(item).__name__}("
                    inner += [(True, f"{start}{each.name}="), (False, getattr(item, each.name))]
            inner.append((True, ")"))
        elif isinstance(item, tuple):
            for number, element in enumerate(item):
                inner += [(True, ", " if number else "("), (False, element)]
            inner.append((True, {0: "()", 1: ",)"}.get(len(item), ")")))
        else:
            parts.append(repr(item))
        stack += reversed(inner)
    return "".join(parts)
