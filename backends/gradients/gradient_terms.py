"""Terms that gradients of captured tensors and params are sums of, and kernels that add them up.

A gradient is a sum over pairs: of the gradient of the final score, of the weight, or of the chance
to be dropped, times that one's derivative by the lookup or param. Where a lookup's index varies
with the row alone, or with nothing of the pair, its sums along rows say all; likewise columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attndsl.ir import DType, Op, Program, const, dependencies, param
from attndsl.passes.differentiate import differentiate
from attndsl.passes.distance import varies_with_distance_alone

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from attndsl.ir import Node
    from attndsl.passes.differentiate import Derivative
    from attndsl.pipeline import Lowered

SOURCES = ("score", "weight", "dropout")
"""The parts of a program that are differentiated: final score, weight, drop probability."""


@dataclass(frozen=True, slots=True)
class Term:
    """One lookup (LOAD) or param (PARAM) that has a gradient."""

    leaf: Node
    factors: Mapping[str, Node]
    """The derivative of each of ``SOURCES`` that it occurs in, by the leaf."""

    @property
    def name(self) -> str:
        """Name of the tensor or param."""
        return str(self.leaf.value)

    @property
    def along(self) -> str:
        """``row``, ``column`` or ``pair``: sums over which elements the gradient is made of."""
        found = dependencies(self.leaf)
        varies = frozenset[str]().union(*(found[index] for index in self.leaf.args))
        if not varies & {"kv", "score"}:
            return "row"
        return "pair" if varies & {"q", "score"} else "column"


def derivatives(lowered: Lowered) -> dict[str, Derivative]:
    """Derivative of each of ``SOURCES`` that the program has."""
    program = lowered.program
    found = {"score": lowered.derivative}
    for source, root in (("weight", program.weights), ("dropout", program.dropout)):
        if root is not None:
            found[source] = differentiate(Program(score=root))
    return found


def terms_of(lowered: Lowered, names: Collection[str]) -> tuple[Term, ...]:
    """All of ``names`` in score, weights and dropout, always in the same order; none of a sink."""
    factors: dict[Node, dict[str, Node]] = {}
    for source, derivative in derivatives(lowered).items():
        found = [(item.load, item.factor) for item in derivative.tensors]
        found += [(param(item.name, DType.FLOAT), item.factor) for item in derivative.params]
        for leaf, factor in found:
            if str(leaf.value) in names:
                factors.setdefault(leaf, {})[source] = factor
    return tuple(Term(leaf, by_source) for leaf, by_source in factors.items())


def is_plain(term: Term) -> bool:
    """Return True if all indices name positions, batch entries and heads, each at most once."""
    found = [index.value for index in term.leaf.args if index.op is Op.VAR]
    heads = [name for name in found if name in ("h", "hkv")]
    return len(set(found)) == len(found) == len(term.leaf.args) and len(heads) <= 1


ONE = const(1.0)
"""Factor of a term that is added to the score as it is."""


def names_by_distance(lowered: Lowered, names: Collection[str]) -> frozenset[str]:
    """The subset of ``names`` whose gradients are sums of the score's by distance."""
    roots: dict[str, list[Node]] = {}
    others = set()
    for term in terms_of(lowered, names):
        roots.setdefault(term.name, []).extend((*term.factors.values(), *term.leaf.args))
        if term.factors.keys() != {"score"}:
            others.add(term.name)
    return frozenset(
        name
        for name, found in roots.items()
        if name not in others and varies_with_distance_alone(*found)
    )
