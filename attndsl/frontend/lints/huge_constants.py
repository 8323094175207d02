"""Large finite numbers where a score is meant to be masked: ``where(q >= kv, score, -1e9)``.

Elsewhere such numbers stand for -inf, since an infinite score made NaN there. Here -inf is a mask.
A finite number is none: its pairs are computed, and a row that has no other pairs has the weights
of what fp32 leaves of such scores: -1e9 + 3 is -1e9 there, and all of these are alike.

Non-goals: numbers that a call or a configuration gives; elements of tensors; sums with ints, which
are positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import ProgramWarning

from .. import surface as s

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attndsl.source import Span

LEAST = 1e5
"""Sizes from which fp32 rounds scores to a hundredth."""


def large_numbers(tree: s.Tree) -> Iterator[ProgramWarning]:
    """A warning for each such number, in the order of the text.

    Weights of the program's own have no log-sum-exp, and are 0 there.
    """
    named = {x.name.name for x in tree.statements if isinstance(x, s.Assign)}
    if "weights" in named:
        return
    for statement in tree.statements:
        if isinstance(statement, s.Assign) and statement.name.name == "mask":
            continue
        roots = s.expressions(statement)
        spans = {span for root in roots for x in s.walk(root) for span in _chosen_or_added(x)}
        yield from map(_warning, sorted(spans, key=lambda span: span.start))


def _chosen_or_added(item: s.Expr) -> list[Span]:
    """Spans of the large negative numbers that ``item`` chooses or adds."""
    parts: list[tuple[s.Expr, int]] = []
    if isinstance(item, s.FunctionCall) and item.name == "where":
        parts = [(x, -1) for x in item.args[1:]]
    elif isinstance(item, s.Ternary):
        parts = [(item.yes, -1), (item.no, -1)]
    elif isinstance(item, s.Binary) and item.op in ("+", "-"):
        right = 1 if item.op == "-" else -1
        parts = [(item.left, -1), (item.right, right)]
    is_sum = isinstance(item, s.Binary)
    return [part.span for part, sign in parts if sign * _size(part, floats=is_sum) >= LEAST]


def _size(item: s.Expr, floats: bool) -> float:
    """The number that an expression is, or its largest factor with its sign; 0 for all others.

    Products are as long as a text, so that no function calls itself for their factors.

    Args:
        item: The expression.
        floats: Whether ints alone make no such number.
    """
    largest, sign, is_float = 0.0, 1, False
    stack = [item]
    while stack:
        part = stack.pop()
        if isinstance(part, s.Group):
            stack.append(part.inner)
        elif isinstance(part, s.Unary) and part.op == "-":
            stack.append(part.operand)
            sign = -sign
        elif isinstance(part, s.Binary) and part.op == "*":
            stack += [part.left, part.right]
        elif isinstance(part, s.Number):
            is_float |= not part.text.isdigit()
            largest = max(largest, float(part.text))
        elif isinstance(part, s.FunctionCall):
            is_float |= part.name == "float"
    return sign * largest if is_float or not floats else 0.0


def _warning(span: Span) -> ProgramWarning:
    return ProgramWarning(
        f"{span.text} is a number and no mask: its pairs are computed, and a row that has no other "
        "pairs weighs them alike, since fp32 rounds such scores",
        span,
        "write -inf, as in where(q >= kv, score, -inf), or a line 'mask = ...': tiles without live "
        "pairs are not visited then",
    )
