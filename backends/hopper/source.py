"""A program's Hopper kernels as text to read, on machines that need not have the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import UnsupportedError

from ..triton.cross import parse_target
from ..triton.kernels import plan_loop
from ..triton.specialise import specialise, with_forms, with_gradients
from .backend import why_portable
from .distances import shares_of, with_diagonals
from .generate import generate
from .kernels import HopperKernels, configs_of
from .pair_tiles import with_pair_tiles

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Wants


def hopper_source(lowered: Lowered, call: Call, direction: str, wants: Wants) -> str:
    """Text of the modules that ``call`` would use, ``forward`` or ``backward``.

    Raises:
        UnsupportedError: Portable kernels run ``call``; says why.
    """
    wants = shares_of(lowered, call, wants).lines
    refused = why_portable(lowered, call, direction, wants=wants)
    if refused is not None:
        raise UnsupportedError(
            refused, hint="the triton kernels run such calls: use backend='triton'"
        )
    special = specialise(lowered.program, call)
    if direction == "backward":
        special = with_diagonals(with_gradients(special, wants), lowered, call)
    special = with_forms(special, lowered.program, parse_target("cuda:90"))
    texts = []
    for name in HopperKernels.directions[direction]:
        own = with_pair_tiles(special, lowered, call, name)
        config = configs_of(lowered, own, name)[0]
        loop = plan_loop(lowered, own, name, config)
        texts.append(generate(lowered, own, name, loop, config))
    return "\n\n".join(texts)
