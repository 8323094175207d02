"""Gradients by distance from the backward itself, whose producer adds up dS along diagonals.

What is added to each score, and varies with its distance alone, has sums of dS for its gradient
(``gradients.distances``). A kernel of its own would make dS again, by two of the backward's five
products; here it lies in shared memory, for dQ.

Non-goals: programs in which that is not yet the gradient of the final score, deterministic calls,
and fp16, which would round it to 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..gradients.distances import add_distance_gradients, by_distance
from ..kernels.signature import PADDING
from .capture_sums import holds_score_gradient

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Gradients, Wants
    from ..emit.facts import KernelFacts
    from ..gradients.plan import GradientPlan
    from ..kernels.config import Config

_MOST_KEYS = 1 << 14
"""Beyond, sums take more than twice the memory of dQ's at head dim 128."""


def with_summed(found: GradientPlan, lowered: Lowered, call: Call) -> GradientPlan:
    """``found``, where the backward makes gradients by distance too."""
    apart = found.distances
    if not among(lowered, call, apart.tensors | apart.params):
        return found
    lines = replace(
        found.lines,
        tensors=found.lines.tensors | apart.tensors,
        params=found.lines.params | apart.params,
    )
    nothing = replace(apart, tensors=frozenset(), params=frozenset())
    return replace(found, lines=lines, distances=nothing)


def among(lowered: Lowered, call: Call, names: frozenset[str]) -> frozenset[str]:
    """Those of the tensors and params ``names`` whose gradients the backward makes by distance."""
    if not names or not holds_score_gradient(lowered, call):
        return frozenset()
    # A producer that adds up diagonals and keeps turns spills many registers.
    if call.deterministic or call.k.shape[2] > _MOST_KEYS:
        return frozenset()
    return by_distance(lowered, call, names)


def with_diagonals(facts: KernelFacts, lowered: Lowered, call: Call) -> KernelFacts:
    """``facts`` of a backward that adds up diagonals for the gradients that come of them."""
    names = frozenset((*facts.tensor_gradients, *facts.param_gradients))
    summed = among(lowered, call, names)
    if not summed:
        return facts
    return replace(
        facts,
        tensor_gradients=tuple(n for n in facts.tensor_gradients if n not in summed),
        param_gradients=tuple(n for n in facts.param_gradients if n not in summed),
        adds_diagonals=True,
    )


def empty_sums(call: Call, config: Config) -> torch.Tensor:
    """(batch, heads, key tiles, distances) fp32, zeros.

    Each tile of keys has sums of its own, so that one program adds to each. Distances are query
    less key, from minus the keys of all tiles on, up to the padded number of queries: for 8192 of
    both 4 MiB a head, as much as dQ's sums at head dim 128. A tile meets half of them; what is left
    empty makes distances lie at one place in all tiles.
    """
    batch, heads, q_len, _ = call.q.shape
    kv_tiles = -(-call.k.shape[2] // config.block_n)
    distances = -(-q_len // PADDING) * PADDING + kv_tiles * config.block_n
    return torch.zeros(
        (batch, heads, kv_tiles, distances), dtype=torch.float32, device=call.q.device
    )


def split(lowered: Lowered, call: Call, wants: Wants) -> tuple[Wants, Wants]:
    """The gradients in ``wants`` that the backward makes by distance, and the others."""
    names = among(lowered, call, wants.tensors | wants.params)
    others = replace(wants, tensors=wants.tensors - names, params=wants.params - names)
    own = replace(wants, tensors=wants.tensors & names, params=wants.params & names)
    return own, others


def with_distances(
    lowered: Lowered, call: Call, sums: torch.Tensor, config: Config, own: Wants, found: Gradients
) -> Gradients:
    """``found`` with the gradients ``own``, by distance, of sums as :func:`empty_sums`."""
    first = -sums.shape[2] * config.block_n
    return add_distance_gradients(lowered, call, sums.sum(2), first, own, found)
