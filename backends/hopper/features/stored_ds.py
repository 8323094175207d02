"""dS that the backward stores, tile by tile, for the kernel that adds up gradients of biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .feature import Feature

if TYPE_CHECKING:
    from .feature import ModuleSpec


def _is_stored(spec: ModuleSpec) -> bool:
    return spec.facts.stores_ds


def _arguments(spec: ModuleSpec) -> list[str]:
    return ["slopes_desc", "STORED_TILES"]


STORED_DS = Feature("STORES_DS", _is_stored, template="stored_ds", arguments=_arguments)
