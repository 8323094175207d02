"""Defects of a kernel's text, by what is called and computed there and not by how it is written.

A pattern is Python. Names in it that begin with an underscore stand for any expression, ``*_rest``
for any further arguments, and ``...`` for what the replacement does not ask for: at the end of
arguments for all further ones, and alone in a block for any statements. A name also stands for a
record's field: ``k_full`` matches ``tiles.k_full``. A replacement takes over what names stood for.

What changes nothing raises LookupError: an AssertionError would count as a defect that was noticed.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Mutation = Callable[[str], str]
    Found = dict[str, Any]


def swap(pattern: str, by: str, within: str | None = None, nth: int | None = None) -> Mutation:
    """Replace an expression or a statement.

    Args:
        pattern: What is replaced.
        by: What stands there then.
        within: The only function where it is; None for anywhere.
        nth: The only one that is, of those in the text or in the function, from 1; None for all.
    """
    old = _parsed(pattern)
    new = _parsed(by) if isinstance(old, ast.expr) else _statement(by)

    def replace(node: ast.AST, found: Found) -> list[ast.AST]:
        return [_filled(new, found)]

    return _Mutation(old, replace, within, nth)


def drop(pattern: str, within: str | None = None, nth: int | None = None) -> Mutation:
    """Leave out statements, mostly calls; arguments as of :func:`swap`."""
    return _Mutation(_statement(pattern), lambda *_: [ast.Pass()], within, nth)


def before(pattern: str, added: str, within: str | None = None, nth: int | None = None) -> Mutation:
    """Put the statement ``added`` before that of ``pattern``; arguments as of :func:`swap`."""
    new = _statement(added)

    def insert(node: ast.AST, found: Found) -> list[ast.AST]:
        return [_filled(new, found), node]

    return _Mutation(_statement(pattern), insert, within, nth)


def early(pattern: str, to: str, within: str | None = None) -> Mutation:
    """Move a statement, the same wherever it is, to before those of the pattern ``to``."""
    old = _statement(pattern)

    def change(text: str) -> str:
        rest = drop(pattern)(text)
        moved = next(node for node in ast.walk(ast.parse(text)) if _matches(old, node, {}))
        return before(to, ast.unparse(moved), within)(rest)

    return change


def with_constants(text: str, values: Mapping[str, Any]) -> str:
    """The text with other values of the module's constants.

    Raises:
        LookupError: The module has no constant of a name.
    """
    if not values:
        return text
    tree = ast.parse(text)
    known = dict(_constants(tree))
    for name, value in values.items():
        call = known[name].value
        assert isinstance(call, ast.Call)
        call.args = [ast.Constant(value)]
    return ast.unparse(tree)


def set_constants(tree: ast.Module, values: dict[str, ast.expr]) -> None:
    """Give the module's constants of these names other values, from where they are defined on."""
    for name, statement in _constants(tree):
        if name in values:
            statement.value = values[name]


@lru_cache(256)
def number_of(text: str, pattern: str) -> int:
    """How often a pattern is in the text."""
    old = _parsed(pattern)
    return sum(_matches(old, node, {}) for node in ast.walk(ast.parse(text)))


def is_noticed(differs: Callable[[int], bool], seeds: int) -> bool:
    """Whether a run with one of so many seeds fails in the machine, or finds what ``differs``."""

    def noticed(seed: int) -> bool:
        try:
            return differs(seed)
        except AssertionError:
            return True

    return any(map(noticed, range(1, seeds + 1)))


def _constants(tree: ast.Module) -> Iterator[tuple[str, ast.Assign | ast.AnnAssign]]:
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                yield name, statement


def _statement(pattern: str) -> ast.stmt:
    (statement,) = ast.parse(pattern).body
    return statement


def _parsed(pattern: str) -> ast.AST:
    """An expression where the pattern is one."""
    statement = _statement(pattern)
    return statement.value if isinstance(statement, ast.Expr) else statement


