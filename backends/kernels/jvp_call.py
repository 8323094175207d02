"""A call and the direction in which its arguments move, as kernels of tangents take them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..emit.facts import KernelFacts, facts_of
from ..emit.tangent_programs import moved_name, with_tangents
from ..memory_order import rows_contiguous

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    import torch

    from attndsl.pipeline import Lowered

    from ..base import Call, Tangents


@dataclass(frozen=True, slots=True)
class Moving:
    """A call, and the direction in which its arguments move."""

    lowered: Lowered
    call: Call
    """With the tangents of captures as further tensors (see ``with_tangents``)."""
    operands: Mapping[str, torch.Tensor]
    """Tangents of ``q``, ``k`` and ``v``, of those that move, with last stride 1."""
    captures: tuple[str, ...]
    """Names of the tensors and params that move."""

    def signature(self) -> tuple[Hashable, ...]:
        """Key of the kernel beside the call: tangents' strides and alignment, captures' names."""
        operands = tuple(
            (name, x.stride(), x.data_ptr() % 16 == 0) for name, x in self.operands.items()
        )
        return *operands, self.captures

    def facts(self) -> KernelFacts:
        """Facts that the kernel is generated for."""
        program = with_tangents(self.lowered.program, self.captures)
        return replace(
            facts_of(program, self.call, *self.operands.values()),
            moving_operands="".join(self.operands),
            moving_captures=self.captures,
        )


def moving_of(lowered: Lowered, call: Call, moved: Tangents) -> Moving:
    """``call`` along ``moved``."""
    program = lowered.program
    given = {"q": (call.q, moved.q), "k": (call.k, moved.k), "v": (call.v, moved.v)}
    operands = {
        name: rows_contiguous(tangent, like.dtype)
        for name, (like, tangent) in given.items()
        if tangent is not None
    }
    # In the order of declarations; of an empty tensor nothing is looked up.
    names = (*(decl.name for decl in program.tensors), *(decl.name for decl in program.params))
    captures = {
        name: moved.captures[name]
        for name in names
        if name in moved.captures and moved.captures[name].numel()
    }
    tensors = {moved_name(program, name): tangent for name, tangent in captures.items()}
    call = call._replace(tensors={**call.tensors, **tensors})
    return Moving(lowered, call, operands, tuple(captures))
