"""Gradients of what varies with the distance between query and key: tables, buckets, slopes.

With dS the gradient of the final score and f(q - kv) a term of it, the gradient of f at a distance
is the sum of dS along a diagonal. A kernel adds up whole tiles along the diagonals of tiles, in a
fixed order; torch does the rest on one value a distance (batch, heads, distances).

Non-goals: calls whose positions are looked up, what the program's weights or dropout mention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.passes.distance import varies_with_distance_alone

from ..tiled.capture_gradients import CaptureSums
from ..tiled.step_plan import QueryStep
from ..tiled.tile_expressions import Expressions
from .terms import terms_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from ..base import Call, Gradients, Wants


def by_distance(lowered: Lowered, call: Call, names: Collection[str]) -> frozenset[str]:
    """The tensors and params of ``names`` whose gradients are sums along diagonals."""
    if not names or call.indexed:
        return frozenset()
    roots: dict[str, list[Node]] = {}
    others = set()
    for term in terms_of(lowered, names):
        roots.setdefault(term.name, []).extend((*term.factors.values(), *term.leaf.args))
        if term.factors.keys() != {"score"}:
            others.add(term.name)
    return frozenset(
        name
        for name, found in roots.items()
        if name not in others and varies_with_distance_alone(*found)
    )


def sums_of_distances(sums: torch.Tensor) -> torch.Tensor:
    """(batch, heads, distances), from 1 less the keys of all tiles on.

    Args:
        sums: (batch, heads, diagonals of tiles, parts, keys of a tile) fp32, see ``distances``.
    """
    batch, heads, diagonals, parts, block = sums.shape
    whole = sums.new_zeros((batch, heads, diagonals + parts - 1, block))
    # Neighbouring diagonals of tiles share distances.
    for part in range(parts):
        whole[:, :, part : part + diagonals] += sums[..., part, :]
    return whole.flatten(2)


def add_distance_gradients(
    lowered: Lowered, call: Call, sums: torch.Tensor, first: int, apart: Wants, found: Gradients
) -> Gradients:
    """``found`` with the gradients of ``apart``.

    Args:
        lowered: The program.
        call: As of the backward.
        sums: (batch, heads, distances) fp32, sums of dS along diagonals.
        first: The first distance, row of the query less row of the key; each next is one more.
        apart: Of :func:`by_distance`.
        found: The gradients of all else.
    """
    batch, heads, number = sums.shape
    distances = torch.arange(first, first + number, device=sums.device)
    # As if each distance were a query, and its key the position 0.
    as_queries = call._replace(
        q=call.q.new_empty((batch, heads, len(distances), 1)),
        k=call.k.new_empty((batch, call.k.shape[1], 1, 1)),
        q_offset=0, kv_offset=0, q_index=distances + call.q_offset - call.kv_offset,
    )  # fmt: skip
    totals = CaptureSums(call, apart)
    step = QueryStep((0, batch), (0, heads), (0, len(distances)), ())
    tile = Expressions(as_queries).tile(step, (0, 1), sums.new_empty((batch, heads, 1, 1)))
    totals.add(totals.of_score(lowered.derivative), sums[..., None], tile)
    return found._replace(
        tensors={**found.tensors, **totals.tensors()},
        params={**found.params, **totals.params()},
    )
