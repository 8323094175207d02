"""Gradients by distance in the backward: the producer adds up dS along diagonals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .feature import Feature

if TYPE_CHECKING:
    from ...emit.facts import KernelFacts
    from .feature import ModuleSpec

_LINES = 2048
"""Bytes in which sums along a tile's diagonals get from warp to warp."""


def diagonal_bytes(facts: KernelFacts) -> int:
    """Shared memory of the sums."""
    return _LINES * facts.adds_diagonals


def _is_summed(spec: ModuleSpec) -> bool:
    return spec.facts.adds_diagonals


def _imports(spec: ModuleSpec) -> list[str]:
    return ["from attndsl.backends.hopper.diagonals import add_diagonals"]


def _given(spec: ModuleSpec) -> list[str]:
    return ["DISTANCE_SUMS"]


DIAGONALS = Feature(
    "ADDS_DIAGONALS", _is_summed, template="diagonals", imports=_imports, given=_given
)
