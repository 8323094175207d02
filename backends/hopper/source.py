"""A program's Hopper kernels as text to read, on machines that need not have the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import UnsupportedError
from attndsl.passes.tiles.plan import LoopPlan

from ..triton.cross import parse_target
from ..triton.generate import generate_attention
from ..triton.kernels import plan_loop
from ..triton.shares import wants_of_kernels
from ..triton.specialise import specialise, with_forms, with_gradients, with_pair_sums
from .backend import why_portable
from .generate import generate
from .kernels import HopperKernels, configs_of
from .pair_tiles import with_pair_tiles
from .stored import shares_of

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Wants


def hopper_source(lowered: Lowered, call: Call, direction: str, wants: Wants) -> str:
    """Text of the modules that ``call`` would use, ``forward`` or ``backward``.

    Raises:
        UnsupportedError: Portable kernels run ``call``; says why.
    """
    refused = why_portable(lowered, call, direction, wants=wants_of_kernels(lowered, call, wants))
    if refused is not None:
        raise UnsupportedError(
            refused, hint="the triton kernels run such calls: use backend='triton'"
        )
    special = specialise(lowered.program, call)
    special = with_forms(special, lowered.program, parse_target("cuda:90"))
    sums = []
    if direction == "backward":
        shares = shares_of(lowered, call, wants)
        for group in shares.stored:
            own = with_pair_sums(with_gradients(special, group), lowered, call)
            sums.append(generate_attention(lowered, own, "stored", LoopPlan()))
        special = with_gradients(special, shares.lines)
    texts = []
    for name in HopperKernels.directions[direction]:
        own = with_pair_tiles(special, lowered, call, name)
        config = configs_of(lowered, own, name)[0]
        loop = plan_loop(lowered, own, name, config)
        texts.append(generate(lowered, own, name, loop, config))
    return "\n\n".join([*texts, *sums])
