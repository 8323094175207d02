"""A score as a sum of three parts: one varies with pairs, one with rows, one with columns.

A softmax does not see a term that is added to a whole row: softmax(s + r) = softmax(s), and
lse(s + r) = lse(s) + r. So kernels compute the part of rows once a row. They compute the part of
columns once for the columns of a tile.

``slope * (q - kv)`` comes apart only near an origin, for both parts may be large where their sum is
small: rows get ``slope * (q - $origin)``, columns ``-slope * $away``, with ``$away`` the distance
of ``kv`` from the origin, which the kernel puts within its tile.

Factors move out of the part of pairs: ``c * tanh(score / c)`` becomes ``tanh(score)`` with a factor
on either side. Both factors join factors that exist anyway: the scale of q . k, and that of base 2.

Non-goals: products of a row's and a column's factor, functions of sums, integers that are not sums
of multiples of positions (they may be large, and cancel).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from attndsl.ir import (
    SCORE,
    DType,
    Op,
    cast,
    const,
    dependencies,
    node,
    param,
    substitute,
    toposort,
    var,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attndsl.ir import Node, Program

    from .differentiate import Derivative

ORIGIN = param("$origin", DType.INT)
"""Any logical position; one near the tile's keeps the parts small."""
AWAY = param("$away", DType.FLOAT)
"""``kv - $origin``: kernels have a cheaper way to it than converting each."""
MAX_TERMS = 1 << 12
"""Terms of a score that are looked at; in scores of more all is left for pairs."""
_ALL_ROW = frozenset({"b", "h"})
_LARGE = 1e30
"""Factors from which infinities might come of finite scores, or the other way around."""
_KINDS = (("row", _ALL_ROW | {"q"}), ("column", _ALL_ROW | {"kv"}))

