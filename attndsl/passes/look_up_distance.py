"""A part of the score that follows from the distance, as a lookup of what it is there.

``score + table[h, t5_bucket(q - kv, 32, 128)]`` has as many values for each head as there are
distances, some q_len + kv_len, and as many pairs as the product of these. The program becomes two:
one whose score is that part, and ``score + by_distance[h, distance_start + q - kv]``. Pairs of one
batch entry and head that are equally far apart then share one evaluation.

Non-goals: parts of masks, weights, sinks and dropout, or that vary with the score too; more than
one part at a time (the one with the most work; the rest may have another).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from operator import itemgetter
from typing import TYPE_CHECKING

from attndsl.ir import (
    SCORE,
    DType,
    Node,
    Op,
    ParamDecl,
    Program,
    TensorDecl,
    const,
    dependencies,
    leaf_names,
    load,
    node,
    param,
    size,
    substitute,
    toposort,
    var,
)

from .distance import met_by_distance
from .fold_dots import with_score
from .sub_program import FreshNames

if TYPE_CHECKING:
    from collections.abc import Callable

    from .lowered import Lowered

MARGIN = 512
"""Distances on either side of those of a call. Tiles have rows and keys behind those of the call,
at most so many, and look up values for them too: no index leaves the tensor, and none is clamped.
"""
_ALONG = {"b": "batch", "h": "heads"}
"""Variables besides the distance that values may vary with, and the sizes that count them."""


@dataclass(frozen=True, slots=True)
class DistanceLookup:
    """A program in two: values by distance, and the rest, which looks them up."""

    values: Lowered
    """Its score is the part."""
    lowered: Lowered
    """Its score has a lookup in place of the part."""
    tensor: str
    """Tensor of the values: (batch, heads, distances), without the dims of which they do not vary.

    There are q_len + kv_len + 2 * MARGIN distances. The first is that of row 0 to a key which is
    MARGIN behind the last."""
    start: str
    """Param that is the index of distance 0."""
    along: tuple[str, ...]
    """The subset of ``b`` and ``h`` that the values vary with, in this order."""
    saved: int
    """Work that a pair is spared, as the caller measures work."""
    learned: frozenset[str]
    """Names of the tensors and params that the values follow from."""
    summed: frozenset[str] = frozenset()
    """Parts whose gradients are as cheap to make of the values' gradient."""


def distance_lookup(
    program: Program, lower: Callable[[Program], Lowered], work: Callable[[Node], int], least: int
) -> DistanceLookup | None:
    """Look up the part of the score by distance whose lookup saves the most work.

    ``program`` has been lowered: the rest of its mask has been split from the score. ``work`` is
    that of an expression for a pair. None if less than ``least`` of it is saved.
    """
    names = FreshNames(program)
    tensor, start = names["by_distance"], names["distance_start"]
    place = node(Op.SUB, node(Op.ADD, param(start, DType.INT), var("q")), var("kv"))
    found = []
    for part in _parts(program.score):
        varies = dependencies(part)[part]
        along = tuple(name for name in _ALONG if name in varies)
        lookup = load(tensor, DType.FLOAT, *map(var, along), place)
        found.append((work(part) - work(lookup), part, along, lookup))
    saved, part, along, lookup = max(found, key=itemgetter(0), default=(-1, SCORE, (), SCORE))
    if saved < least:
        return None
    whole = Program(part, exact=program.exact, params=program.params, tensors=program.tensors)
    rest = with_score(program, substitute(program.score, {part: lookup}))
    rest = replace(
        rest,
        tensors=(*rest.tensors, _declared(tensor, along)),
        params=(*rest.params, ParamDecl(start, DType.INT, is_position=True)),
        lines=(),
    )
    values = lower(with_score(whole, part))
    return DistanceLookup(values, lower(rest), tensor, start, along, saved, leaf_names(part))


def _parts(score: Node) -> list[Node]:
    """The FLOAT parts of ``score`` that vary with the distance of positions, but no operands."""
    varies, alone = dependencies(score), met_by_distance(score)
    found = [
        item
        for item in toposort(score)
        if item.dtype is DType.FLOAT
        and alone[item]
        and varies[item] >= {"q", "kv"}
        and "score" not in varies[item]
    ]
    operands = {arg for item in found for arg in item.args}
    return [item for item in found if item not in operands]


def _declared(tensor: str, along: tuple[str, ...]) -> TensorDecl:
    lengths = node(Op.ADD, size("q_len"), size("kv_len"))
    number = node(Op.ADD, lengths, const(2 * MARGIN))
    dims = (*(size(_ALONG[name]) for name in along), number)
    return TensorDecl(tensor, DType.FLOAT, dims, is_padded=True)
