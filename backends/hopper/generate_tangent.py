"""The text of the Hopper kernel that makes a forward's results and their tangents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .generate import generate

if TYPE_CHECKING:
    from attndsl.passes.tiles.plan import LoopPlan
    from attndsl.pipeline import Lowered

    from ..emit.facts import KernelFacts
    from ..kernels.config import Config


def generate_tangent(lowered: Lowered, facts: KernelFacts, loop: LoopPlan, config: Config) -> str:
    """The module of ``attention_forward_tangent``.

    Args:
        lowered: A program with the softmax's weights, and no dropout.
        facts: What the call is like, and which of ``q``, ``k`` and ``v`` move.
        loop: The plan of its loop.
        config: How many warpgroups share a tile, and whether programs have one after the other.
    """
    assert lowered.program.weights is None
    assert lowered.program.dropout is None
    assert not facts.moving_captures
    assert not facts.pair_tiles
    return generate(lowered, facts, "forward_tangent", loop, config)
