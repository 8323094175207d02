"""Gradients by distance from the backward itself, whose producer adds up dS along diagonals.

What is added to each score, and varies with its distance alone, has sums of dS for its gradient
(:mod:`...triton.captures.distance_sums`). A kernel of its own would make dS again, by two of the
backward's five products; here it lies in shared memory, for dQ.

Non-goals: programs in which that is not yet the gradient of the final score, deterministic calls,
and fp16, which would round it to 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...kernels.call_signature import PADDING
from ...triton.captures.distance_sums import BY_DISTANCE, add_distance_gradients
from ..capture_sums import holds_score_gradient
from ..tile_sizes import for_busy_producers
from .feature import Buffer, Feature, has_flag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.pipeline import Lowered

    from ...base import Call, CallGradients
    from ...emit.facts import KernelFacts
    from ...gradients.gradient_plan import GradientPlan
    from ...kernels.config import Config
    from ...kernels.kernel import Task
    from .feature import ModuleSpec

_FLAG = "ADDS_DIAGONALS"
_MOST_KEYS = 1 << 14
"""Beyond, sums take more than twice the memory of dQ's at head dim 128."""
_LINES = 2048
"""Bytes in which sums along a tile's diagonals get from warp to warp."""


def _takes(plan: GradientPlan, lowered: Lowered, call: Call) -> GradientPlan:
    own = plan.of_kind(BY_DISTANCE.name)
    # A producer that adds up diagonals and keeps turns spills many registers.
    if not own or call.deterministic or call.k.shape[2] > _MOST_KEYS:
        return plan
    if not holds_score_gradient(lowered, call):
        return plan
    return plan.with_feature(_FLAG, frozenset[str]().union(*(share.names for share in own)))


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
    return call.q.new_zeros((batch, heads, kv_tiles, distances), dtype=torch.float32)


def collect(
    lowered: Lowered, call: Call, names: frozenset[str], buffers: Mapping[str, torch.Tensor],
    found: CallGradients,
) -> CallGradients:  # fmt: skip
    """``found`` with the gradients of :func:`empty_sums`, once the kernel has added to them."""
    sums = buffers["DISTANCE_SUMS"]
    first = -(-call.q.shape[2] // PADDING) * PADDING - sums.shape[3]
    return add_distance_gradients(lowered, call, sums.sum(2), first, names, found)


def _shared_bytes(task: Task, facts: KernelFacts, config: Config) -> int:
    return _LINES * (_FLAG in facts.features)


def _imports(spec: ModuleSpec) -> list[str]:
    return ["from attndsl.backends.hopper.diagonal_sums import add_diagonals"]


DIAGONALS = Feature(
    _FLAG,
    has_flag(_FLAG),
    template="diagonals",
    imports=_imports,
    shared_bytes=_shared_bytes,
    configs=for_busy_producers,
    sums=(Buffer("DISTANCE_SUMS", "*fp32", empty_sums),),
    takes=_takes,
    collect=collect,
)
