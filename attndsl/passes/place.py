"""A score as a sum of what varies with pairs, with rows alone, and with columns alone.

A softmax does not see what is added to a whole row: softmax(s + r) = softmax(s), and the
log-sum-exp of s + r is that of s, plus r. So what varies with the row alone need not be computed
for each pair, and what varies with the column alone is computed once for a tile's columns.

``slope * (q - kv)`` comes apart only near an origin, for both parts may be large where their sum is
small: rows get ``slope * (q - $origin)``, columns ``-slope * (kv - $origin)``, and the kernel puts
the origin within its tile.

Non-goals: products of a row's and a column's factor, functions of sums, integers that are not sums
of multiples of positions (they may be large, and cancel).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attndsl.ir import DType, Op, cast, const, dependencies, node, param, var

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attndsl.ir import Node

ORIGIN = param("$origin", DType.INT)
"""Any logical position; one near the tile's keeps the parts small."""
_ALL_ROW = frozenset({"b", "h"})
_KINDS = (("row", _ALL_ROW | {"q"}), ("column", _ALL_ROW | {"kv"}))

# Operations around a term, outermost first, their operands of batch entry and head alone, and
# whether these are the left ones.
_Wraps = tuple[tuple[Op, "Node", bool], ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """``pair + row + column`` is the score, but for rounding, whatever ``$origin`` is."""

    pair: Node
    """The score itself where nothing comes apart."""
    row: Node | None
    """FLOAT expression of ``b``, ``h``, ``q`` and ``$origin``."""
    column: Node | None
    """FLOAT expression of ``b``, ``h``, ``kv`` and ``$origin``."""


def place_score(score: Node) -> Placed:
    """Take apart a FLOAT expression."""
    deps = dependencies(score)
    parts: dict[str, list[Node]] = {"pair": [], "row": [], "column": []}
    for sign, wraps, term in _terms(score, deps):
        whole = _wrapped(term, wraps)
        found = deps.get(term) or dependencies(term)[term]
        kind = next((name for name, allowed in _KINDS if found <= allowed), "pair")
        parts[kind].append(node(Op.NEG, whole) if sign < 0 else whole)
    if not parts["row"] and not parts["column"]:
        return Placed(score, None, None)
    return Placed(_sum(parts["pair"]) or const(0.0), _sum(parts["row"]), _sum(parts["column"]))


def _terms(score: Node, deps: dict[Node, frozenset[str]]) -> Iterator[tuple[int, _Wraps, Node]]:
    """The terms of a sum, in order: sign, factors, and what they are factors of."""
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
            for part in parts:
                yield sign, wraps, cast(part, DType.FLOAT)
        else:
            yield sign, wraps, item


def _split_positions(item: Node, deps: dict[Node, frozenset[str]]) -> tuple[Node, ...]:
    """An INT sum of multiples of ``q`` and ``kv`` as a row's part and a column's; or nothing."""
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
            return ()
    q, kv = var("q"), var("kv")
    if not multiples["kv"] or max(map(abs, multiples.values())) > 1 << 16:
        return ()
    # kv - origin and q + (origin's share) stay small where q and kv cancel.
    column = _times(node(Op.SUB, kv, ORIGIN), multiples["kv"])
    if multiples["q"] == -multiples["kv"]:
        row = _times(node(Op.SUB, q, ORIGIN), multiples["q"])
    else:
        row = _times(ORIGIN, multiples["kv"])
        if multiples["q"]:
            row = node(Op.ADD, row, _times(q, multiples["q"]))
    for part in rest:
        row = node(Op.ADD, row, part)
    return row, column


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
