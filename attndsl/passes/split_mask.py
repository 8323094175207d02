"""Turn ``where(c, x, -inf)`` in a score into a mask.

A pair for which ``where`` chooses -inf is dead, as if a mask said so. Each score line gives up its
masks before the next line reads it: later lines see ``x``, and a dead pair stays dead. Within a
line, sums, products, ``min``, rounding and an outer ``where`` keep -inf. An operation that would
make a number of -inf is refused, since the pair would take part again without a word.

Non-goals: -inf that arises from run-time values, which is a number like any other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from attndsl.errors import TypeMismatchError
from attndsl.ir import (
    SCORE,
    DType,
    Line,
    Node,
    Op,
    const,
    node,
    param,
    substitute,
    substitute_on,
    toposort,
)

from .simplify import simplify_node

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from attndsl.ir import Program

TRUE, FALSE, ZERO = const(True), const(False), const(0.0)
BEFORE = param("$before", DType.FLOAT)
"""The line before, while a score line is looked at."""
_ZERO_OF_MINUS_INFINITY = frozenset({Op.EXP, Op.EXP2, Op.SIGMOID, Op.RELU, Op.SOFTPLUS})
"""Operations whose value at -inf is 0."""


def split_mask(program: Program) -> Program:
    """``program`` without score lines, and with their masks joined to its mask.

    Raises:
        TypeMismatchError: An operation would make a number of -inf, or a line leaves out the score
            of pairs that a line before has masked.
    """
    lines = _Lines()
    for line in program.lines or (Line(program.score),):
        lines.add(line)
    if program.weights is not None:
        _check_weights(Line(simplify_node(program.weights), program.weights_span))
    mask = None if program.mask is None else substitute(program.mask, lines.values)
    for condition in lines.alive:
        mask = condition if mask is None else node(Op.AND, mask, condition)
    return replace(program, score=lines.score, mask=mask, lines=())


@dataclass(slots=True)
class _Lines:
    """Score lines, split one after the other.

    A line is looked at with ``BEFORE`` in place of the score before it. What is found out about a
    node is kept for the lines after, without what is made of ``BEFORE``: there it is another score.
    So no line goes over the lines before it again, and the time grows with the length of the text.
    """

    score: Node = SCORE
    """The score after these lines, for live pairs."""
    alive: list[Node] = field(default_factory=list)
    """BOOL: the mask of each line that has one."""
    values: dict[Node, Node] = field(default_factory=dict)
    """``score`` after each line, by the line's expression."""
    _before: Node | None = None
    """Expression of the line before, if a line after it may read it as ``BEFORE``."""
    _known: dict[Node, Node] = field(default_factory=dict)
    """Nodes of lines as written, with ``values`` in place of lines."""
    _simple: dict[Node, Node] = field(default_factory=dict)
    _reads: dict[Node, bool] = field(default_factory=dict)
    _parts: dict[Node, _Both] = field(default_factory=dict)
    _whole: dict[Node, Node] = field(default_factory=dict)
    """Nodes of lines that are split, with the score in place of ``BEFORE``."""

    def add(self, line: Line) -> None:
        """Split one more line.

        Raises:
            TypeMismatchError: As :func:`split_mask`.
        """
        memos: tuple[dict[Node, Any], ...] = (self._simple, self._reads, self._parts, self._whole)
        sizes = [len(memo) for memo in memos]
        root = simplify_node(self._opened(line.value), self._simple)
        if self.alive and not _always_reads(root, self._reads):
            raise TypeMismatchError(
                "this line leaves out the score, and a line before has masked some of its pairs",
                line.span,
                "write that condition in 'mask = ...', which stays whatever the score becomes",
            )
        part = _split(root, frozenset(), line, self._parts)
        self._whole[BEFORE] = self.score
        if part.alive is not TRUE:
            self.alive.append(substitute_on(part.alive, self._whole))
        self.score = substitute_on(part.value, self._whole)
        for memo, size in zip(memos, sizes, strict=True):
            _forget(memo, size, BEFORE)
        # A constant is the same wherever it stands, as -inf in the line after `score = -inf`.
        self._before = None if root.op is Op.CONST else line.value
        if self._before is not None:
            self.values[self._before] = self.score

    def _opened(self, value: Node) -> Node:
        """Value of a line, with ``BEFORE`` and ``values`` in place of the lines before it."""
        if value in self._known:
            # Lines after this one read it as ``BEFORE``, within what is known too.
            self._known = dict(self.values)
        if self._before is None:
            return substitute_on(value, self._known)
        self._known.pop(self._before, None)
        size = len(self._known)
        self._known[self._before] = BEFORE
        found = substitute_on(value, self._known)
        _forget(self._known, size, self._before)
        self._known[self._before] = self.values[self._before]
        return found


