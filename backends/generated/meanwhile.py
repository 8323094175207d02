"""Calls whose best kernels are not compiled yet, by kernels that take less time to be.

How much less: see M60 in docs/measured.md. The first call of a signature gets the last family's
kernels. The second one begins to compile the best ones, in threads, and calls go on with the others
until these are there. A script of one call or one step never waits for them.

Two kernels of one call differ in last bits, and when they change places is a matter of time. So
none of this is done unless somebody asks for it, nor for deterministic calls. A CUDA graph would
keep the kernels that it captures: there calls wait.

Non-goals: backwards that make gradients of captures, whose kernels share the work as planned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..kernels.kernel import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from ..base import Call, Wants
    from ..kernels.kernel import Family
    from ..kernels.layout import Layout


Places = TypeVar("Places")
_MOST = 1024
"""Layouts that wait at a time; more than programs have."""


@dataclass(slots=True)
class _Waiting:
    layout: Layout
    """Of the other kernels."""
    places: Any | None = None
    """What is being compiled; None before the second call."""


class Meanwhile:
    """Layouts of other kernels, which run calls until the best kernels are compiled."""

    def __init__(self, taken_over: Callable[[], None]) -> None:
        """``taken_over`` is called whenever kernels have changed places."""
        self._taken_over = taken_over
        self._waiting: dict[Hashable, _Waiting] = {}

    def is_for(self, family: Family, call: Call, task: Task, wanted: Wants | None) -> bool:
        """Return True if another family may run this family's task of a call meanwhile."""
        if not family.compiles_long or call.deterministic:
            return False
        if task is Task.BACKWARD and (
            wanted is None or wanted.tensors or wanted.params or wanted.features
        ):
            return False
        return task in (Task.FORWARD, Task.BACKWARD) and not _is_captured()

    def holds(self, layout: Layout) -> bool:
        """Return True if ``layout`` is one of other kernels, which run meanwhile."""
        return any(x.layout is layout for x in tuple(self._waiting.values()))

    def waits(self, key: Hashable) -> bool:
        """Return True if calls of the layout with this key run other kernels meanwhile."""
        return key in self._waiting

    def layout(
        self,
        key: Hashable,
        other: Callable[[], Layout],
        start: Callable[[], Places],
        is_there: Callable[[Places], bool],
    ) -> Layout | None:
        """The layout for a call by other kernels; None once the best ones are there.

        Args:
            key: What calls of one layout share.
            other: Makes the layout of other kernels.
            start: Begins to compile the best ones.
            is_there: Whether what was begun is compiled, or has failed.
        """
        waiting = self._waiting.get(key)
        if waiting is None:
            if len(self._waiting) >= _MOST:
                self._waiting.clear()
            waiting = self._waiting[key] = _Waiting(other())
        elif waiting.places is None:
            waiting.places = start()
        elif is_there(waiting.places):
            return None
        return waiting.layout

    def end(self, key: Hashable) -> None:
        """Calls of a layout have the best kernels from now on; without these they go on waiting.

        Others that wait are found again by their next calls, which may have other keys by then.
        """
        if key in self._waiting:
            self._waiting.clear()
            self._taken_over()


def _is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
