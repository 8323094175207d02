"""Gradients of captured tensors and params, and the kernels that make them.

Those that are sums along rows or columns come with dQ or dK and dV, nearly free. Others have a
kernel of their own, which makes the gradient of the score again: along diagonals, for what varies
with the distance; tile by tile, where pairs look up an element each; and by exact additions, where
any pairs may meet in any element. Attention kernels may make more of them, or store the score's
gradient and leave but sums of it to be made tile by tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .distances import by_distance
from .pairs import by_pairs
from .scattered import together_of
from .sinks import without_sinks
from .terms import terms_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from attndsl.pipeline import Lowered

    from ..base import Call, Wants
    from .pairs import Rest


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """A partition of the wanted tensors and params; those of a sink alone are in none."""

    lines: Wants
    """Sums along rows and columns; what does not vary at all, and so has a gradient of zero."""
    distances: Wants
    pairs: tuple[Wants, ...]
    """One for each kernel launch."""
    others: Wants
    together: Rest | None
    """What a kernel sums up of ``others`` before any pairs meet; None where each pair is added."""
    stored: tuple[Wants, ...] = ()
    """Sums of dS that the attention kernels store, one for each kernel launch."""


def plan_gradients(lowered: Lowered, call: Call, wants: Wants) -> GradientPlan:
    """Assign the gradients that ``wants`` names to the kernels that make them."""
    scored = without_sinks(lowered, wants)
    nothing = replace(scored, q=False, k=False, v=False, tensors=frozenset(), params=frozenset())
    full = {name for name in scored.tensors if call.tensors[name].numel()}
    along: dict[str, set[str]] = {}
    for term in terms_of(lowered, full | scored.params):
        along.setdefault(term.name, set()).add(term.along)
    # Sums along diagonals leave the attention kernels alone, which lines do not.
    diagonal = by_distance(lowered, call, along.keys())
    apart = {name for name, found in along.items() if "pair" in found} - diagonal
    exact = by_pairs(lowered, call, apart)
    lines = replace(
        scored,
        tensors=scored.tensors - diagonal - apart,
        params=scored.params - diagonal,
    )
    others = frozenset(apart).difference(*exact)
    return GradientPlan(
        lines=lines,
        distances=replace(
            nothing, tensors=scored.tensors & diagonal, params=scored.params & diagonal
        ),
        pairs=tuple(replace(nothing, tensors=names) for names in exact),
        others=replace(nothing, tensors=others),
        together=together_of(lowered, call, others),
    )


def key_of(lowered: Lowered, call: Call, wants: Wants) -> Hashable:
    """Key of a call's gradient plan: all that the plan depends on."""
    offsets = tuple(
        offset if isinstance(offset, int) else None for offset in (call.q_offset, call.kv_offset)
    )
    shapes = tuple(tensor.shape for tensor in call.tensors.values())
    return lowered.digest, wants, call.indexed, offsets, call.q.shape, call.k.shape, shapes
