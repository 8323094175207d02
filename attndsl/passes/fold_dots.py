"""Contractions that only add to the raw score, folded into ``q . k`` as more head dims.

With u' = c u / scale, ``scale * (q . k) + c * (u . w)`` is ``scale * ([q, u'] . [k, w])``: one
product of longer rows, which kernels make without knowing of contractions. Multi-head latent
attention has its rotary keys beside the others so (DeepSeek-V2, arXiv 2405.04434, section 2.1.3).

A softmax does not see contractions that are added to a whole row: lse(s + r) = lse(s) + r, and
their gradient is that of the log-sum-exp. They leave the program before the others are looked at.

Non-goals: contractions that other expressions than this sum read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attndsl.ir import (
    SCORE,
    Node,
    Op,
    const,
    dependencies,
    leaf_names,
    node,
    sides,
    size,
    substitute,
    toposort,
    var,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Set

    from attndsl.ir import Program

MAX_TERMS = 64
_ONE = const(1.0)
_ROW, _COLUMN = frozenset({"b", "h", "q"}), frozenset({"b", "h", "kv"})


@dataclass(frozen=True, slots=True)
class DotTerm:
    """``factor * product``, added to the raw score."""

    product: Node
    """DOT."""
    factor: Node
    """FLOAT; varies with one of ``q`` and ``kv`` at most."""


@dataclass(frozen=True, slots=True)
class Widened:
    """``program`` has no contractions; its raw score is the given one's plus ``terms``."""

    program: Program
    terms: tuple[DotTerm, ...]
    row: Node | None = None
    """FLOAT; varies with rows alone. The given score is that of ``program``, plus this."""


def widen(program: Program) -> Widened | str | None:
    """``program`` with its contractions taken into the raw score.

    Returns:
        None where there are none; a reason where they do not only add to the raw score.
    """
    if not _products(*program.roots()):
        return None
    program, row = _row_apart(program)
    if row is not None and not _products(*program.roots()):
        return Widened(program, (), row)
    for name in ("mask", "weights", "dropout"):
        root = getattr(program, name)
        if root is not None and _products(root):
            return f"'{name}' reads a contraction"
    if program.mask is not None and SCORE in toposort(program.mask):
        return "'mask' reads the score without its contractions"
    if size("head_dim") in toposort(*program.roots()):
        return "the program speaks of head_dim, which would be another"
    users: dict[Node, list[Node]] = {}
    for item in toposort(program.score):
        for arg in item.args:
            users.setdefault(arg, []).append(item)
    total = _total(users)
    terms: list[DotTerm] = []
    rest = SCORE
    for product, factor in _addends(total):
        if product is None:
            rest = node(Op.ADD, rest, factor)
            continue
        if len(terms) == MAX_TERMS:
            return f"there are more than {MAX_TERMS} of them"
        found = dependencies(factor)[factor]
        if not (found <= _ROW or found <= _COLUMN):
            return "a factor of a contraction varies from pair to pair"
        terms.append(DotTerm(product, factor))
    score = substitute(program.score, {total: rest})
    if _products(score):
        return "a contraction does more than add to the raw score"
    return Widened(with_score(program, score), tuple(terms), row)


def _row_apart(program: Program) -> tuple[Program, Node | None]:
    """``program`` without the contractions that are added to whole rows, and their sum.

    A sink, and weights other than the softmax, see what is added to a row.
    """
    if program.sink is not None or program.weights is not None:
        return program, None
    # Of each expression with contractions: what is left of it, and what varies with rows alone.
    parts: dict[Node, tuple[Node | None, Node | None]] = {}
    of_rows: set[Node] = set()
    for item in toposort(program.score):
        # Contractions that vary with rows alone are numbers of rows like any other.
        if of_rows.issuperset(item.args) and (item.args or dependencies(item)[item] <= _ROW):
            of_rows.add(item)
        if item.op is not Op.DOT and parts.keys().isdisjoint(item.args):
            continue
        parts[item] = (None, item) if item in of_rows else _split(item, parts, of_rows)
    rest, row = parts.get(program.score, (program.score, None))
    if row is None:
        return program, None
    return with_score(program, const(0.0) if rest is None else rest), row


def _split(
    item: Node, parts: Mapping[Node, tuple[Node | None, Node | None]], of_rows: Set[Node]
) -> tuple[Node | None, Node | None]:
    """The rest of a sum without the part of rows, and that part; None for zeros."""
    operands = [parts.get(arg, (arg, None)) for arg in item.args]
    if all(row is None for _, row in operands):
        return item, None
    if item.op in (Op.ADD, Op.SUB, Op.NEG):
        rest, row = (_combined(item.op, found) for found in zip(*operands, strict=True))
        return rest, row
    if item.op in (Op.MUL, Op.DIV):
        first, second = item.args
        if second in of_rows:
            rest, row = (x and node(item.op, x, second) for x in operands[0])
            return rest, row
        if item.op is Op.MUL and first in of_rows:
            rest, row = (x and node(item.op, first, x) for x in operands[1])
            return rest, row
    return item, None


