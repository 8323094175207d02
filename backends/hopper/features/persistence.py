"""Programs that compute one work tile after the other, and draw which if these differ in length."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..arguments import is_drawn
from .feature import Feature

if TYPE_CHECKING:
    from ...emit.template import Flags
    from .feature import Job


def _is_persistent(job: Job) -> bool:
    return job.config.persistent


def _is_drawn(job: Job) -> bool:
    return is_drawn(job.lowered, job.config)


def _flags(job: Job) -> Flags:
    return {"DRAWN": _is_drawn(job)}


def _arguments(job: Job) -> list[str]:
    return ["COUNTER"] * _is_drawn(job)


PERSISTENCE = Feature("PERSISTENT", _is_persistent, _flags, arguments=_arguments)
