"""A side CUDA stream for a rank's calls that wait for keys of other ranks.

The last work tiles of a call leave most processors idle, and a call of few rows is little else. So
calls that wait for others' keys run on a second stream: their kernels begin where the first
stream's leave processors.

Non-goals: which calls these are. Nothing here is for graphs of ``torch.compile``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from attndsl.foundation.caches import memoised

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class Beside:
    """A side stream that waits for all work queued so far.

    Work that follows on the first stream waits for both. On a CPU calls follow one another.
    """

    def __init__(self, device: torch.device, several: bool) -> None:
        """Prepare for work on ``device``; ``several`` is True if both streams get some."""
        self._streams = streams_of(device) if several else None

    def __enter__(self) -> Beside:
        """Begin: tensors of before are there for both."""
        if self._streams is not None:
            first, second = self._streams
            second.wait_stream(first)
        return self

    def work(self, on_second: bool) -> AbstractContextManager[Any]:
        """Context in which work is queued on the second stream, or on the first one."""
        if self._streams is None or not on_second:
            return nullcontext()
        return torch.cuda.stream(self._streams[1])

    def __exit__(self, *_: object) -> None:
        """End, also where something has failed: memory of the first stream may be used again."""
        if self._streams is not None:
            first, second = self._streams
            first.wait_stream(second)


def streams_of(device: torch.device) -> tuple[Any, Any] | None:
    """The current stream of a GPU and another one; None of a CPU.

    Each stream has another one of its own. The allocator gives memory of the second stream to
    nobody else, and to the second stream as soon as nobody holds it. It is used there in a later
    block alone, which begins when the first stream has read it.
    """
    if device.type != "cuda":
        return None
    first = torch.cuda.current_stream(device)
    return first, _second(device, first.cuda_stream)


@memoised("second streams", None)
def _second(device: torch.device, first: int) -> torch.cuda.Stream:
    """One for each stream ``first``, by its handle."""
    found: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return found
