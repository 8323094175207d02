"""``x in t[b, hkv, q, :]``: its element and its row checked.

Non-goals: rows that are anything but one row of a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import TypeMismatchError
from attndsl.ir import DType, dependencies, member

if TYPE_CHECKING:
    from attndsl.ir import Node, TensorDecl
    from attndsl.source import Span

FORM = "write kv in chosen[b, hkv, q, :]"


def contains(
    element: Node, row: tuple[TensorDecl, tuple[Node, ...]], spans: tuple[Span, Span], span: Span
) -> Node:
    """The condition that a row of a tensor has an element.

    Args:
        element: The element.
        row: The tensor, and an int for each of its dims but the last.
        spans: Places of the element and of the row.
        span: Place of the condition.

    Raises:
        TypeMismatchError: Numbers that are no ints; the score in either; ``kv`` or ``q`` in both.
    """
    tensor, indices = row
    whats = "this is", f"'{tensor.name}' has"
    for kind, what, at in zip((element.dtype, tensor.dtype), whats, spans, strict=True):
        if kind is not DType.INT:
            raise TypeMismatchError(
                f"'in' looks for an int among ints, and {what} {kind.value}", at, FORM
            )
    varies = dependencies(element, *indices)
    chosen = frozenset().union(*(varies[index] for index in indices))
    for found, at in ((varies[element], spans[0]), (chosen, spans[1])):
        if "score" in found:
            raise TypeMismatchError("the score is on a side of 'in'", at, "use b, h, hkv, q and kv")
    for name, other in (("kv", "q"), ("q", "kv")):
        if name in varies[element] and name in chosen:
            raise TypeMismatchError(
                f"{name} chooses the row of '{tensor.name}' and is looked for in it",
                span,
                f"choose the row by {other}, b, h or hkv",
            )
    return member(element, tensor.name, *indices, span=span)
