"""Calls of prelude functions that read the score, with an argument made of the score too.

``softcap(c)`` stands for ``c * tanh(score / c)``. So ``softcap(score)`` computes something, which
hardly anybody means. An argument that the score only chooses is none of these:
``softcap(50.0 if score > 0.0 else 30.0)``.

Non-goals: calls of a program's own functions, whose bodies say what they do with the score. In a
body, parameters are not followed: ``def f(c) = softcap(c)`` with ``f(score)`` is not seen.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, NamedTuple

from attndsl.errors import ProgramWarning

from . import surface as s
from .prelude import prelude_function
from .reserved import TARGETS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_DECIDE = ("and", "or", "not")
"""Operators of bools."""
_NO_VALUES = ("bool", "given")
"""Functions whose results are bools."""


class _Function(NamedTuple):
    definition: s.Define
    names: frozenset[str]
    """What its value is made of: some of its parameters, and other names."""


def scored_twice(tree: s.Tree) -> Iterator[ProgramWarning]:
    """A warning for each such call, in the order of the text."""
    own = {x.name.name: x for x in tree.statements if isinstance(x, s.Define)}
    functions = _functions(tree, own)
    scored = {"score"}
    for statement in tree.statements:
        known = scored - _parameters(statement)
        for root in s.expressions(statement):
            calls = [x for x in s.walk(root) if isinstance(x, s.FunctionCall)]
            for call in sorted(calls, key=lambda x: x.span.start):
                found = functions.get(call.name)
                if found is None or call.name in own or not _takes_score(found):
                    continue
                if any(made_of(x, functions) & known for x in _arguments(call)):
                    yield _warning(call, found.definition)
            local = isinstance(statement, s.Assign) and statement.name.name not in TARGETS
            if local and made_of(root, functions) & known:
                assert isinstance(statement, s.Assign)
                scored.add(statement.name.name)


def made_of(root: s.Expr, functions: Mapping[str, _Function]) -> set[str]:
    """The names that a value is made of, without those that only choose it, or are compared."""
    names: set[str] = set()
    stack = [root]
    while stack:
        item = stack.pop()
        if isinstance(item, s.Name):
            names.add(item.name)
        elif isinstance(item, s.Group):
            stack.append(item.inner)
        elif isinstance(item, s.Unary) and item.op not in _DECIDE:
            stack.append(item.operand)
        elif isinstance(item, s.Binary) and item.op not in _DECIDE:
            stack += [item.left, item.right]
        elif isinstance(item, s.Ternary):
            stack += [item.yes, item.no]
        elif isinstance(item, s.FunctionCall) and item.name in functions:
            definition, inner = functions[item.name]
            names |= inner - _parameters(definition)
            stack += _used(item, definition, inner)
        elif isinstance(item, s.FunctionCall) and item.name not in _NO_VALUES:
            stack += item.args[1:] if item.name == "where" else item.args
    return names


def _used(call: s.FunctionCall, definition: s.Define, names: frozenset[str]) -> list[s.Expr]:
    """The arguments of a call that its value is made of."""
    parameters = [x.name for x in definition.parameters]
    given = [*zip(parameters, call.args, strict=False)]
    given += [(x.name.name, x.value) for x in call.keywords]
    return [value for name, value in given if name in names]


def _functions(tree: s.Tree, own: Mapping[str, s.Define]) -> dict[str, _Function]:
    """The functions that a program has or calls; none if some call one another in a circle."""
    definitions = dict(own)
    calls: dict[str, set[str]] = {}
    roots = [x for statement in tree.statements for x in s.expressions(statement)]
    left = {*own, *(name for root in roots for name in _called(root))}
    while left:
        name = left.pop()
        definition = own.get(name) or prelude_function(name)
        if definition is not None:
            definitions[name] = definition
            calls[name] = _called(definition.body)
            left |= calls[name] - calls.keys()
    found: dict[str, _Function] = {}
    try:
        order = list(TopologicalSorter(calls).static_order())
    except CycleError:
        return found
    for name in order:
        if name in definitions:
            body = definitions[name].body
            found[name] = _Function(definitions[name], frozenset(made_of(body, found)))
    return found


def _called(root: s.Expr) -> set[str]:
    return {x.name for x in s.walk(root) if isinstance(x, s.FunctionCall)}


def _warning(call: s.FunctionCall, definition: s.Define) -> ProgramWarning:
    form = f"{call.name}({', '.join(x.name for x in definition.parameters)})"
    return ProgramWarning(
        f"'{call.name}' reads the score itself, and its argument reads the score too",
        call.span,
        f"{form} means {definition.body.span.text}; to change the score before, write a line "
        "'score = ...' above",
    )


def _takes_score(function: _Function) -> bool:
    return "score" in function.names - _parameters(function.definition)


def _parameters(statement: s.Statement) -> set[str]:
    return {x.name for x in statement.parameters} if isinstance(statement, s.Define) else set()


def _arguments(call: s.FunctionCall) -> list[s.Expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]
