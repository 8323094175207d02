"""Names of programs in torch's profiles.

A profile shows ``attndsl::NAME`` around a call and ``attndsl::NAME backward`` around its backward.
They are user annotations (``torch.profiler.record_function``), so a trace also shows them over the
kernels on a GPU. Kernels themselves have one name for all programs: equal kernels of two programs
are compiled once, in Triton's own cache too, which does not know names.

Who runs something asks ``profiler._is_profiler_enabled`` first: see M34 in docs/dev/measured.md.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch.autograd import profiler

from attndsl.backends.base import name_of_call
from attndsl.foundation.caches import memoised
from attndsl.source import NAME_LENGTH, shorten

if TYPE_CHECKING:
    from attndsl.backends.base import Backend, Call
    from attndsl.pipeline import Lowered

BACKWARD = " backward"
"""The direction of events that are no forward's."""


def event_of_call(
    backend: Backend, lowered: Lowered, call: Call, direction: str = ""
) -> AbstractContextManager[object]:
    """An event of a call; none where ``backend`` has events itself."""
    if backend.has_events:
        return nullcontext()
    return event_named(name_of_call(lowered, call), direction)


def event_of_operator(spec: str, direction: str = "") -> AbstractContextManager[object]:
    """An event of an operator's run, where a profiler is on."""
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return event_named(name_of(spec), direction)


def event_named(name: str, direction: str) -> AbstractContextManager[object]:
    """An event of the program ``name``."""
    return profiler.record_function(f"attndsl::{name}{direction}")


@memoised("names in profiles", 1024)
def _names(spec: str) -> list[str]:
    return []


def tell_name(spec: str, name: str) -> None:
    """Have the operators, which know a program's spec alone, call it ``name``."""
    known = _names(spec)
    if len(known) < 2 and name not in known:  # Two are as bad as many.
        known.append(name)


def name_of(spec: str) -> str:
    """The one name that the program of ``spec`` has been given; the text where there are more."""
    known = _names(spec)
    return known[0] if len(known) == 1 else shorten(json.loads(spec)["text"], NAME_LENGTH)
