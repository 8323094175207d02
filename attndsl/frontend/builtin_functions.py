"""The built-in functions: their numbers of arguments and their types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import RankError, counted
from attndsl.ir import FLOAT_UNARY, DType, Node, Op, cast, node

from .promotion import as_float, need_bool, need_number, unify, where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.source import Span

FLOAT_FUNCTIONS = {op.value: op for op in FLOAT_UNARY}
_COUNTS = {"where": 3, "clamp": 3, "abs": 1, "sign": 1, "int": 1, "float": 1, "bool": 1}
NAMES = frozenset({*FLOAT_FUNCTIONS, *_COUNTS, "min", "max"})
FORMS = {
    "where": "where(c, x, y)", "clamp": "clamp(x, low, high)", "min": "min(x, y)",
    "max": "max(x, y)", "dot": "dot(u[b, h, q, :], w[b, hkv, kv, :])",
    "given": "given(x)", "softmax": "softmax(score)", "dropout": "dropout(softmax(score), 0.1)",
}  # fmt: skip
"""Example calls of the functions that do not take one number ``x``."""
REDUCTIONS = frozenset(
    {
        "sum", "mean", "cumsum", "cumprod", "prod", "amax", "amin", "argmax", "argmin", "any",
        "all",         "norm", "std", "var", "logsumexp", "reduce", "sort", "median",
    }
)  # fmt: skip


def apply(name: str, args: Sequence[Node], spans: Sequence[Span], span: Span) -> Node:
    """The built-in function ``name`` of ``args``."""
    _check_count(name, args, span)
    if name == "where":
        return where(need_bool(args[0], spans[0], "the condition of where"), args[1], args[2], span)
    if name == "bool":
        return cast(args[0], DType.BOOL, span)
    if name == "int":
        return cast(args[0], DType.INT, span)
    if name == "float":
        return as_float(args[0]) if args[0].dtype is DType.INT else cast(args[0], DType.FLOAT, span)
    for arg, at in zip(args, spans, strict=True):
        need_number(arg, at, name)
    if name in FLOAT_FUNCTIONS:
        return node(FLOAT_FUNCTIONS[name], as_float(args[0]), span=span)
    if name in ("abs", "sign"):
        return node(Op.ABS if name == "abs" else Op.SIGN, args[0], span=span)
    if name == "clamp":
        return _fold(Op.MIN, [_fold(Op.MAX, [args[0], args[1]], span), args[2]], span)
    return _fold(Op.MIN if name == "min" else Op.MAX, args, span)


def _check_count(name: str, args: Sequence[Node], span: Span) -> None:
    wanted = _COUNTS.get(name, 1)
    if name in ("min", "max"):
        if len(args) < 2:
            raise RankError(
                f"{name} compares at least two values of a pair, and has {len(args)}",
                span,
                "reduce a tensor before the call and pass the result as a tensor",
            )
    elif len(args) != wanted:
        raise RankError(
            f"{name} takes {counted(wanted, 'argument')}, and has {len(args)}",
            span,
            f"write {FORMS.get(name, f'{name}(x)')}",
        )


def _fold(op: Op, args: Sequence[Node], span: Span) -> Node:
    total = args[0]
    for arg in args[1:]:
        total = node(op, *unify(total, arg), span=span)
    return total
