"""Programs that compute one work tile after the other, and draw which if these differ in length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .feature import Feature

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ...emit.facts import KernelFacts
    from ...emit.template import Flags
    from ...kernels.config import Config
    from .feature import ModuleSpec


def is_drawn(lowered: Lowered, facts: KernelFacts, config: Config) -> bool:
    """Return True if programs draw their items by a counter: those of a mask differ in length.

    Those that take turns must be taken in their order.
    """
    return config.persistent and (lowered.program.mask is not None or facts.takes_turns)


def _is_persistent(spec: ModuleSpec) -> bool:
    return spec.config.persistent


def _is_drawn(spec: ModuleSpec) -> bool:
    return is_drawn(spec.lowered, spec.facts, spec.config)


def _flags(spec: ModuleSpec) -> Flags:
    return {"DRAWN": _is_drawn(spec)}


def _arguments(spec: ModuleSpec) -> list[str]:
    return ["COUNTER"] * _is_drawn(spec)


PERSISTENCE = Feature("PERSISTENT", _is_persistent, _flags, arguments=_arguments)