def _combined(op: Op, operands: tuple[Node | None, ...]) -> Node | None:
    """``op``, which is a sum or a negation, of operands of which None are zeros."""
    first, *others = operands
    if not others or others[0] is None:
        return first if first is None or others else node(op, first)
    if first is None:
        return node(Op.NEG, others[0]) if op is Op.SUB else others[0]
    return node(op, first, others[0])


def contracted(program: Program) -> frozenset[str]:
    """Names of the tensors whose rows are contracted."""
    return frozenset(side.name for item in _products(*program.roots()) for side in sides(item))


def _products(*roots: Node) -> list[Node]:
    return [item for item in toposort(*roots) if item.op is Op.DOT]


def _total(users: dict[Node, list[Node]]) -> Node:
    """The largest sum of which the raw score is a term, and through which alone it is read."""
    total = SCORE
    while len(users.get(total, ())) == 1:
        (user,) = users[total]
        if user.op not in (Op.ADD, Op.SUB) or (user.op is Op.SUB and user.args[1] is total):
            break
        total = user
    return total


def _addends(total: Node) -> Iterator[tuple[Node | None, Node]]:
    """The terms of ``total`` except the raw score: contractions, and their factors.

    What has no contraction, or cannot be taken apart, is a factor of None.
    """
    order = toposort(total)
    holding: set[Node] = set()
    for item in order:
        if item.op is Op.DOT or item is SCORE or not holding.isdisjoint(item.args):
            holding.add(item)
    stack = [(total, _ONE)]
    while stack:
        item, factor = stack.pop()
        parts = _taken_apart(item, factor, holding)
        if item.op is Op.DOT:
            yield item, factor
        elif parts:
            stack += parts
        elif item is not SCORE:
            yield None, _scaled(Op.MUL, factor, item)


def _taken_apart(item: Node, factor: Node, holding: set[Node]) -> list[tuple[Node, Node]]:
    """``factor * item`` as a sum of such, last first; nothing where it is none."""
    if item not in holding:
        return []
    if item.op is Op.NEG:
        return [(item.args[0], node(Op.NEG, factor))]
    if item.op in (Op.ADD, Op.SUB):
        first, second = item.args
        return [(second, node(Op.NEG, factor) if item.op is Op.SUB else factor), (first, factor)]
    if item.op in (Op.MUL, Op.DIV):
        first, second = item.args
        if item.op is Op.MUL and first not in holding:
            first, second = second, first
        if second not in holding:
            return [(first, _scaled(item.op, factor, second))]
    return []


def _scaled(op: Op, factor: Node, other: Node) -> Node:
    return other if op is Op.MUL and factor is _ONE else node(op, factor, other)


def with_heads_apart(program: Program) -> tuple[Program, str]:
    """``program`` for kernels that see a key head of its own for each query head.

    ``hkv`` and ``kv_heads`` keep the meaning that they have in ``program``: the number of key heads
    that its call has is a size of another name there.

    Returns:
        The program, and that name.
    """
    name = "given_kv_heads"
    while name in program.dim_names():
        name += "_"
    given = size(name)
    group = node(Op.FLOORDIV, size("heads"), given)
    known = {size("kv_heads"): given, var("hkv"): node(Op.FLOORDIV, var("h"), group)}

    def renamed(root: Node | None) -> Node | None:
        return None if root is None else substitute(root, known)

    tensors = tuple(
        replace(decl, dims=tuple(substitute(dim, known) for dim in decl.dims))
        for decl in program.tensors
    )
    changed = replace(
        program,
        score=substitute(program.score, known),
        mask=renamed(program.mask),
        sink=renamed(program.sink),
        weights=renamed(program.weights),
        dropout=renamed(program.dropout),
        tensors=tensors,
    )
    return changed, name


def with_score(program: Program, score: Node) -> Program:
    """``program`` with another score, and without the captures that nothing reads then."""
    changed = replace(program, score=score)
    dims = [dim for tensor in program.tensors for dim in tensor.dims]
    names = frozenset().union(*(leaf_names(root) for root in (*changed.roots(), *dims)))
    return replace(
        changed,
        tensors=tuple(t for t in program.tensors if t.name in names),
        params=tuple(p for p in program.params if p.name in names),
    )
