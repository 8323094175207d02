"""Integer ring expressions to and from sympy: the only place that imports it.

``+``, ``-``, ``*`` and negation of ints become a polynomial; every other int node is an opaque
symbol. Ring identities hold modulo 2**64, so the way there and back is exact.

Non-goals: floats (sympy would reassociate them), ``//`` and ``%``.
"""

from __future__ import annotations

from typing import Any

from attndsl.ir import DType, Node, Op, const, node, toposort

_RING = frozenset({Op.ADD, Op.SUB, Op.MUL, Op.NEG})


def normalise(root: Node) -> Node:
    """``root`` expanded, with like terms collected; ``root`` itself if that is not smaller."""
    expression, symbols = to_sympy(root)
    found = from_sympy(expression, symbols)
    return found if len(toposort(found)) < len(toposort(root)) else root


def to_sympy(root: Node) -> tuple[Any, dict[Any, Node]]:
    """The expanded polynomial of an INT node, and the node that each symbol stands for.

    Raises:
        TypeError: ``root`` is not an INT.
    """
    import sympy

    if root.dtype is not DType.INT:
        raise TypeError(f"a {root.dtype.value} is no integer polynomial")
    symbols: dict[Any, Node] = {}
    built: dict[Node, Any] = {}
    for item in toposort(root):
        if item.dtype is not DType.INT:
            continue
        if item.op is Op.CONST:
            built[item] = sympy.Integer(item.value)
        elif item.op in _RING and all(arg in built for arg in item.args):
            args = [built[arg] for arg in item.args]
            if item.op is Op.ADD:
                built[item] = args[0] + args[1]
            elif item.op is Op.SUB:
                built[item] = args[0] - args[1]
            elif item.op is Op.MUL:
                built[item] = args[0] * args[1]
            else:
                built[item] = -args[0]
        else:
            # Numbered in topological order, so that the result is the same every time.
            symbol = sympy.Symbol(f"x{len(symbols):06d}", integer=True)
            symbols[symbol] = item
            built[item] = symbol
    return sympy.expand(built[root]), symbols


def from_sympy(expression: Any, symbols: dict[Any, Node]) -> Node:
    """The INT node of an expanded polynomial with integer coefficients."""
    total: Node | None = None
    polynomial = expression.as_poly(*symbols) if symbols else None
    if polynomial is None:
        return const(_wrap(int(expression)))
    for powers, coefficient in polynomial.terms():
        factor = _wrap(int(coefficient))
        product: Node | None = None
        for symbol, power in zip(polynomial.gens, powers, strict=True):
            for _ in range(power):
                term = symbols[symbol]
                product = term if product is None else node(Op.MUL, product, term)
        negative = factor < 0 and total is not None and product is not None
        size = -factor if negative else factor
        if product is None:
            product = const(size)
        elif size != 1:
            product = node(Op.MUL, product, const(size))
        sign = Op.SUB if negative else Op.ADD
        total = product if total is None else node(sign, total, product)
    return const(0) if total is None else total


def _wrap(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
