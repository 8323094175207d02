"""Gradients of what varies with the distance between query and key: tables, buckets, slopes.

With dS the gradient of the final score and f(q - kv) a term of it, the gradient of f at a distance
is the sum of dS along a diagonal. A kernel adds up whole tiles along the diagonals of tiles, in a
fixed order; torch does the rest on one value a distance (batch, heads, distances).

Non-goals: calls whose positions are looked up, programs with weights of their own or dropout.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attndsl.passes.distance import varies_with_distance_alone

from ..capture_sums import CaptureSums
from ..cpu_tiles import Expressions, Step
from .sinks import without_sinks

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.pipeline import Lowered

    from ..base import Call, Gradients, Wants


def by_distance(lowered: Lowered, call: Call, wants: Wants) -> Wants:
    """Those of the tensors and params in ``wants`` whose gradients are sums along diagonals."""
    program, derivative = lowered.program, lowered.derivative
    names = wants.tensors | wants.params
    if not names or program.weights is not None or program.dropout is not None or call.indexed:
        return replace(wants, tensors=frozenset(), params=frozenset())
    roots: dict[str, list[Node]] = {}
    for tensor in derivative.tensors:
        roots.setdefault(str(tensor.load.value), []).extend((tensor.factor, *tensor.load.args))
    for scalar in derivative.params:
        roots.setdefault(scalar.name, []).append(scalar.factor)
    found = {name for name in names & roots.keys() if varies_with_distance_alone(*roots[name])}
    return replace(wants, tensors=wants.tensors & found, params=wants.params & found)


def share_out(lowered: Lowered, call: Call, wants: Wants) -> tuple[Wants, Wants]:
    """What is summed along diagonals, and what attention kernels add up; neither a sink's own."""
    scored = without_sinks(lowered, wants)
    apart = by_distance(lowered, call, scored)
    tensors, params = scored.tensors - apart.tensors, scored.params - apart.params
    return apart, replace(scored, tensors=tensors, params=params)


def wants_of_kernels(lowered: Lowered, call: Call, wants: Wants) -> Wants:
    """What the attention kernels themselves add up."""
    return share_out(lowered, call, wants)[1]


def add_distance_gradients(
    lowered: Lowered, call: Call, sums: torch.Tensor, apart: Wants, found: Gradients
) -> Gradients:
    """``found`` with the gradients of ``apart``.

    Args:
        lowered: The program.
        call: As of the backward.
        sums: (batch, heads, diagonals of tiles, 2, rows of a tile) fp32, see ``distances``.
        apart: Of :func:`by_distance`.
        found: The gradients of all else.
    """
    batch, heads, diagonals, _, block = sums.shape
    whole = sums.new_zeros((batch, heads, diagonals + 1, block))
    # Neighbouring diagonals of tiles share distances.
    whole[:, :, :-1] += sums[..., 0, :]
    whole[:, :, 1:] += sums[..., 1, :]
    kv_tiles = -(-call.k.shape[2] // block)
    distances = torch.arange(whole[0, 0].numel(), device=sums.device) + (1 - block * kv_tiles)
    # As if each distance were a query, and its key the position 0.
    as_queries = replace(
        call,
        q=call.q.new_empty((batch, heads, len(distances), 1)),
        k=call.k.new_empty((batch, call.k.shape[1], 1, 1)),
        q_offset=0, kv_offset=0, q_index=distances + call.q_offset - call.kv_offset,
    )  # fmt: skip
    totals = CaptureSums(call, apart)
    step = Step((0, batch), (0, heads), (0, len(distances)), ())
    tile = Expressions(as_queries).tile(step, (0, 1), whole.new_empty((batch, heads, 1, 1)))
    totals.add(totals.of_score(lowered.derivative), whole.flatten(2)[..., None], tile)
    return replace(
        found,
        tensors={**found.tensors, **totals.tensors()},
        params={**found.params, **totals.params()},
    )
