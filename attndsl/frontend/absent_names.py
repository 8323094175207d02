"""Simplification of expressions that read an absent capture, by a rule for each place.

A name is absent if a call leaves out a capture that is declared with ``= none``. An expression that
reads it is gone. A sum, a conjunction and the score go on without it. Everywhere else it is an
error if more than one meaning is possible, so that no number changes without a word
(docs/language.md, "Optional captures").

Non-goals: types; the program in which nothing is absent is checked for them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attndsl import ir
from attndsl.errors import NameResolutionError, TypeMismatchError
from attndsl.ir import DType, Node, Op
from attndsl.passes.simplify import simplify_node

from . import promotion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attndsl.source import Span

NAME = "given"
"""The test whether a capture is there."""
_ORDERED = frozenset({"/", "//", "%", "**", "<<", ">>"})
"""Operators whose operands do different things."""


@dataclass(frozen=True, slots=True)
class Gone:
    """An expression that reads an absent name, anywhere but in a sum or a conjunction of its."""

    names: frozenset[str]
    """The absent captures that it reads."""
    sizes: frozenset[str] = frozenset()
    """Sizes that it reads and that absent tensors alone have."""
    kept: Node | None = None
    """The part of the expression that reads the score, which stays if the expression goes."""
    others: bool = False
    """True if positions or sizes go with it, as those of ``c * (q - kv)`` do."""


@dataclass(frozen=True, slots=True)
class RemainingOperands:
    """A sum or a conjunction without the operands that are gone."""

    node: Node
    gone: Gone


Lacking = Gone | RemainingOperands
Part = Node | Gone | RemainingOperands
"""The meaning of an expression that is no tensor's name."""


@dataclass(frozen=True, slots=True)
class OperandPlace:
    """Place where operands are combined."""

    span: Span
    score: Node | None
    """The score so far."""

    def reads_score(self, value: Node) -> bool:
        """Return True if ``value`` is made of the score."""
        return any(x.op is Op.SCORE or x is self.score for x in ir.toposort(value))


def lacks(*parts: object) -> bool:
    """Return True if one of ``parts`` is gone, wholly or in part."""
    return any(isinstance(part, Gone | RemainingOperands) for part in parts)


def dropped(gone: Gone, span: Span) -> None:
    """Refuse to leave out what no absent capture explains.

    Raises:
        NameResolutionError: It reads the size of an absent tensor, and no absent capture.
    """
    if not gone.names:
        name = min(gone.sizes)
        raise NameResolutionError(
            f"'{name}' is the size of a tensor that may be left out, and what stands here would "
            "have no value then",
            span,
            f"declare 'param {name}: int' and use that, or read the tensor in the same term or "
            "condition",
        )


def finished(part: Part, span: Span) -> Node | None:
    """Node that is left of a line's whole expression; None if the line goes."""
    if isinstance(part, RemainingOperands):
        return part.node
    if isinstance(part, Gone):
        dropped(part, span)
        return part.kept
    return part


def needed(part: Part, what: str, span: Span) -> Node:
    """``part``, which has to be there.

    Raises:
        TypeMismatchError: It is not, or not all of it.
    """
    if isinstance(part, Node):
        return part
    gone = part.gone if isinstance(part, RemainingOperands) else part
    dropped(gone, span)
    raise _unclear(gone, f"{what} would have no value then", span)


def through(operands: Sequence[Part], place: OperandPlace, numbers: bool = True) -> Gone:
    """An operation, some of whose operands are not there: it is gone too.

    Args:
        operands: All operands.
        place: Where they stand.
        numbers: Whether the operation makes a number of them rather than a condition.

    Raises:
        TypeMismatchError: It would take other captures with it, or it is unclear what of the score
            would be left.
    """
    gone = [x for x in operands if isinstance(x, Gone)]
    for operand in operands:
        if isinstance(operand, RemainingOperands):
            raise _unclear(
                operand.gone,
                f"what is left of a {_kind(operand.node)} here could mean several things",
                place.span,
            )
    if not numbers:
        return _all(gone)
    kept = {x.kept for x in gone if x.kept is not None}
    others = any(x.others for x in gone)
    for operand in operands:
        if not isinstance(operand, Node):
            continue
        if place.reads_score(operand):
            kept.add(operand)
        elif names := ir.leaf_names(operand):
            raise _unclear(
                _all(gone), f"it is unclear whether '{min(names)}' counts then", place.span
            )
        else:
            others |= any(not x.args and x.op is not Op.CONST for x in ir.toposort(operand))
    if len(kept) > 1:
        raise _unclear(_all(gone), "the score is read here in several ways", place.span)
    if kept and others:
        raise _unclear(
            _all(gone), "it is unclear whether what stands with it counts then", place.span
        )
    return _all(gone, next(iter(kept), None), others)


