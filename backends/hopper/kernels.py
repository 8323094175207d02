"""Hopper kernels beside the portable ones: which are generated, and with which arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..triton.kernels import Kernels
from .arguments import block_width, forward_arguments
from .generate import generate_forward
from .tiles import forward_candidates

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from triton.backends.compiler import GPUTarget

    from attndsl.passes.tiles.plan import LoopPlan
    from attndsl.pipeline import Lowered

    from ..triton.compile import Argument
    from ..triton.specialise import Specialisation
    from ..triton.tiles import Config


class HopperKernels(Kernels):
    """The forward for Hopper; all else as the portable family has it."""

    def _configs(
        self, lowered: Lowered, direction: str, special: Specialisation,
        target: GPUTarget | None, device: torch.device,
    ) -> tuple[Config, ...]:  # fmt: skip
        if direction != "forward":
            return super()._configs(lowered, direction, special, target, device)
        return forward_candidates(max(map(block_width, (special.head_dim, special.value_dim))))

    def _text(
        self, lowered: Lowered, special: Specialisation, direction: str, loop: LoopPlan,
        config: Config,
    ) -> str:  # fmt: skip
        if direction != "forward":
            return super()._text(lowered, special, direction, loop, config)
        return generate_forward(lowered, special, loop, config.consumers)

    def _arguments(
        self, function: object, special: Specialisation, precision: str,
        target: GPUTarget | None, more: Mapping[str, int | bool], config: Config,
    ) -> list[Argument]:  # fmt: skip
        if not config.consumers:
            return super()._arguments(function, special, precision, target, more, config)
        return forward_arguments(function, special, config)

    def _key(
        self, lowered: Lowered, kind: str, special: Specialisation, precision: str,
        target: GPUTarget | None,
    ) -> str:  # fmt: skip
        family = "hopper" if kind == "forward" else kind
        return super()._key(lowered, family, special, precision, target)
