"""The plan of gradients of captured tensors and params: decided once, read everywhere else.

Those that are sums along rows or columns come with dQ or dK and dV, nearly free. Others have a
kernel of their own, which makes the gradient of the score again: along diagonals, for what varies
with the distance; tile by tile, where pairs look up an element each; and by exact additions, where
any pairs may meet in any element. ``triton/captures`` has a module for each such kind.

Attention kernels may have features that make more of them, or store the score's gradient and leave
but sums of it to be made tile by tile (``hopper/features``). Jobs, facts, layouts and results read
``GradientPlan.lines`` and the shares, and ask nothing of this again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..base import Wants
from .gradient_terms import terms_of
from .sink_gradients import without_sinks

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from attndsl.pipeline import Lowered

    from ..base import Call


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GradientKind:
    """One way to make gradients by kernels of their own."""

    name: str
    takes: Callable[[Lowered, Call, frozenset[str]], Iterable[tuple[frozenset[str], Rest | None]]]
    """Groups of the names that it makes gradients of, one a launch, and what is summed up first."""


@dataclass(frozen=True, slots=True)
class Rest:
    """Numbers of batch entries and heads that a tensor does not tell apart."""

    batches: int
    heads: int
    """Neighbouring query heads."""

    @property
    def members(self) -> int:
        """Heads of all batch entries that have the same elements."""
        return self.batches * self.heads


@dataclass(frozen=True, slots=True)
class GradientShare:
    """Tensors and params whose gradients one launch makes."""

    kind: str
    """Name of the :class:`GradientKind`."""
    names: frozenset[str]
    rest: Rest | None = None
    """Numbers that are summed up before any pairs meet; None where each pair is added."""


@dataclass(frozen=True, slots=True)
class GradientPlan:
    """A partition of the wanted tensors and params; those of a sink alone are in none."""

    lines: Wants
    """Gradients that the attention kernels make: of q, k and v; sums along rows and columns; zeros,
    of what does not vary at all; and those of features."""
    shares: tuple[GradientShare, ...] = ()

    def with_feature(
        self, flag: str, names: frozenset[str], kind: str | None = None
    ) -> GradientPlan:
        """The plan whose attention kernels have a feature for the gradients of ``names``.

        Kernels of ``kind`` make them of what it stores; with None it makes them itself.
        """
        shares = [replace(share, names=share.names - names) for share in self.shares]
        if kind is not None:
            own = (replace(share, kind=kind, names=share.names & names) for share in self.shares)
            shares.extend(own)
        lines = replace(self.lines, features=(*self.lines.features, (flag, names)))
        return GradientPlan(lines, tuple(share for share in shares if share.names))

    def of_kind(self, kind: str) -> tuple[GradientShare, ...]:
        """The shares of one kind."""
        return tuple(share for share in self.shares if share.kind == kind)


def plan_gradients(
    kinds: Sequence[GradientKind], lowered: Lowered, call: Call, wants: Wants
) -> GradientPlan:
    """Assign the gradients that ``wants`` names to the first of ``kinds`` that takes each."""
    scored = without_sinks(lowered, wants)
    full = {name for name in scored.tensors if call.tensors[name].numel()}
    left = frozenset(term.name for term in terms_of(lowered, full | scored.params))
    shares = []
    for kind in kinds:
        for names, rest in kind.takes(lowered, call, left):
            if names:
                shares.append(GradientShare(kind.name, names, rest))
                left -= names
    names = frozenset[str]().union(*(share.names for share in shares))
    lines = replace(scored, tensors=scored.tensors - names, params=scored.params - names)
    return GradientPlan(lines, tuple(shares))


def captures_of(call: Call, names: frozenset[str]) -> Wants:
    """The gradients of the tensors and params ``names``, and no others."""
    tensors = names.intersection(call.tensors)
    return Wants(q=False, k=False, v=False, tensors=tensors, params=names - tensors)


def key_of(lowered: Lowered, call: Call, wants: Wants) -> Hashable:
    """Key of a call's gradient plan: all that the plan depends on."""
    offsets = tuple(
        offset if isinstance(offset, int) else None for offset in (call.q_offset, call.kv_offset)
    )
    shapes = tuple(tensor.shape for tensor in call.tensors.values())
    return lowered.digest, wants, call.indexed, offsets, call.q.shape, call.k.shape, shapes
