"""CUDA graphs of kernels that follow one another, by the addresses of their launches.

The driver takes as long for a graph of three kernels as for one kernel (see M69 in
docs/dev/measured.md). A training step has the same addresses as the step before, since torch's
allocator hands out the same memory again. So the second launch with some addresses makes a graph,
and later ones launch that. A graph holds its kernels' arguments, and no tensor.

Non-goals: launches within a graph that torch captures, which gets the kernels themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.foundation.caches import BoundedCache, Reason

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    OneLaunch = tuple[Callable[[int, int, Sequence[object]], None], int, Sequence[object]]
    """Function that launches a kernel, its number of programs, and its arguments."""

_MOST = 256
"""Graphs of some 0.1 MB each. A training step has one for each layer."""
_is_capturing = torch._C._cuda_isCurrentStreamCapturing


class LaunchGraphs:
    """The graphs of one family's launches."""

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: BoundedCache[Callable[[], None]] = BoundedCache(
            "graphs of launches by addresses", _MOST, Reason.KERNELS
        )

    def launch(self, key: Hashable, stream: int, make: Callable[[], Sequence[OneLaunch]]) -> None:
        """Launch kernels on a stream, which is the current one.

        Args:
            key: All that the launches depend on, the stream and addresses among it.
            stream: Handle of the stream.
            make: Function that returns the kernels, in order.
        """
        found = self._found.recent.get(key) or self._found.get(key)
        if found is None:
            self._found.put(key, _seen_once)
        if found is None or _is_capturing():
            launch_each(make(), stream)
            return
        if found is _seen_once:
            found = _captured(make())
            self._found.put(key, found)
        found()

    def __len__(self) -> int:
        return len(self._found)


def launch_each(launches: Sequence[OneLaunch], stream: int) -> None:
    """Launch kernels one after another."""
    for run, programs, arguments in launches:
        run(programs, stream, arguments)


def _seen_once() -> None:
    """Mark launches that have no graph yet."""


def _captured(launches: Sequence[OneLaunch]) -> Callable[[], None]:
    """The function that launches a graph of these kernels on the current stream."""
    new_stream: Any = torch.cuda.Stream
    graph, stream = torch.cuda.CUDAGraph(), new_stream()
    with torch.cuda.stream(stream):
        # Other threads may allocate meanwhile. Torch's context manager would collect garbage, and
        # give memory back.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            launch_each(launches, stream.cuda_stream)
        finally:
            graph.capture_end()
    return graph.replay
