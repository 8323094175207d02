"""``dot(u[b, h, q, :], w[b, hkv, kv, :])``: its operands checked, and put in order.

Non-goals: operands that are more than a row of one tensor; rows that both positions choose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import RankError, TypeMismatchError
from attndsl.ir import DType, Op, Side, contraction, dependencies

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.ir import Node, TensorDecl
    from attndsl.source import Span

NAME = "dot"
FORM = "write dot(u[b, h, q, :], w[b, hkv, kv, :])"


def contract(
    tensors: Sequence[TensorDecl],
    indices: Sequence[tuple[Node, ...]],
    spans: Sequence[Span],
    span: Span,
) -> Node:
    """The contraction of two rows, that of the queries first.

    Args:
        tensors: Whose rows.
        indices: Which rows: one int for each dim but the last.
        spans: Where each row was written.
        span: Where all was.

    Raises:
        TypeMismatchError: Rows of no floats, or that the wrong positions choose.
        RankError: Rows of different lengths.
    """
    found = []
    for tensor, chosen, at in zip(tensors, indices, spans, strict=True):
        if tensor.dtype is not DType.FLOAT:
            raise TypeMismatchError(
                f"dot multiplies floats, and '{tensor.name}' is a tensor of {tensor.dtype.value}",
                at,
                "declare it as float, and pass it so",
            )
        found.append(_positions(tensor, chosen, at))
    left, right = (
        Side(tensor.name, chosen) for tensor, chosen in zip(tensors, indices, strict=True)
    )
    last, other = (tensor.dims[-1] for tensor in tensors)
    if last.op is Op.CONST and other.op is Op.CONST and last is not other:
        raise RankError(
            f"the rows have {last.value} and {other.value} elements",
            span,
            "dot multiplies element by element: declare both with one length",
        )
    first, second = found
    if first == second and first:
        (position,) = first
        raise TypeMismatchError(
            f"both rows are chosen by {position}",
            span,
            f"multiply and add them up before the call, and look the sums up by {position}",
        )
    if "kv" in first or "q" in second:
        left, right = right, left
    return contraction(left, right, span)


def _positions(tensor: TensorDecl, indices: tuple[Node, ...], at: Span) -> frozenset[str]:
    """Positions that choose the row, out of ``q`` and ``kv``."""
    found = dependencies(*indices)
    varies = frozenset().union(*(found[index] for index in indices))
    if "score" in varies:
        raise TypeMismatchError(
            f"the score chooses the row of '{tensor.name}'", at, "use b, h, hkv, q and kv"
        )
    if {"q", "kv"} <= varies:
        raise TypeMismatchError(
            f"q and kv together choose the row of '{tensor.name}', so that there are as many rows "
            "as pairs",
            at,
            "choose one row by q and the other by kv, or look up single elements: "
            f"{tensor.name}[..., 0] * ...",
        )
    return varies & {"q", "kv"}
