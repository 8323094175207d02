"""Tangents of q, k and v in the kernel that makes a forward's results and their tangents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .feature import Feature

if TYPE_CHECKING:
    from ...emit.template import Flags
    from .feature import ModuleSpec


def _moves_weights(spec: ModuleSpec) -> bool:
    return spec.has_tangents and bool(set(spec.facts.moving_operands) & {"q", "k"})


def _flags(spec: ModuleSpec) -> Flags:
    moving = spec.facts.moving_operands if spec.has_tangents else ""
    return {f"HAS_TANGENT_{name.upper()}": name in moving for name in ("q", "k", "v")}


TANGENTS = Feature("HAS_TANGENT_WEIGHTS", _moves_weights, _flags)
