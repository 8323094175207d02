"""Which gradient sums have one term an element, so that their order cannot vary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import Op, toposort

if TYPE_CHECKING:
    from collections.abc import Set

    from attndsl.ir import Program

    from ..base import Call

_PLACES = (("b", "batch"), ("h", "heads"), ("q", "q_len"), ("kv", "kv_len"))


def of_pairs(program: Program, call: Call) -> Set[str]:
    """Tensors of which each pair of ``call`` looks up one element, which no other pair does.

    That is ``bias[b, h, q, kv]``, declared with just these sizes. Where positions are shifted or
    mapped, two pairs may meet in one element.
    """
    if call.shifted or call.indexed:
        return frozenset()
    roots = (program.score, program.sink, program.weights, program.dropout)
    loads = [
        item for item in toposort(*(root for root in roots if root is not None))
        if item.op is Op.LOAD
    ]  # fmt: skip
    found = set()
    for decl in program.tensors:
        lookups = [load for load in loads if load.value == decl.name]
        if len(lookups) == 1 and len(decl.dims) == len(_PLACES):
            pairs = [
                (index.value, dim.value)
                for index, dim in zip(lookups[0].args, decl.dims, strict=True)
                if index.op is Op.VAR and dim.op is Op.SIZE
            ]
            if sorted(map(str, pairs)) == sorted(map(str, _PLACES)):
                found.add(decl.name)
    return found
