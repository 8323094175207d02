"""Simplification of conditions where some names have known values."""

from __future__ import annotations

import ast
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Values = dict[str, Any]
"""Names of constants, and what they are."""

_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}


def decide(test: ast.expr, values: Values) -> bool | ast.expr:
    """Decide ``test``: True, False, or the expression left to find out at run time.

    What is left consists of nodes of ``test``, under ``and``, ``or`` and ``not``; it is ``test``
    itself if nothing is known. It is true where ``test`` is, and may be another true value.
    """
    match test:
        case ast.Constant(value=bool(value)):
            return value
        case ast.Name(id=name) if name in values:
            return bool(values[name])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            found = decide(operand, values)
            if isinstance(found, bool):
                return not found
            return test if found is operand else ast.UnaryOp(test.op, found)
        case ast.BoolOp():
            return _decide_several(test, values)
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
            sides = [_value(side, values) for side in (left, right)]
            if all(known for known, _ in sides):
                return bool(_COMPARISONS[type(op)](*(value for _, value in sides)))
    return test


def _decide_several(test: ast.BoolOp, values: Values) -> bool | ast.expr:
    end = isinstance(test.op, ast.Or)
    rest: list[ast.expr] = []
    for value in test.values:
        found = decide(value, values)
        if found is end:
            # What stands before it is computed for nothing, unless that does something.
            return end if all(map(is_plain, rest)) else test
        if not isinstance(found, bool):
            rest.append(found)
    if not rest:
        return not end
    if _has_opposites(rest):
        return end
    if len(rest) == 1:
        return rest[0]
    same = len(rest) == len(test.values) and all(
        a is b for a, b in zip(rest, test.values, strict=True)
    )
    return test if same else ast.BoolOp(test.op, rest)


def _has_opposites(parts: list[ast.expr]) -> bool:
    """Return True if a name and the same name's opposite are among ``parts``."""
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return any(
        isinstance(part, ast.UnaryOp)
        and isinstance(part.operand, ast.Name)
        and part.operand.id in names
        for part in parts
    )


def _value(side: ast.expr, values: Values) -> tuple[bool, Any]:
    """Return (True, value) if one side of a comparison has a known value, else (False, None).

    ``True`` is none: what a branch tells of a constant is that it is true, which 2 is as well.
    """
    if isinstance(side, ast.Constant):
        return True, side.value
    if isinstance(side, ast.Name) and not isinstance(values.get(side.id, True), bool):
        return True, values[side.id]
    return False, None


def is_plain(node: ast.AST) -> bool:
    """Return True if ``node`` calls nothing: leaving it out changes nothing but its value."""
    return not any(isinstance(part, ast.Call) for part in ast.walk(node))