# Operations around a term, outermost first, their operands of batch entry and head alone, and
# whether these are the left ones.
_Wraps = tuple[tuple[Op, "Node", bool], ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """``outer * pair + row + column`` is the score, up to rounding, for any ``$origin``."""

    pair: Node
    """``SCORE`` in it is ``inner`` times the incoming score."""
    slope: Node
    """Derivative of the score by the incoming one; its ``SCORE`` is that of ``pair``."""
    inner: Node | None
    """FLOAT expression of ``b`` and ``h``; None for 1."""
    outer: float
    """Greater than 0."""
    row: Node | None
    """FLOAT expression of ``b``, ``h``, ``q`` and ``$origin``."""
    column: Node | None
    """FLOAT expression of ``b``, ``h``, ``kv`` and ``$away``."""

    @property
    def steepness(self) -> Node | None:
        """FLOAT expression of ``b`` and ``h`` that is ``column / $away``, where there is one."""
        if self.column is None or "kv" in dependencies(self.column)[self.column]:
            return None
        # What does not depend on ``kv`` otherwise is a sum of multiples of ``$away``.
        return substitute(self.column, {AWAY: const(1.0)})


def place(program: Program, derivative: Derivative) -> Placed:
    """The parts of a program's score; of weights other than the softmax all is left for pairs."""
    if program.weights is None:
        return place_score(program.score, derivative.score, program.mask)
    return Placed(program.score, derivative.score, None, 1.0, None, None)


def place_score(score: Node, slope: Node, mask: Node | None) -> Placed:
    """Take apart a FLOAT expression.

    Args:
        score: The score.
        slope: Its derivative by the incoming score.
        mask: Factors stay where they are if this depends on the incoming score.
    """
    deps = dependencies(score)
    parts: dict[str, list[Node]] = {"pair": [], "row": [], "column": []}
    terms = list(islice(_terms(score, deps), MAX_TERMS + 1))
    if len(terms) > MAX_TERMS:
        # Shared sums of shared sums may have more than anybody could write down.
        terms = [(1, (), score)]
    for sign, wraps, term in terms:
        whole = _wrapped(term, wraps)
        found = deps.get(term) or dependencies(term)[term]
        if AWAY in toposort(term):
            found = frozenset({"kv"})
        kind = next((name for name, allowed in _KINDS if found <= allowed), "pair")
        parts[kind].append(node(Op.NEG, whole) if sign < 0 else whole)
    pair, row, column = score, _sum(parts["row"]), _sum(parts["column"])
    if row is not None or column is not None:
        pair = _sum(parts["pair"]) or const(0.0)
    if mask is not None and SCORE in toposort(mask):
        return Placed(pair, slope, None, 1.0, row, column)
    outer, pair = _outer(pair)
    factor = _inner(pair, slope)
    if factor is None:
        return Placed(pair, slope, None, outer, row, column)
    inner = factor.args[0] if factor.args[1] is SCORE else factor.args[1]
    if factor.op is Op.DIV:
        inner = node(Op.DIV, const(1.0), inner)
    pair, slope = (substitute(root, {factor: SCORE}) for root in (pair, slope))
    slope = _with_one_constant(slope)
    return Placed(pair, slope, inner, outer, row, column)


def _outer(pair: Node) -> tuple[float, Node]:
    """A positive constant factor of ``pair``, and the rest."""
    if pair.op is Op.MUL:
        for number, rest in (pair.args, pair.args[::-1]):
            value = number.value
            if number.op is Op.CONST and isinstance(value, float) and 0 < value < _LARGE:
                return value, rest
    return 1.0, pair


def _with_one_constant(product: Node) -> Node:
    """``50 * x / 50`` as ``x``: a product and quotient with constants, with one at most."""
    total, rest = 1.0, product
    while rest.op in (Op.MUL, Op.DIV):
        numbers = [arg for arg in rest.args if arg.op is Op.CONST]
        if len(numbers) != 1 or (rest.op is Op.DIV and numbers[0] is rest.args[0]):
            break
        value = numbers[0].value
        if not isinstance(value, float) or not 1 / _LARGE < abs(value) < _LARGE:
            break
        total = total * value if rest.op is Op.MUL else total / value
        (rest,) = (arg for arg in rest.args if arg.op is not Op.CONST)
    return rest if total == 1.0 else node(Op.MUL, const(total), rest)


def _inner(pair: Node, slope: Node) -> Node | None:
    """The product or quotient of SCORE that is all that uses it, if there is one."""
    order = toposort(pair, slope)
    users = {item for item in order if SCORE in item.args}
    if len(users) != 1 or SCORE in (pair, slope):
        return None
    (user,) = users
    others = [arg for arg in user.args if arg is not SCORE]
    fits = user.op is Op.MUL or (user.op is Op.DIV and user.args[0] is SCORE)
    if not fits or len(others) != 1 or not dependencies(others[0])[others[0]] <= _ALL_ROW:
        return None
    return user


def _terms(score: Node, deps: dict[Node, frozenset[str]]) -> Iterator[tuple[int, _Wraps, Node]]:
    """The terms of a sum, in order: sign, factors, and the operand of the factors."""
    stack: list[tuple[int, _Wraps, Node]] = [(1, (), score)]
    while stack:
        sign, wraps, item = stack.pop()
        op = item.op
        if op in (Op.ADD, Op.SUB):
            stack.append((-sign if op is Op.SUB else sign, wraps, item.args[1]))
            stack.append((sign, wraps, item.args[0]))
        elif op is Op.NEG:
            stack.append((-sign, wraps, item.args[0]))
        elif op in (Op.MUL, Op.DIV) and deps[item.args[1]] <= _ALL_ROW:
            stack.append((sign, (*wraps, (op, item.args[1], False)), item.args[0]))
        elif op is Op.MUL and deps[item.args[0]] <= _ALL_ROW:
            stack.append((sign, (*wraps, (op, item.args[0], True)), item.args[1]))
        elif op is Op.CAST and (parts := _split_positions(item.args[0], deps)):
            row, multiple = parts
            yield sign, wraps, cast(row, DType.FLOAT)
            away = AWAY if abs(multiple) == 1 else node(Op.MUL, const(float(abs(multiple))), AWAY)
            yield (sign if multiple > 0 else -sign), wraps, away
        else:
            yield sign, wraps, item


def _split_positions(item: Node, deps: dict[Node, frozenset[str]]) -> tuple[Node, int] | None:
    """An INT sum of multiples of ``q`` and ``kv`` as a row's part and a multiple of ``$away``."""
    rest: list[Node] = []
    multiples = {"q": 0, "kv": 0}
    stack = [(1, item)]
    while stack:
        factor, part = stack.pop()
        numbers = [arg.value for arg in part.args if arg.op is Op.CONST]
        if part.op in (Op.ADD, Op.SUB):
            stack.append((-factor if part.op is Op.SUB else factor, part.args[1]))
            stack.append((factor, part.args[0]))
        elif part.op is Op.NEG:
            stack.append((-factor, part.args[0]))
        elif part.op is Op.MUL and len(numbers) == 1 and isinstance(numbers[0], int):
            (other,) = (arg for arg in part.args if arg.op is not Op.CONST)
            stack.append((factor * numbers[0], other))
        elif part.op is Op.VAR and part.value in multiples:
            multiples[str(part.value)] += factor
        elif deps[part] <= _ALL_ROW:
            rest.append(_times(part, factor))
        else:
            return None
    q = var("q")
    if not multiples["kv"] or max(map(abs, multiples.values())) > 1 << 16:
        return None
    if multiples["q"] == -multiples["kv"]:
        row = _times(node(Op.SUB, q, ORIGIN), multiples["q"])
    else:
        row = _times(ORIGIN, multiples["kv"])
        if multiples["q"]:
            row = node(Op.ADD, row, _times(q, multiples["q"]))
    for part in rest:
        row = node(Op.ADD, row, part)
    return row, multiples["kv"]


def _times(item: Node, factor: int) -> Node:
    if factor == 1:
        return item
    return node(Op.NEG, item) if factor == -1 else node(Op.MUL, item, const(factor))


def _wrapped(term: Node, wraps: _Wraps) -> Node:
    for op, other, left in reversed(wraps):
        term = node(op, other, term) if left else node(op, term, other)
    return term


def _sum(parts: list[Node]) -> Node | None:
    total: Node | None = None
    for part in parts:
        total = part if total is None else node(Op.ADD, total, part)
    return total
