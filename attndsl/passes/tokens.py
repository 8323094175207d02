"""``token`` and ``tokens``: the rows of q of all batch entries, counted one entry after the other.

In a call that is no part, row ``q`` of entry ``b`` is token ``b * q_len + q``: backends get that.
Where logical positions are no rows, or where requests are packed, a token is something else, and
:mod:`.sub_program` starts from the program as it was written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attndsl.ir import TOKEN, TOKENS, Op, node, size, substitute, substitute_on, toposort, var

if TYPE_CHECKING:
    from attndsl.ir import Node, Program

_KNOWN = {
    var(TOKEN): node(Op.ADD, node(Op.MUL, var("b"), size("q_len")), var("q")),
    size(TOKENS): node(Op.MUL, size("batch"), size("q_len")),
}


def mentions_tokens(program: Program) -> bool:
    """Return True if a program, or the size of a tensor of it, is written with either name."""
    dims = [dim for decl in program.tensors for dim in decl.dims]
    return not _KNOWN.keys().isdisjoint(toposort(*program.roots(), *dims))


def without_tokens(item: Node, done: dict[Node, Node] | None = None) -> Node:
    """An expression in other variables; ``done``, empty at first, is shared between expressions."""
    if done is None:
        return substitute(item, _KNOWN)
    if not done:
        done.update(_KNOWN)
    return substitute_on(item, done)


def expanded(program: Program) -> Program:
    """The program of calls that are no part; itself where it mentions neither name."""
    if not mentions_tokens(program):
        return program
    parts = (program.mask, program.sink, program.weights, program.dropout)
    mask, sink, weights, dropout = (None if x is None else without_tokens(x) for x in parts)
    return replace(
        program,
        score=without_tokens(program.score),
        mask=mask,
        sink=sink,
        weights=weights,
        dropout=dropout,
        tensors=tuple(
            replace(decl, dims=tuple(map(without_tokens, decl.dims))) for decl in program.tensors
        ),
        by_token=True,
    )