@dataclass(frozen=True, eq=False)
class _Mutation:
    pattern: ast.AST
    change: Callable[[ast.AST, Found], list[ast.AST]]
    within: str | None
    nth: int | None

    def __call__(self, text: str) -> str:
        return _mutated(self, text)


@cache
def _mutated(mutation: _Mutation, text: str) -> str:
    tree = ast.parse(text)
    inside = [
        node
        for node in tree.body
        if mutation.within is None
        or (isinstance(node, ast.FunctionDef) and node.name == mutation.within)
    ]
    changer = _Changer(mutation)
    for node in inside:
        changer.visit(node)
    if not changer.changed:
        raise LookupError(f"{ast.unparse(mutation.pattern)} within {mutation.within}")
    return ast.unparse(ast.fix_missing_locations(tree))


class _Changer(ast.NodeTransformer):
    def __init__(self, mutation: _Mutation) -> None:
        self.mutation = mutation
        self.seen = 0
        self.changed = False

    def visit(self, node: ast.AST) -> Any:
        found: Found = {}
        if not _matches(self.mutation.pattern, node, found):
            return self.generic_visit(node)
        self.seen += 1
        if self.mutation.nth not in (None, self.seen):
            return node
        self.changed = True
        new = self.mutation.change(node, found)
        return new if isinstance(node, ast.stmt) else new[0]


def _matches(pattern: Any, node: Any, found: Found) -> bool:
    """Whether ``node`` is as ``pattern`` says; names it stands for are noted in ``found``."""
    if _is_any(pattern):
        return True
    if isinstance(pattern, ast.Name):
        if not pattern.id.startswith("_") and _last_name(node) != pattern.id:
            return False
        found[pattern.id] = node
        return isinstance(node, ast.expr)
    if isinstance(pattern, list):
        return isinstance(node, list) and _match_lists(pattern, node, found)
    if not isinstance(pattern, ast.AST):
        return pattern == node
    if type(pattern) is not type(node):
        return False
    return all(
        _matches(getattr(pattern, field), getattr(node, field), found)
        for field in pattern._fields
        if field not in ("ctx", _left_open(pattern))
    )


def _left_open(pattern: ast.AST) -> str | None:
    """What is behind ``...``: a call's arguments by name, or what is done otherwise."""
    if isinstance(pattern, ast.Call) and pattern.args and _is_any(pattern.args[-1]):
        return "keywords"
    return "orelse" if isinstance(pattern, ast.If) and _is_any(pattern.body[-1]) else None


def _match_lists(pattern: list[Any], nodes: list[Any], found: Found) -> bool:
    last = pattern[-1] if pattern else None
    rest = isinstance(last, ast.Starred) and isinstance(last.value, ast.Name)
    if rest or _is_any(last):
        pattern = pattern[:-1]
        if len(nodes) < len(pattern):
            return False
        if rest:
            found[last.value.id] = nodes[len(pattern) :]
        nodes = nodes[: len(pattern)]
    return len(pattern) == len(nodes) and all(
        _matches(one, node, found) for one, node in zip(pattern, nodes, strict=True)
    )


def _is_any(pattern: Any) -> bool:
    if isinstance(pattern, ast.Expr):
        pattern = pattern.value
    return isinstance(pattern, ast.Constant) and pattern.value is ...


def _last_name(node: Any) -> str | None:
    """That of a variable, or of a record's field."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and _last_name(node.value) is not None:
        return node.attr
    return None


class _Filler(ast.NodeTransformer):
    def __init__(self, found: Found) -> None:
        self.found = found

    def visit_Name(self, node: ast.Name) -> Any:
        return copy.deepcopy(self.found.get(node.id, node))

    def visit_Starred(self, node: ast.Starred) -> Any:
        return copy.deepcopy(self.found[node.value.id])


def _filled(new: ast.AST, found: Found) -> ast.AST:
    return _Filler(found).visit(copy.deepcopy(new))
