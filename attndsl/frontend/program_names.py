"""The names of one program: what it binds, and what it calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import absent_names, contraction
from . import builtin_functions as functions
from . import surface as s
from .parse import lexer
from .prelude import prelude_function, prelude_names
from .reserved_names import ALWAYS, TARGETS, is_reserved

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from attndsl.source import Span

_FORMS = frozenset({"softmax", "dropout"})
"""Calls that stand for themselves in weights, whatever functions a program has."""


@dataclass(frozen=True, slots=True)
class ProgramNames:
    """The names of a program."""

    captures: Mapping[str, s.ParamDef | s.TensorDef]
    """Declarations of the params and tensors that a call gives, by name."""
    dims: tuple[str, ...]
    """Sizes that tensors introduce."""
    locals: tuple[str, ...]
    functions: Mapping[str, s.Define]
    """The program's own functions."""
    foreign: frozenset[str]
    """Functions that are not its own and that it calls, directly or through the prelude."""
    replaced: frozenset[str]
    """Its own functions that stand in for others within prelude functions that it calls."""
    written: frozenset[str]
    """All names in its text."""


def names_of(tree: s.Tree, spans: Iterable[Span], bound: Collection[str]) -> ProgramNames:
    """The names of a program without imports.

    Args:
        tree: The program.
        spans: Of its statements.
        bound: Params that have a value for good.
    """
    statements = tree.statements
    captures = {
        x.name.name: x
        for x in statements
        if isinstance(x, s.ParamDef | s.TensorDef) and x.name.name not in bound
    }
    known = {*captures, *bound, *ALWAYS}
    dims = (dim for x in statements if isinstance(x, s.TensorDef) for dim in x.dims)
    found = {x.name.name: x for x in statements if isinstance(x, s.Define)}
    assigned = (x.name.name for x in statements if isinstance(x, s.Assign))
    foreign, replaced = _called(statements, found)
    tokens = (token for span in spans for token in lexer().lex(span.text))
    return ProgramNames(
        captures,
        tuple(
            dict.fromkeys(
                dim.name for dim in dims if isinstance(dim, s.Name) and dim.name not in known
            )
        ),
        tuple(name for name in assigned if name not in TARGETS),
        found,
        foreign,
        replaced,
        frozenset(str(token) for token in tokens if token.type == "NAME"),
    )


def is_free(name: str) -> bool:
    """Return True if ``name`` means nothing before a program binds it."""
    called = (
        _FORMS,
        functions.NAMES,
        functions.REDUCTIONS,
        (contraction.NAME, absent_names.NAME),
        prelude_names(),
    )
    return not is_reserved(name) and not any(name in names for names in called)


def forms(statement: s.Statement) -> tuple[s.FunctionCall, ...]:
    """The ``dropout(...)`` and ``softmax(...)`` of weights, which no function replaces."""
    if not isinstance(statement, s.Assign) or statement.name.name != "weights":
        return ()
    found: list[s.FunctionCall] = []
    written: s.Expr | None = statement.value
    while isinstance(written, s.FunctionCall) and written.name in _FORMS:
        found.append(written)
        written = written.args[0] if written.name == "dropout" and len(found) == 1 else None
    return tuple(found)


def _called(
    statements: Iterable[s.Statement], own: Mapping[str, s.Define]
) -> tuple[frozenset[str], frozenset[str]]:
    """``foreign`` and ``replaced`` of :class:`ProgramNames`."""
    calls: set[str] = set()
    for statement in statements:
        apart = set(map(id, forms(statement)))
        for root in s.expressions(statement):
            calls |= {x.name for x in _calls(root) if id(x) not in apart}
    foreign: set[str] = set()
    replaced: set[str] = set()
    left = sorted(calls - own.keys())
    while left:
        name = left.pop()
        foreign.add(name)
        function = prelude_function(name)
        inner = {x.name for x in _calls(function.body)} if function is not None else set()
        replaced |= inner & own.keys()
        left += sorted(inner - own.keys() - foreign)
    return frozenset(foreign), frozenset(replaced)


def _calls(root: s.Expr) -> list[s.FunctionCall]:
    return [x for x in s.walk(root) if isinstance(x, s.FunctionCall)]
