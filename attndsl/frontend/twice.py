"""Calls of prelude functions that read the score, with an argument that reads the score too.

``softcap(c)`` stands for ``c * tanh(score / c)``. So ``softcap(score)`` computes something, which
hardly anybody means. Non-goals: arguments of a program's own functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import ProgramWarning

from . import surface as s
from .prelude import prelude_function
from .reserved import TARGETS

if TYPE_CHECKING:
    from collections.abc import Container, Iterator


def scored_twice(tree: s.Tree) -> Iterator[ProgramWarning]:
    """A warning for each such call, in the order of the text."""
    own = {x.name.name for x in tree.statements if isinstance(x, s.Define)}
    scored = {"score"}
    for statement in tree.statements:
        known = scored - _parameters(statement)
        for root in s.expressions(statement):
            calls = [x for x in s.walk(root) if isinstance(x, s.FunctionCall)]
            by_name = {x.name: prelude_function(x.name) for x in calls if x.name not in own}
            found = {name: x for name, x in by_name.items() if x is not None and _takes_score(x)}
            for call in sorted(calls, key=lambda x: x.span.start):
                within = [x for argument in _arguments(call) for x in s.walk(argument)]
                if call.name in found and any(_reads(x, known, found) for x in within):
                    yield _warning(call, found[call.name])
            reads = any(_reads(x, known, found) for x in s.walk(root))
            if reads and isinstance(statement, s.Assign) and statement.name.name not in TARGETS:
                scored.add(statement.name.name)


def _warning(call: s.FunctionCall, definition: s.Define) -> ProgramWarning:
    form = f"{call.name}({', '.join(x.name for x in definition.parameters)})"
    return ProgramWarning(
        f"'{call.name}' reads the score itself, and its argument reads the score too",
        call.span,
        f"{form} means {definition.body.span.text}; to change the score before, write a line "
        "'score = ...' above",
    )


def _reads(item: s.Expr, names: Container[str], functions: Container[str]) -> bool:
    """Whether ``item`` itself is a name, or a call of a function, that reads the score."""
    if isinstance(item, s.FunctionCall):
        return item.name in functions
    return isinstance(item, s.Name) and item.name in names


def _takes_score(definition: s.Define) -> bool:
    own = _parameters(definition)
    return "score" not in own and any(_reads(x, ("score",), ()) for x in s.walk(definition.body))


def _parameters(statement: s.Statement) -> set[str]:
    return {x.name for x in statement.parameters} if isinstance(statement, s.Define) else set()


def _arguments(call: s.FunctionCall) -> list[s.Expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]