def binary(op: str, a: Part, b: Part, spans: tuple[Span, Span], place: OperandPlace) -> Part:
    """``a op b``, for one of the operators of :data:`.promotion.BINARY`."""
    if isinstance(a, Node) and isinstance(b, Node):
        return promotion.binary(op, a, b, spans, place.span)
    if op in ("+", "-"):
        return _sum(op, a, b, spans, place)
    conditions = any(_node_of(x, DType.BOOL) for x in (a, b))
    if op == "and" or (op == "&" and conditions):
        return conjunction(a, b, spans, place)
    if op == "or" or (op == "|" and conditions):
        return _disjunction(a, b, place)
    if conditions:
        raise _unclear(_causes(a, b), "a condition stands beside it", place.span)
    if op in _ORDERED and _of_score(b, place) and not _of_score(a, place):
        raise _unclear(
            _causes(a, b), f"it is unclear what '{op}' makes of the score then", place.span
        )
    return through((a, b), place)


def unary(op: str, operand: Part, at: Span, place: OperandPlace) -> Part:
    """``op operand``, for one of the operators before an operand."""
    if isinstance(operand, Node):
        return promotion.unary(op, operand, at, place.span)
    if isinstance(operand, Gone) and operand.kept is not None:
        raise _unclear(operand, f"it is unclear whether '{op}' counts then", place.span)
    return through([operand], place)


def conjunction(a: Part, b: Part, spans: tuple[Span, Span], place: OperandPlace) -> Part:
    """``a and b``; an absent operand counts as true."""
    if isinstance(a, Node) and isinstance(b, Node):
        return promotion.binary("and", a, b, spans, place.span)
    for operand, other in ((a, b), (b, a)):
        value = known(operand)
        if value is not None and not isinstance(other, Node):
            return other if value else operand
    if isinstance(a, Gone) and isinstance(b, Gone):
        return _all([a, b])
    nodes = [
        x.node if isinstance(x, RemainingOperands) else x for x in (a, b) if not isinstance(x, Gone)
    ]
    for x in (a, b):
        if isinstance(x, Gone):
            dropped(x, place.span)
    left = nodes[0]
    if len(nodes) == 2:
        left = promotion.binary("and", nodes[0], nodes[1], spans, place.span)
    return RemainingOperands(left, _causes(a, b))


def compare(op: str, a: Part, b: Part, spans: tuple[Span, Span], place: OperandPlace) -> Part:
    """``a op b``, for a comparison."""
    if isinstance(a, Node) and isinstance(b, Node):
        return promotion.compare(op, a, b, spans, place.span)
    if any(_node_of(x, DType.BOOL) for x in (a, b)):
        raise _unclear(_causes(a, b), "a condition stands beside it", place.span)
    return through((a, b), place, numbers=False)


def where(condition: Part, yes: Part, no: Part, place: OperandPlace) -> Part:
    """``yes if condition else no``, where one of them is not all there."""
    value = known(condition)
    if value is not None:
        return yes if value else no
    branches = [x for x in (yes, no) if isinstance(x, Node)]
    if isinstance(condition, Gone):
        # A condition beside -inf is a mask, and there is no mask then.
        clear = any(_value(x) == -math.inf for x in branches)
    else:
        clear = all(
            x.op is Op.SCORE or x is place.score or _value(x) == (x.dtype is DType.BOOL)
            for x in branches
        )
    if not clear:
        raise _unclear(
            _causes(condition, yes, no), "it is unclear which branch counts then", place.span
        )
    return through((condition, yes, no), place)


def choice(
    make: Callable[[list[Node]], Node], operands: Sequence[Part], place: OperandPlace
) -> Part:
    """``min``, ``max`` or ``clamp``: limits of the score are absent all together or not at all."""
    if lacks(*operands) and any(_of_score(x, place) for x in operands):
        nodes = [x for x in operands if isinstance(x, Node)]
        if any(not place.reads_score(x) for x in nodes):
            raise _unclear(_causes(*operands), "other limits of the score are there", place.span)
    return apply(make, operands, place)


def apply(
    make: Callable[[list[Node]], Node],
    operands: Sequence[Part],
    place: OperandPlace,
    numbers: bool = True,
) -> Part:
    """Apply ``make`` to ``operands`` if all are there; otherwise the result is gone too."""
    nodes = [x for x in operands if isinstance(x, Node)]
    return make(nodes) if len(nodes) == len(operands) else through(operands, place, numbers)


