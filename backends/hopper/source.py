"""A program's Hopper kernels as text to read, on machines that need not have the GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import UnsupportedError

from ..triton.cross import parse_target
from ..triton.kernels import plan_loop
from ..triton.shares import wants_of_kernels
from ..triton.specialise import specialise, with_forms, with_gradients
from .backend import why_portable
from .generate import generate
from .kernels import HopperKernels, configs_of

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call, Wants


def hopper_source(lowered: Lowered, call: Call, direction: str, wants: Wants) -> str:
    """Text of the modules that ``call`` would use, ``forward`` or ``backward``.

    Raises:
        UnsupportedError: Portable kernels run ``call``; says why.
    """
    wants = wants_of_kernels(lowered, call, wants)
    refused = why_portable(lowered, call, direction, wants=wants)
    if refused is not None:
        raise UnsupportedError(
            refused, hint="the triton kernels run such calls: use backend='triton'"
        )
    special = specialise(lowered.program, call)
    if direction == "backward":
        special = with_gradients(special, wants)
    special = with_forms(special, lowered.program, parse_target("cuda:90"))
    texts = []
    for name in HopperKernels.directions[direction]:
        config = configs_of(lowered, special, name)[0]
        loop = plan_loop(lowered, special, name, config)
        texts.append(generate(lowered, special, name, loop, config))
    return "\n\n".join(texts)
