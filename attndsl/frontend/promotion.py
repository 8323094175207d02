"""Types of operators: which operands fit, and where an int becomes a float."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import TypeMismatchError
from attndsl.ir import DType, Node, Op, cast, const, node

if TYPE_CHECKING:
    from attndsl.source import Span

BINARY = {
    "+": Op.ADD,
    "-": Op.SUB,
    "*": Op.MUL,
    "/": Op.DIV,
    "//": Op.FLOORDIV,
    "%": Op.MOD,
    "**": Op.POW,
    "<<": Op.SHL,
    ">>": Op.SHR,
    "&": Op.BITAND,
    "|": Op.BITOR,
    "^": Op.BITXOR,
    "and": Op.AND,
    "or": Op.OR,
}
_ON_BOOLS = {"&": Op.AND, "|": Op.OR, "^": Op.NE}
_LARGEST_INT = (1 << 63) - 1


def as_float(operand: Node) -> Node:
    """An int as a float; constants are converted here."""
    if operand.op is Op.CONST and operand.dtype is DType.INT:
        assert isinstance(operand.value, int)
        return const(float(operand.value), operand.span)
    return cast(operand, DType.FLOAT, operand.span)


def unify(a: Node, b: Node) -> tuple[Node, Node]:
    """``a`` and ``b`` as floats if one is a float and the other an int; otherwise unchanged."""
    if {a.dtype, b.dtype} == {DType.INT, DType.FLOAT}:
        return as_float(a), as_float(b)
    return a, b


def need_number(operand: Node, span: Span, what: str) -> Node:
    """``operand``, which must be an int or a float."""
    if operand.dtype is DType.BOOL:
        raise TypeMismatchError(
            f"{what} takes numbers, and this is a bool",
            span,
            "write int(...) around it, or 'x if condition else y'",
        )
    return operand


def need_bool(operand: Node, span: Span, what: str) -> Node:
    """``operand``, which must be a bool."""
    if operand.dtype is not DType.BOOL:
        raise TypeMismatchError(
            f"{what} takes bools, and this is of type {operand.dtype.value}",
            span,
            "compare it with something, such as '!= 0'",
        )
    return operand


def binary(op: str, a: Node, b: Node, spans: tuple[Span, Span], span: Span) -> Node:
    """``a op b`` for one of the operators of :data:`BINARY`."""
    what = f"'{op}'"
    if op in ("and", "or"):
        return node(
            BINARY[op], need_bool(a, spans[0], what), need_bool(b, spans[1], what), span=span
        )
    if op in _ON_BOOLS and a.dtype is DType.BOOL and b.dtype is DType.BOOL:
        return node(_ON_BOOLS[op], a, b, span=span)
    for operand, at in zip((a, b), spans, strict=True):
        need_number(operand, at, what)
    if op in ("&", "|", "^", "<<", ">>"):
        for operand, at in zip((a, b), spans, strict=True):
            if operand.dtype is not DType.INT:
                raise TypeMismatchError(
                    f"{what} takes two ints or two bools, and this is a float",
                    at,
                    "write x ** y for a power" if op == "^" else "write int(...) around it",
                )
        return node(BINARY[op], a, b, span=span)
    if op == "**":
        return _power(a, b, span)
    if op == "/":
        a, b = as_float(a), as_float(b)
    a, b = unify(a, b)
    return node(BINARY[op], a, b, span=span)


def _power(a: Node, b: Node, span: Span) -> Node:
    whole = b.op is Op.CONST and b.dtype is DType.INT and int(b.value) >= 0  # type: ignore[arg-type]
    if a.dtype is DType.INT and whole:
        if int(b.value) > 64:  # type: ignore[arg-type]
            raise TypeMismatchError(
                "an int power beyond 64 does not fit 64 bits", span, "write a float: 2.0 ** 100"
            )
        return node(Op.POW, a, b, span=span)
    return node(Op.POW, as_float(a), as_float(b), span=span)


def compare(op: str, a: Node, b: Node, spans: tuple[Span, Span], span: Span) -> Node:
    """``a op b``; ``>`` and ``>=`` are turned round."""
    if op in ("==", "!="):
        if (a.dtype is DType.BOOL) is not (b.dtype is DType.BOOL):
            raise TypeMismatchError(
                f"'{op}' between a bool and a number", span, "compare numbers with numbers"
            )
    else:
        for operand, at in zip((a, b), spans, strict=True):
            need_number(operand, at, f"'{op}'")
    a, b = unify(a, b)
    if op in (">", ">="):
        a, b = b, a
    table = {"<": Op.LT, ">": Op.LT, "<=": Op.LE, ">=": Op.LE, "==": Op.EQ, "!=": Op.NE}
    return node(table[op], a, b, span=span)


def unary(op: str, operand: Node, at: Span, span: Span) -> Node:
    """``-x``, ``+x``, ``~x`` and ``not x``."""
    if op == "not" or (op == "~" and operand.dtype is DType.BOOL):
        return node(Op.NOT, need_bool(operand, at, f"'{op}'"), span=span)
    need_number(operand, at, f"'{op}'")
    if op == "~":
        if operand.dtype is not DType.INT:
            raise TypeMismatchError(
                "'~' takes an int or a bool, and this is a float", at, "write int(...) around it"
            )
        return node(Op.BITNOT, operand, span=span)
    if op == "+":
        return operand
    if operand.op is Op.CONST and not isinstance(operand.value, str | None):
        return const(-operand.value, span)
    return node(Op.NEG, operand, span=span)


def where(condition: Node, yes: Node, no: Node, span: Span) -> Node:
    """``yes if condition else no``; an int branch becomes a float beside a float one."""
    yes, no = unify(yes, no)
    if yes.dtype is not no.dtype:
        raise TypeMismatchError(
            f"one branch is of type {yes.dtype.value}, the other of type {no.dtype.value}",
            span,
            "give both branches one type",
        )
    return node(Op.WHERE, condition, yes, no, span=span)


def literal(text: str, span: Span) -> Node:
    """A number as written."""
    if text.isdigit():
        # More than 19 digits cannot fit, and Python refuses to read thousands of them.
        if len(text) > 19 or int(text) > _LARGEST_INT:
            raise TypeMismatchError(
                "this int does not fit 64 bits", span, "write a float, such as 1e30"
            )
        return const(int(text), span)
    return const(float(text), span)
