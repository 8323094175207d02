"""Simplification by a table of rules, applied to operands first, once a node.

Every rule keeps the value bit for bit, NaN and signed zeros included, on all inputs: float
arithmetic is never reassociated, and ``x + 0.0`` stays (it turns -0.0 into 0.0). Integer sums are
brought to a normal form by :mod:`attndsl.passes.sympy_bridge` where terms cancel, which is exact
modulo 2**64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from attndsl.ir import COMPARISONS, DType, Node, Op, Program, const, node, rebuild, toposort

from .differentiate import Derivative, ParamGradient, ProductGradient, TensorGradient
from .evaluate import apply

TRUE, FALSE = const(True), const(False)
_MOST_TERMS = 64
"""The most terms of a sum that may cancel. sympy takes half a second for all parts of such a
one."""
Rule = Callable[[Node], Node | None]
"""The node that may stand in place of the one given, or None."""


def simplify(program: Program) -> Program:
    """``program`` with all its expressions simplified; a mask that is ``true`` is dropped."""
    memo: dict[Node, Node] = {}

    def part(root: Node | None) -> Node | None:
        return None if root is None else simplify_node(root, memo)

    mask = part(program.mask)
    tensors = tuple(
        replace(t, dims=tuple(simplify_node(d, memo) for d in t.dims)) for t in program.tensors
    )
    return replace(
        program,
        score=simplify_node(program.score, memo),
        mask=None if mask is TRUE else mask,
        sink=part(program.sink),
        weights=part(program.weights),
        dropout=part(program.dropout),
        tensors=tensors,
        lines=tuple(replace(line, value=simplify_node(line.value, memo)) for line in program.lines),
    )


def simplify_derivative(derivative: Derivative) -> Derivative:
    """``derivative`` with all factors simplified; factors that are 0 are dropped."""
    memo: dict[Node, Node] = {}
    tensors = [
        TensorGradient(simplify_node(g.load, memo), simplify_node(g.factor, memo))
        for g in derivative.tensors
    ]
    params = [ParamGradient(g.name, simplify_node(g.factor, memo)) for g in derivative.params]
    products = [
        ProductGradient(simplify_node(g.product, memo), simplify_node(g.factor, memo))
        for g in derivative.products
    ]
    zero = const(0.0)
    return Derivative(
        simplify_node(derivative.score, memo),
        tuple(g for g in tensors if g.factor is not zero),
        tuple(g for g in params if g.factor is not zero),
        tuple(g for g in products if g.factor is not zero),
    )


def simplify_node(root: Node, memo: dict[Node, Node] | None = None) -> Node:
    """The simplest form of ``root`` that the rules reach; ``memo`` is shared between roots."""
    done = {} if memo is None else memo
    for item in toposort(root, known=done):
        args = tuple(done[arg] for arg in item.args)
        current = item if args == item.args else rebuild(item, args)
        # A rule's result is made of simplified parts, so few steps settle it; the bound makes
        # a pair of rules that undo each other harmless.
        for _ in range(8):
            better = _step(current)
            if better is None:
                break
            current = better
        done[item] = current
    return done[root]


def _step(item: Node) -> Node | None:
    for rule in RULES.get(item.op, ()):
        if (found := rule(item)) is not None:
            return found
    return _fold(item)


def _fold(item: Node) -> Node | None:
    """Constants by evaluation."""
    if (
        not item.args
        or item.op in (Op.LOAD, Op.DOT, Op.IN)
        or any(a.op is not Op.CONST for a in item.args)
    ):
        return None
    values = [a.value for a in item.args]
    result = apply(item, [v for v in values if isinstance(v, bool | int | float)])
    made = {DType.BOOL: bool, DType.INT: int, DType.FLOAT: float}[item.dtype](result)
    return const(made, item.span)


def _is(item: Node, value: bool | int | float) -> bool:
    """Return True if ``item`` is this constant, of this type, sign of zero included."""
    if item.op is not Op.CONST or type(item.value) is not type(value):
        return False
    if isinstance(value, float):
        assert isinstance(item.value, float)
        same_sign = math.copysign(1.0, value) == math.copysign(1.0, item.value)
        return item.value == value and same_sign
    return item.value == value


def _identity(neutral: int | float, left: bool = True) -> Rule:
    """``x op neutral`` is x, and with ``left`` also ``neutral op x``."""

    def rule(item: Node) -> Node | None:
        a, b = item.args
        if _is(b, neutral):
            return a
        return b if left and _is(a, neutral) else None

    return rule


def _absorb(value: bool | int) -> Rule:
    """``x op value`` (either way round) is ``value``."""

    def rule(item: Node) -> Node | None:
        return const(value) if any(_is(a, value) for a in item.args) else None

    return rule


def _same(result: Callable[[Node], Node], only: DType | None = None) -> Rule:
    """``x op x``."""

    def rule(item: Node) -> Node | None:
        a, b = item.args[-2:]
        return result(a) if a is b and only in (None, a.dtype) else None

    return rule


def _not(item: Node) -> Node | None:
    (a,) = item.args
    if a.op is Op.NOT:
        return a.args[0]
    # Of ints only: a comparison with NaN is false both ways.
    if a.op in (Op.LT, Op.LE) and a.args[0].dtype is DType.INT:
        return node(Op.LE if a.op is Op.LT else Op.LT, a.args[1], a.args[0], span=item.span)
    if a.op in (Op.EQ, Op.NE):
        return node(Op.NE if a.op is Op.EQ else Op.EQ, *a.args, span=item.span)
    return None


def _where(item: Node) -> Node | None:
    condition, yes, no = item.args
    if condition.op is Op.CONST:
        return yes if condition.value else no
    if yes is no:
        return yes
    if condition.op is Op.NOT:
        return node(Op.WHERE, condition.args[0], no, yes, span=item.span)
    if yes is TRUE and no is FALSE:
        return condition
    return None


def _no_factors(item: Node) -> Node | None:
    """The power 0, even of 0 and of NaN."""
    exponent = item.args[1]
    if _is(exponent, 0):
        return const(1)
    return const(1.0) if _is(exponent, 0.0) or _is(exponent, -0.0) else None


def _negation(item: Node) -> Node | None:
    (a,) = item.args
    return a.args[0] if a.op is Op.NEG else None


def _added_negation(item: Node) -> Node | None:
    """``x + -y`` as ``x - y``, and ``x - -y`` as ``x + y``."""
    a, b = item.args
    if b.op is Op.NEG:
        return node(Op.SUB if item.op is Op.ADD else Op.ADD, a, b.args[0], span=item.span)
    if item.op is Op.ADD and a.op is Op.NEG:
        return node(Op.SUB, b, a.args[0], span=item.span)
    return None


def _cast(item: Node) -> Node | None:
    (a,) = item.args
    return a if a.dtype is item.dtype else None


def _compare_same(item: Node) -> Node | None:
    a, b = item.args
    if a is b and a.dtype is not DType.FLOAT:
        return const(item.op in (Op.LE, Op.EQ))
    return None


def _cancel(item: Node) -> Node | None:
    """Integer sums in which a term may cancel, by their normal form.

    Sums of very many terms stay as they are: each of their parts is a sum that would be looked at.
    """
    if item.dtype is not DType.INT:
        return None
    terms: list[Node] = []
    stack = [item]
    while stack:
        if len(terms) + len(stack) > _MOST_TERMS:
            return None
        current = stack.pop()
        if current.op in (Op.ADD, Op.SUB, Op.NEG):
            stack += current.args
        else:
            terms.append(current)
    named = [t for t in terms if t.op is not Op.CONST]
    if not named or (len(set(named)) == len(named) and len(terms) - len(named) < 2):
        return None
    from .sympy_bridge import normalise

    found = normalise(item)
    return None if found is item else found


RULES: dict[Op, tuple[Rule, ...]] = {
    Op.ADD: (_identity(0), _identity(-0.0), _added_negation, _cancel),
    Op.SUB: (_identity(0, left=False), _identity(0.0, left=False), _added_negation, _cancel),
    Op.MUL: (_identity(1), _identity(1.0), _absorb(0)),
    Op.DIV: (_identity(1.0, left=False),),
    Op.FLOORDIV: (_identity(1, left=False),),
    Op.MOD: (lambda item: const(0) if _is(item.args[1], 1) else None,),
    Op.POW: (_identity(1, left=False), _identity(1.0, left=False), _no_factors),
    Op.NEG: (_negation,),
    Op.MIN: (_same(lambda a: a),),
    Op.MAX: (_same(lambda a: a),),
    Op.AND: (_identity(True), _absorb(False), _same(lambda a: a)),
    Op.OR: (_identity(False), _absorb(True), _same(lambda a: a)),
    Op.NOT: (_not,),
    Op.WHERE: (_where,),
    Op.CAST: (_cast,),
    Op.BITAND: (_absorb(0), _same(lambda a: a)),
    Op.BITOR: (_identity(0), _same(lambda a: a)),
    Op.BITXOR: (_identity(0), _same(lambda a: const(0))),
    Op.SHL: (_identity(0, left=False),),
    Op.SHR: (_identity(0, left=False),),
} | dict.fromkeys(COMPARISONS, (_compare_same,))
