"""Calls of version 0.1, in which ``softcap``, ``alibi`` and ``rel_bias`` read the score themselves.

``softcap(50.0)`` is one: it does not say what it limits. A bias is one where nothing else of the
line reads the score: ``score = alibi()`` would lose it. Names and functions of the program that the
line reads are part of the line.

Non-goals: a bias beside the score, ``score = score + alibi()``: it added the score twice then, and
is right now; types.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from attndsl.errors import TypeMismatchError

from . import surface as s
from .reachable_names import Reached, is_target

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from attndsl.source import Span

_BIASES = frozenset({"alibi", "rel_bias"})
_LIMIT = "softcap"
_NAMES = frozenset({*_BIASES, _LIMIT})
_SCORE = "score"
_ARITHMETIC = frozenset({"+", "-", "*", "/", "//", "%", "**"})
_COMMENT = re.compile(r"#[^\n]*")
_SHOWN = 80
"""Characters of a new line that a hint gives."""
_COMMAND = "'attndsl fmt --upgrade' rewrites files of version 0.1"


class Insertion(NamedTuple):
    """Text to put into a program."""

    span: Span
    """Empty: where."""
    text: str

    @property
    def edit(self) -> tuple[int, str]:
        """The place in its source, and the text."""
        return self.span.start, self.text


class Former(NamedTuple):
    """The calls of version 0.1 in a program."""

    calls: Mapping[int, tuple[s.FunctionCall, ...]]
    """Calls of each statement, by its number, in the order of the text."""
    unclear: tuple[s.FunctionCall, ...]
    """Biases that may be of either version, in a program that has calls of 0.1."""


def former_calls(tree: s.Tree) -> Former:
    """The calls of version 0.1 in a program."""
    own = {x.name.name for x in tree.statements if isinstance(x, s.Define)}
    limits: dict[int, list[s.FunctionCall]] = {}
    biases: dict[int, list[s.FunctionCall]] = {}
    # Most programs have none of these names.
    mentioned = any(name in tree.source.text for name in _NAMES)
    for number, statement in enumerate(tree.statements if mentioned else ()):
        for call in _calls(statement):
            if call.name == _LIMIT and call.name not in own and _lacks_score(call):
                limits.setdefault(number, []).append(call)
            elif call.name in _BIASES and call.name not in own and not _is_wrong_alibi(call):
                biases.setdefault(number, []).append(call)
    alone, beside = _roles(tree) if biases else (set(), set())
    if not limits and not biases.keys() & (alone - beside):
        return Former({}, ())
    found = {
        number: limits.get(number, []) + (biases.get(number, []) if number not in beside else [])
        for number in range(len(tree.statements))
    }
    unclear = [call for number in sorted(beside) for call in biases.get(number, ())]
    return Former(
        {
            number: tuple(sorted(calls, key=lambda call: call.span.start))
            for number, calls in found.items()
            if calls
        },
        tuple(unclear),
    )


def _roles(tree: s.Tree) -> tuple[set[int], set[int]]:
    """The statements that lines without the score are made of, and those of lines with it."""
    reached = Reached(tree)
    alone: set[int] = set()
    beside: set[int] = set()
    for number, statement in enumerate(tree.statements):
        if _SCORE in reached.names(statement):
            beside |= {number, *reached.numbers(statement)}
        elif is_target(statement):
            alone |= {number, *reached.numbers(statement)}
    return alone, beside


def modern(tree: s.Tree) -> tuple[s.Tree, list[TypeMismatchError]]:
    """``tree`` with calls as they are meant, and an error for each statement that has others."""
    former = former_calls(tree).calls
    if not former:
        return tree, []
    statements = list(tree.statements)
    errors = []
    for number, calls in former.items():
        errors.append(_error(statements[number], calls))
        statements[number] = _rewritten(_meant(statements[number]), calls)
    return replace(tree, statements=tuple(statements)), errors


def insertions(statement: s.Statement, calls: Collection[s.FunctionCall]) -> list[Insertion]:
    """The insertions that make calls of 0.1 in ``statement`` calls of today."""
    ends = {id(x) for root in s.expressions(statement) for x in _ends(root)}
    found = []
    for call in calls:
        if call.name == _LIMIT:
            (limit,) = call.args or (x.name for x in call.keywords)
            found.append(_at(limit.span, limit.span.start, "score, "))
        elif id(call) in ends:
            found.append(_at(call.span, call.span.start, "score + "))
        else:
            found.append(_at(call.span, call.span.start, "(score + "))
            found.append(_at(call.span, call.span.end, ")"))
    return found


def _at(span: Span, place: int, text: str) -> Insertion:
    return Insertion(replace(span, start=place, end=place), text)


def inserted(text: str, found: Iterable[tuple[int, str]], start: int = 0) -> str:
    """``text``, which begins at ``start`` of a source, with texts put in at places of the source.

    Of two texts for one place, that of the call around the other comes first.
    """
    parts, last = [], 0
    for place, words in sorted(found, key=lambda each: each[0]):
        parts += [text[last : place - start], words]
        last = place - start
    return "".join([*parts, text[last:]])


def hides_score(statement: s.Statement) -> bool:
    """Tell whether a statement is a function whose parameter hides the score."""
    return isinstance(statement, s.Define) and any(
        parameter.name == _SCORE for parameter in statement.parameters
    )


def _calls(statement: s.Statement) -> Iterator[s.FunctionCall]:
    for root in s.expressions(statement):
        yield from (x for x in s.walk(root) if isinstance(x, s.FunctionCall))


def _lacks_score(call: s.FunctionCall) -> bool:
    """Tell whether a limit has its limit alone."""
    named = [x.name.name for x in call.keywords]
    return len(call.args) + len(named) == 1 and named in ([], ["c"])


def _is_wrong_alibi(call: s.FunctionCall) -> bool:
    """Return True if a call of ``alibi`` has arguments, which no version allows."""
    return call.name == "alibi" and bool(call.args or call.keywords)


def _ends(root: s.Expr) -> Iterator[s.Expr]:
    """Expressions below ``root`` in whose place a sum may stand without brackets."""
    stack = [(root, True)]
    while stack:
        item, is_end = stack.pop()
        if is_end:
            yield item
        if isinstance(item, s.Group):
            stack.append((item.inner, True))
        elif isinstance(item, s.FunctionCall):
            stack += [(x, True) for x in (*item.args, *(x.value for x in item.keywords))]
        elif isinstance(item, s.Index):
            stack += [(x, True) for x in item.indices]
        elif isinstance(item, s.Ternary):
            stack += [(x, True) for x in (item.condition, item.yes, item.no)]
        elif isinstance(item, s.Compare):
            stack += [(x, True) for x in item.operands]
        elif isinstance(item, s.Binary):
            logical = item.op in ("and", "or")
            first = is_end and item.op in ("+", "-")
            stack += [(item.left, logical or first), (item.right, logical)]
        elif isinstance(item, s.Unary):
            stack.append((item.operand, item.op == "not"))


def _meant(statement: s.Statement) -> s.Statement:
    """A mask that is a number is a score."""
    if isinstance(statement, s.Assign) and statement.name.name == "mask":
        value = statement.value
        while isinstance(value, s.Group):
            value = value.inner
        number = isinstance(value, s.Binary | s.Unary) and value.op in _ARITHMETIC
        if number or (isinstance(value, s.FunctionCall) and value.name in _NAMES):
            return replace(statement, name=replace(statement.name, name=_SCORE))
    return statement


def _rewritten(statement: s.Statement, calls: Collection[s.FunctionCall]) -> s.Statement:
    """``statement`` with calls of today in place of ``calls``."""
    places = {call.span for call in calls}

    def change(item: s.Expr) -> s.Expr:
        if not isinstance(item, s.FunctionCall) or item.span not in places:
            return item
        score = s.Name(_SCORE, item.span)
        if item.name == _LIMIT:
            return replace(item, args=(score, *item.args))
        return s.Binary("+", score, item, item.span)

    if isinstance(statement, s.Define):
        return replace(statement, body=s.changed(statement.body, change))
    if isinstance(statement, s.Assign | s.Bare):
        return replace(statement, value=s.changed(statement.value, change))
    return statement


def _error(statement: s.Statement, calls: Sequence[s.FunctionCall]) -> TypeMismatchError:
    first = calls[0]
    shown = " ".join(first.span.text.split())[:_SHOWN]
    message = (
        f"'{shown}' does not say what it limits"
        if first.name == _LIMIT
        else f"'{shown}' is a bias, and the score is not read here"
    )
    if hides_score(statement):
        return TypeMismatchError(message, first.span, "rename the parameter 'score', and read it")
    if first.name == _LIMIT and any(isinstance(x, s.Name) and x.name == _SCORE for x in first.args):
        return TypeMismatchError(
            f"'{shown}' has no limit", first.span, "write 'softcap(score, 30.0)', with your limit"
        )
    meant = _meant(statement)
    edits = [each.edit for each in insertions(meant, calls)]
    line = inserted(meant.span.text, edits, meant.span.start)
    if meant is not statement:
        line = _SCORE + line.removeprefix("mask")
    line = " ".join(_COMMENT.sub("", line).split())
    line = f"def {line}" if isinstance(statement, s.Define) else line
    if len(line) > _SHOWN:
        line = "softcap(score, ...)" if first.name == _LIMIT else f"score + {first.name}(...)"
    return TypeMismatchError(message, first.span, f"write '{line}'; {_COMMAND}")
