"""A program's Hopper kernels as text to read, on machines that need not have the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attndsl.errors import UnsupportedError
from attndsl.passes.tiles.plan import LoopPlan

from ..base import Wants
from ..emit.facts import facts_of, with_forms, with_gradients
from ..gradients.pairs import with_pair_sums
from ..kernels.config import shared_memory_of
from ..triton.cross import candidates_of, parse_target
from ..triton.generate import generate_attention
from ..triton.kernels import plan_loop
from .distances import with_diagonals
from .generate import generate
from .generate_tangent import generate_tangent
from .kernels import HopperKernels, configs_of
from .pair_tiles import with_pair_tiles
from .portable import why_portable
from .shares import shares_of

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call


def hopper_source(lowered: Lowered, call: Call, direction: str, wants: Wants) -> str:
    """Text of the modules that ``call`` would use, ``forward``, ``backward`` or ``tangent``.

    Tangents are along q, k and v.

    Raises:
        UnsupportedError: Portable kernels run ``call``; says why.
    """
    shares = shares_of(lowered, call, Wants() if direction == "tangent" else wants)
    refused = why_portable(lowered, call, direction, wants=shares.lines)
    if refused is not None:
        raise UnsupportedError(
            refused, hint="the triton kernels run such calls: use backend='triton'"
        )
    facts = facts_of(lowered.program, call)
    facts = with_forms(facts, lowered.program, parse_target("cuda:90"))
    if direction == "tangent":
        (name,) = HopperKernels.directions[direction]
        own = replace(facts, moving_operands="qkv")
        config = configs_of(lowered, own, name)[0]
        return generate_tangent(lowered, own, plan_loop(lowered, own, name, config), config)
    sums = []
    if direction == "backward":
        for group in shares.stored:
            own = with_pair_sums(with_gradients(facts, group), lowered, call)
            (config, *_) = candidates_of(lowered, own, "stored", shared_memory_of("cuda:90"))
            sums.append(generate_attention(lowered, own, "stored", LoopPlan(), config))
        facts = with_diagonals(with_gradients(facts, shares.lines), lowered, call)
    texts = []
    for name in HopperKernels.directions[direction]:
        own = with_pair_tiles(facts, lowered, call, name)
        config = configs_of(lowered, own, name)[0]
        loop = plan_loop(lowered, own, name, config)
        texts.append(generate(lowered, own, name, loop, config))
    return "\n\n".join([*texts, *sums])
