"""Hopper kernels beside the portable ones: which are generated, and with which arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from ..kernels.pair_work import work_of_pair
from ..triton.kernels import Kernels, work_of
from .arguments import arguments_of
from .blocks import block_width, widest
from .generate import generate
from .generate_tangent import generate_tangent
from .pair_tiles import fitting
from .sums import dq_from_sums, prepare_backward
from .tiles import CANDIDATES, candidates, for_busy_producers

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from triton.backends.compiler import GPUTarget

    from attndsl.passes.tiles.plan import LoopPlan
    from attndsl.pipeline import Lowered

    from ..emit.facts import KernelFacts
    from ..emit.template import Products
    from ..kernels.compile import Argument
    from ..kernels.config import Config

_MOST_WORK_OF_THREE = 30
"""Instructions a pair beyond which three consumers, of 160 registers, spill more than two."""

_MOST_WORK_OF_LARGE = 40
"""Instructions a pair beyond which a backward of D64 spills more with tiles of 128 x 128 than with
tiles of 64 x 128."""


class HopperKernels(Kernels):
    """The forward, by itself and with tangents, and the single-pass backward.

    All else is as the portable family has it.
    """

    directions: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "forward": ("forward",),
        "tangent": ("forward_tangent",),
        "backward": ("backward_kv",),
    }
    fixed: ClassVar[Mapping[str, Any]] = {
        "prepare_backward": prepare_backward,
        "dq_from_sums": dq_from_sums,
    }

    def _fixed_constants(self, facts: KernelFacts) -> dict[str, int | bool]:
        return super()._fixed_constants(facts) | {"WIDTH": block_width(facts.head_dim)}

    def configs(
        self, lowered: Lowered, direction: str, facts: KernelFacts, device: torch.device
    ) -> tuple[Config, ...]:
        """See :meth:`Kernels.configs`; after these, those that are persistent or not instead."""
        found = super().configs(lowered, direction, facts, device)
        others = tuple(replace(config, persistent=not config.persistent) for config in found)
        if direction != "backward_kv" or widest(facts) <= 128:
            return (*found, *others)
        return found

    def _configs(
        self, lowered: Lowered, direction: str, facts: KernelFacts,
        target: GPUTarget | None, device: torch.device,
    ) -> tuple[Config, ...]:  # fmt: skip
        if direction not in CANDIDATES:
            return super()._configs(lowered, direction, facts, target, device)
        return configs_of(lowered, facts, direction)

    def _text(
        self, lowered: Lowered, facts: KernelFacts, direction: str, loop: LoopPlan,
        config: Config, products: Products,
    ) -> str:  # fmt: skip
        if direction not in CANDIDATES:
            return super()._text(lowered, facts, direction, loop, config, products)
        if direction == "forward_tangent":
            return generate_tangent(lowered, facts, loop, config)
        return generate(lowered, facts, direction, loop, config)

    def _arguments(
        self, function: Any, facts: KernelFacts, more: Mapping[str, int | bool],
        config: Config,
    ) -> list[Argument]:  # fmt: skip
        if not config.consumers:
            return super()._arguments(function, facts, more, config)
        direction = "backward_kv"
        if "o_desc" in function.arg_names:
            moves = "o_moved_desc" in function.arg_names
            direction = "forward_tangent" if moves else "forward"
        return arguments_of(direction, function, facts, config)

    def _key(
        self, lowered: Lowered, kind: str, facts: KernelFacts, precision: str,
        target: GPUTarget | None,
    ) -> str:  # fmt: skip
        family = f"hopper {kind}" if kind in CANDIDATES else kind
        return super()._key(lowered, family, facts, precision, target)


def configs_of(lowered: Lowered, facts: KernelFacts, direction: str) -> tuple[Config, ...]:
    """Tile sizes to try for a Hopper kernel, in order of preference."""
    if direction == "forward_tangent":
        return CANDIDATES[direction][widest(facts)]
    work = work_of(lowered, facts, direction)
    # Relative to a maximum that is not followed, weights take fewer registers, columns or not.
    column = lowered.placed.column is not None and facts.dtype != "bf16"
    dropped, own = lowered.program.dropout is not None, lowered.program.weights is not None
    plain = lowered.program.mask is None or (lowered.sparsity.plain and not own)
    if direction == "backward_kv" and work_of_pair(lowered, facts, True) > _MOST_WORK_OF_LARGE:
        plain = False
    found = candidates(direction, widest(facts), plain, work, column, dropped, own)
    if direction == "forward" and work_of_pair(lowered, facts, False) > _MOST_WORK_OF_THREE:
        found = tuple(config for config in found if config.consumers < 3)
    if facts.adds_diagonals:
        found = for_busy_producers(found)
    return fitting(direction, facts, found) if facts.pair_tiles else found