def _forget(memo: dict[Node, Any], size: int, leaf: Node) -> None:
    """Take out of ``memo`` what came after its first ``size`` entries and is made of ``leaf``."""
    made = {leaf}
    for item, found in reversed([memo.popitem() for _ in range(len(memo) - size)]):
        if item is leaf or not made.isdisjoint(item.args):
            made.add(item)
        else:
            memo[item] = found


def _check_weights(weights: Line) -> None:
    """Refuse -inf in the program's own weights, where it does not make the weight 0."""
    part = _split(weights.value, _ZERO_OF_MINUS_INFINITY, weights, {})
    if part.alive is not TRUE:
        raise TypeMismatchError(
            "a weight of -inf has no meaning",
            weights.span,
            "write 0.0 for the weight of a pair that takes no part, or mask the pair",
        )


@dataclass(frozen=True, slots=True)
class _Part:
    """A FLOAT expression, split."""

    value: Node
    """Its value for live pairs."""
    alive: Node = TRUE
    """BOOL: which pairs are."""
    source: Node | None = None
    """The ``where`` that chooses -inf, if one does."""
    wrong: str = ""
    """The operation that would turn that -inf into a number; empty if there is none."""


_Both = dict[int, _Part]
"""Splits of an expression by sign: as it is (1), and negated (-1)."""


def _split(root: Node, ends: Collection[Op], line: Line, parts: dict[Node, _Both]) -> _Part:
    """``root`` split.

    Args:
        root: FLOAT.
        ends: Operations that may read -inf.
        line: Where errors point if no ``where`` is known to blame.
        parts: What is known of nodes, with the same ``ends``. It gets all below ``root``.
    """
    for item in toposort(root, known=parts):
        floats = [arg for arg in item.args if arg.dtype is DType.FLOAT]
        rule = _RULES.get(item.op) if item.dtype is DType.FLOAT else None
        if rule is None:
            for arg in floats if item.op not in ends else ():
                part = parts[arg][1]
                if part.wrong or (part.alive is not TRUE and arg.op is not Op.CONST):
                    what = "a conversion" if item.op is Op.CAST else f"'{item.op.value}'"
                    raise _refusal(part, what, line)
            parts[item] = dict.fromkeys((1, -1), _Part(item))
        elif item.args and all(part.source is None for x in floats for part in parts[x].values()):
            parts[item] = dict.fromkeys((1, -1), _Part(item))
        else:
            parts[item] = {sign: rule(item, parts, sign) for sign in (1, -1)}
    if parts[root][1].wrong:
        raise _refusal(parts[root][1], "", line)
    return parts[root][1]


def _refusal(part: _Part, what: str, line: Line) -> TypeMismatchError:
    span = part.source.span if part.source is not None and part.source.op is Op.WHERE else None
    if span is not None and line.span is not None:
        # Another program may have written the same expression first.
        span = span.within(line.span.source)
    return TypeMismatchError(
        f"{part.wrong or what} would make a number of this -inf, and the pair would not be masked",
        span or line.span,
        "write the condition in 'mask = ...', or in a line of its own: "
        "'score = where(..., score, -inf)' stays a mask whatever the lines after it do",
    )


def _always_reads(root: Node, reads: dict[Node, bool]) -> bool:
    """Return True if the value of ``root`` depends on ``BEFORE``, or is -inf, for every pair.

    Args:
        root: FLOAT.
        reads: The answer for nodes that are known. It gets all below ``root``.
    """
    for item in toposort(root, known=reads):
        found = [reads[arg] for arg in item.args]
        if item.op is Op.WHERE:
            condition, yes, no = found
            reads[item] = condition or (yes and no)
        else:
            reads[item] = item is BEFORE or _is_infinity(item, -1) or any(found)
    return reads[root]


def _is_infinity(item: Node, sign: int) -> bool:
    return item.op is Op.CONST and item.value == sign * math.inf


def _constant(item: Node, parts: dict[Node, _Both], sign: int) -> _Part:
    if _is_infinity(item, -sign):
        return _Part(ZERO, FALSE, item)
    if sign < 0 and _is_infinity(item, -1):
        return _Part(item, TRUE, item, "a change of its sign")
    return _Part(item)


def _where(item: Node, parts: dict[Node, _Both], sign: int) -> _Part:
    condition, yes, no = item.args
    first, second = parts[yes][sign], parts[no][sign]
    wrong = first.wrong or second.wrong
    alive = _choice(condition, first.alive, second.alive)
    if alive is TRUE:
        return _Part(item, source=item if wrong else None, wrong=wrong)
    if FALSE in (first.alive, second.alive):
        value = second.value if first.alive is FALSE else first.value
    else:
        value = node(Op.WHERE, condition, first.value, second.value, span=item.span)
    return _Part(value, alive, item, wrong)


