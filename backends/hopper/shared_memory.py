"""Shared memory of a Hopper kernel: what its tiles and its features take together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..kernels.config import shared_memory_of
from ..kernels.kernel import Task
from .features import FEATURES
from .tile_shapes import block_width, key_blocks, key_width, widest

if TYPE_CHECKING:
    from ..emit.facts import KernelFacts
    from ..kernels.config import Config

_REST = 768
"""Bytes of barriers and of descriptions of work tiles, rounded up."""
_OVERFLOWED = 384
"""Bytes of the flags of weights that were too large, for at most three consumers, rounded up."""
_TURNED = 16384
"""Bytes that hand a backward's rows of dK and dV from the warps that compute them to those that
store them; above head dim 128 the places of k and v do."""


def has_own_output(facts: KernelFacts, config: Config) -> bool:
    """Return True if a forward's output lies beside q in shared memory, not in its place.

    The next work tile's rows of q may then come before those of the output have gone. Forwards with
    places for two work tiles' rows of q do without it: see :func:`query_slots`.
    """
    if _differs_from_q(facts):
        return True
    if not config.persistent or key_blocks(Task.FORWARD, facts) > 1:
        return False
    return bool(facts.moving_operands) and _has_room(facts, config)


def query_slots(facts: KernelFacts, config: Config) -> int:
    """Number of work tiles whose rows of q, and output in their place, a forward has room for.

    With two, the next work tile's rows of q come while the consumers compute.
    """
    if facts.moving_operands or not config.persistent or _differs_from_q(facts):
        return 1
    return 2 if _has_room(facts, config) else 1


def deepened(facts: KernelFacts, config: Config) -> Config:
    """A forward's config with a third stage, where there is room beside rows of two work tiles.

    Keys of the next work tile then come while the consumers compute: see M47 in
    docs/dev/measured.md.
    """
    more = replace(config, stages=max(config.stages, 3))
    return more if query_slots(facts, more) == 2 else config


def _differs_from_q(facts: KernelFacts) -> bool:
    """Return True if rows of the output have another width than those of q, or than two blocks."""
    differ = block_width(facts.head_dim) != block_width(facts.value_dim)
    return differ and key_blocks(Task.FORWARD, facts) == 1


def _has_room(facts: KernelFacts, config: Config) -> bool:
    """Return True if a forward has room for output rows, or as many of q, beside the rest."""
    d, dv = key_width(Task.FORWARD, facts), block_width(facts.value_dim)
    q, k, v = (1 + (name in facts.moving_operands) for name in "qkv")
    elements = config.block_m * (q * d + dv) + config.stages * config.block_n * (k * d + v * dv)
    more = _feature_bytes(Task.FORWARD, facts, config)
    return 2 * elements + more + (_REST + _OVERFLOWED) * bool(more) < shared_memory_of("cuda:90")


def shared_bytes(task: Task, facts: KernelFacts, config: Config) -> int:
    """Least shared memory of a kernel, in bytes: the output in the place of q, if it can be."""
    d, dv = key_width(task, facts), block_width(facts.value_dim)
    m, n, stages = config.block_m, config.block_n, config.stages
    if task is Task.FORWARD:
        elements = m * d + stages * n * (d + dv) + m * dv * _differs_from_q(facts)
    else:
        elements = (n + stages * m) * (d + dv)
        # dS; above head dim 128 once, and weights' slopes in fp32. Row statistics are two of fp32.
        elements += 3 * n * m if widest(facts) > 128 else 2 * n * m
        elements += 4 * stages * m
    turned = _TURNED * (task is not Task.FORWARD and widest(facts) <= 128)
    more = _feature_bytes(task, facts, config)
    return 2 * elements + more + turned + _REST + _OVERFLOWED * (task is Task.FORWARD)


def _feature_bytes(task: Task, facts: KernelFacts, config: Config) -> int:
    return sum(feature.shared_bytes(task, facts, config) for feature in FEATURES)
