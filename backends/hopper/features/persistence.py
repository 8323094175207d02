"""Programs that compute one work tile after the other, and draw which if these differ in length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arguments import is_drawn
from .feature import Feature

if TYPE_CHECKING:
    from ...emit.template import Flags
    from .feature import ModuleSpec


def _is_persistent(spec: ModuleSpec) -> bool:
    return spec.config.persistent


def _is_drawn(spec: ModuleSpec) -> bool:
    return is_drawn(spec.lowered, spec.facts, spec.config)


def _flags(spec: ModuleSpec) -> Flags:
    return {"DRAWN": _is_drawn(spec)}


def _arguments(spec: ModuleSpec) -> list[str]:
    return ["COUNTER"] * _is_drawn(spec)


PERSISTENCE = Feature("PERSISTENT", _is_persistent, _flags, arguments=_arguments)