def _sum(op: str, a: Part, b: Part, spans: tuple[Span, Span], place: OperandPlace) -> Part:
    """A sum or difference; an absent operand counts as 0, except for its part of the score."""
    if isinstance(a, Gone) and isinstance(b, Gone):
        if op == "-" and b.kept is not None and a.kept is None:
            raise _unclear(b, "it is unclear whether the score is subtracted", place.span)
        kept = a.kept if b.kept is None else b.kept
        if a.kept is not None and b.kept is not None and a.kept is not b.kept:
            raise _unclear(_all([a, b]), "the score is read here in several ways", place.span)
        return _all([a, b], kept, kept is None and (a.others or b.others))
    if isinstance(a, Node | RemainingOperands) and isinstance(b, Node | RemainingOperands):
        nodes = [x.node if isinstance(x, RemainingOperands) else x for x in (a, b)]
        total = promotion.binary(op, nodes[0], nodes[1], spans, place.span)
        return total if place.reads_score(total) else RemainingOperands(total, _causes(a, b))
    first = isinstance(a, Gone)
    gone, other = (a, b) if first else (b, a)
    assert isinstance(gone, Gone)
    assert not isinstance(other, Gone)
    dropped(gone, place.span)
    left = other.node if isinstance(other, RemainingOperands) else other
    of_score = place.reads_score(left)
    if gone.kept is not None and not of_score:
        # The score itself stays in place of what went with it.
        if op == "-" and not first:
            raise _unclear(gone, "it is unclear whether the score is subtracted", place.span)
        nodes = [gone.kept, left] if first else [left, gone.kept]
        return promotion.binary(op, nodes[0], nodes[1], spans, place.span)
    if gone.kept is not None and (lost := ir.leaf_names(gone.kept) - ir.leaf_names(left)):
        raise _unclear(gone, f"it is unclear whether '{min(lost)}' counts then", place.span)
    if op == "-" and first:
        left = promotion.unary("-", left, spans[1], place.span)
    return left if of_score else RemainingOperands(left, _causes(a, b))


def _disjunction(a: Part, b: Part, place: OperandPlace) -> Part:
    for operand, other in ((a, b), (b, a)):
        value = known(operand)
        if value is not None:
            return operand if value else other
    if isinstance(a, Gone) and isinstance(b, Gone):
        return _all([a, b])
    gone = _causes(a, b)
    dropped(gone, place.span)
    name = min(gone.names)
    raise TypeMismatchError(
        f"'{name}' may be left out, and it is unclear what an operand of 'or' counts as then",
        place.span,
        f"write 'not given({name}) or ...' if the condition holds then, or "
        f"'(given({name}) and ...)' if that operand does not",
    )


def _node_of(part: Part, dtype: DType) -> bool:
    node = part.node if isinstance(part, RemainingOperands) else part
    return isinstance(node, Node) and node.dtype is dtype


def _of_score(part: Part, place: OperandPlace) -> bool:
    """Return True if ``part`` reads the score, or would if all were there."""
    if isinstance(part, Gone):
        return part.kept is not None
    return place.reads_score(part.node if isinstance(part, RemainingOperands) else part)


def _value(node: Node) -> object:
    """The value of a constant expression; None for others."""
    found = simplify_node(node)
    return found.value if found.op is Op.CONST else None


def known(part: Part) -> bool | None:
    """The value of a condition that is one for all pairs, if it is known."""
    if not isinstance(part, Node) or part.dtype is not DType.BOOL:
        return None
    value = _value(part)
    return None if value is None else bool(value)


def _causes(*parts: Part) -> Gone:
    return _all(
        [
            x.gone if isinstance(x, RemainingOperands) else x
            for x in parts
            if not isinstance(x, Node)
        ]
    )


def _all(gone: Sequence[Gone], kept: Node | None = None, others: bool = False) -> Gone:
    names = frozenset[str]().union(*(x.names for x in gone))
    return Gone(names, frozenset[str]().union(*(x.sizes for x in gone)), kept, others)


def _kind(node: Node) -> str:
    return "condition" if node.dtype is DType.BOOL else "sum"


def _unclear(gone: Gone, why: str, span: Span) -> TypeMismatchError:
    name = min(gone.names | gone.sizes)
    return TypeMismatchError(
        f"'{name}' may be left out, and {why}",
        span,
        f"say what stands here without it: '... if given({name}) else ...'"
        if gone.names
        else f"read the tensor that has the size '{name}' in a term of its own",
    )