def _choice(condition: Node, yes: Node, no: Node) -> Node:
    """``where(condition, yes, no)`` of bools."""
    other = condition.args[0] if condition.op is Op.NOT else node(Op.NOT, condition)
    if yes is no:
        return yes
    if no is FALSE:
        return condition if yes is TRUE else node(Op.AND, condition, yes)
    if yes is FALSE:
        return other if no is TRUE else node(Op.AND, other, no)
    if no is TRUE:
        return node(Op.OR, other, yes)
    if yes is TRUE:
        return node(Op.OR, condition, no)
    return node(Op.OR, node(Op.AND, condition, yes), node(Op.AND, other, no))


def _joined(item: Node, parts: tuple[_Part, ...], wrong: str = "") -> _Part:
    """``item`` of operands that are split: a pair is dead if it is dead in one of them."""
    found = [part for part in parts if part.source is not None]
    if not found:
        return _Part(item)
    alive = TRUE
    for part in parts:
        alive = part.alive if alive is TRUE else alive if part.alive is TRUE else _and(alive, part)
    wrong = next((part.wrong for part in found if part.wrong), wrong)
    values = tuple(part.value for part in parts)
    if item.op is Op.ADD and ZERO in values:
        # What a mask adds to the scores that it keeps.
        value = values[1] if values[0] is ZERO else values[0]
    else:
        value = node(item.op, *values, span=item.span)
    return _Part(value, alive, found[0].source, wrong)


def _and(alive: Node, part: _Part) -> Node:
    return alive if alive is part.alive else node(Op.AND, alive, part.alive)


def _sum(item: Node, parts: dict[Node, _Both], sign: int) -> _Part:
    return _joined(item, tuple(parts[arg][sign] for arg in item.args))


def _difference(item: Node, parts: dict[Node, _Both], sign: int) -> _Part:
    return _joined(item, (parts[item.args[0]][sign], parts[item.args[1]][-sign]))


def _negation(item: Node, parts: dict[Node, _Both], sign: int) -> _Part:
    return _joined(item, (parts[item.args[0]][-sign],))


def _product(item: Node, parts: dict[Node, _Both], sign: int) -> _Part:
    """A factor whose sign is not known is taken to be positive, as a scale is."""
    first, second = item.args
    for number, other in ((second, first), (first, second)):
        if number.op is Op.CONST and (item.op is Op.MUL or number is second):
            factor = float(number.value)  # type: ignore[arg-type]
            turned = parts[other][sign if factor >= 0 else -sign]
            wrong = "" if factor and math.isfinite(factor) else f"the factor {factor}"
            operands = (turned, _Part(number)) if number is second else (_Part(number), turned)
            return _joined(item, operands, wrong)
    left = parts[first][sign]
    right = parts[second][sign]
    if right.source is not None and item.op is Op.DIV:
        return _joined(item, (left, right), "dividing by it")
    both = left.source is not None and right.source is not None
    return _joined(item, (left, right), "a product of two" if both else "")


def _extremum(item: Node, parts: dict[Node, _Both], sign: int) -> _Part:
    """``min`` keeps -inf. ``max`` keeps it where both operands may be -inf, and only there."""
    wins = item.op is (Op.MIN if sign > 0 else Op.MAX)
    for number, other in (item.args, item.args[::-1]):
        if _is_infinity(number, 1 if item.op is Op.MIN else -1):
            return parts[other][sign]
    first, second = (parts[arg][sign] for arg in item.args)
    if wins or (first.source is None and second.source is None):
        return _joined(item, (first, second))
    if TRUE in (first.alive, second.alive):
        return _joined(item, (first, second), f"'{item.op.value}'")
    both = node(item.op, first.value, second.value, span=item.span)
    value = node(Op.WHERE, second.alive, both, first.value)
    value = node(Op.WHERE, first.alive, value, second.value)
    return _Part(value, node(Op.OR, first.alive, second.alive), first.source)


def _rounding(item: Node, parts: dict[Node, _Both], sign: int) -> _Part:
    return _joined(item, (parts[item.args[0]][sign],))


_RULES: dict[Op, Callable[[Node, dict[Node, _Both], int], _Part]] = {
    Op.CONST: _constant,
    Op.WHERE: _where,
    Op.ADD: _sum,
    Op.SUB: _difference,
    Op.NEG: _negation,
    Op.MUL: _product,
    Op.DIV: _product,
    Op.MIN: _extremum,
    Op.MAX: _extremum,
    **dict.fromkeys((Op.FLOOR, Op.CEIL, Op.ROUND), _rounding),
}
"""Parts of an operation whose operands may be -inf: from these operands' parts and a sign."""
