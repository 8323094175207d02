"""Parts of Python's syntax trees that passes over generated modules look at."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch of an ``if``."""

    whole: ast.expr | None
    """Its condition as it is written; None for ``else``."""
    line: int
    """Line of its keyword, from 0; for ``else`` the line of the first statement."""
    column: int
    """Column of the same place."""
    body: list[ast.stmt]
    test: bool | ast.expr = True
    """Rest of the condition that is left to decide; True or False if nothing is left."""


_MARKS = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


def children(node: ast.AST) -> Iterator[ast.AST]:
    """The expressions and statements of ``node``, in the order of the text for most."""
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            for part in value:
                if isinstance(part, ast.AST) and not isinstance(part, _MARKS):
                    yield part
        elif isinstance(value, ast.AST) and not isinstance(value, _MARKS):
            yield value


def reads(node: ast.AST, name: str) -> bool:
    """Return True if ``node``, or something under it, reads the local ``name``."""
    if isinstance(node, ast.Name):
        return node.id == name and isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return node.target.id == name or reads(node.value, name)
    return any(reads(part, name) for part in children(node))


def branches_of(node: ast.If) -> Iterator[Branch]:
    """The branches of ``node``, with nothing decided."""
    while True:
        yield Branch(node.test, node.lineno - 1, node.col_offset, node.body, node.test)
        match node.orelse:
            case []:
                return
            # The column of an ``elif`` is that of its ``if``.
            case [ast.If(col_offset=column) as other] if column == node.col_offset:
                node = other
            case [first, *_]:
                yield Branch(None, first.lineno - 1, node.col_offset, node.orelse)
                return


def names_of(item: ast.stmt) -> list[str]:
    """Names that a statement of a module defines."""
    match item:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [alias.asname or alias.name.partition(".")[0] for alias in names]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def defined(statement: ast.stmt) -> list[str]:
    """The locals that a statement defines."""
    match statement:
        case ast.Assign(targets=[target]):
            pass
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.For(target=target):
            pass
        case _:
            return []
    if isinstance(target, ast.Name):
        return [target.id]
    return [part.id for part in ast.walk(target) if isinstance(part, ast.Name)]


def stored(body: list[ast.stmt]) -> Iterator[str]:
    """The locals that statements define, those under them included."""
    for statement in body:
        yield from defined(statement)
        for inner in ("body", "orelse"):
            yield from stored(getattr(statement, inner, []))


def called_function(node: ast.AST) -> str | None:
    """Name of the function that ``node``, a call or what a warpgroup runs, calls by name."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name
        case ast.Tuple(elts=[ast.Name(id=name), ast.Tuple()]):
            return name
    return None


def arguments_of(node: ast.AST) -> list[ast.expr | ast.keyword]:
    """The arguments of what :func:`called_function` knows, in order."""
    match node:
        case ast.Call():
            return [*node.args, *node.keywords]
        case ast.Tuple(elts=[_, ast.Tuple(elts=arguments)]):
            return [*arguments]
    raise TypeError(node)
