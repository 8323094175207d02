"""Memory in which the programs of a launch count: the last one leaves it at 0."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from threading import Lock

import torch

from attndsl.foundation.caches import CACHES

from .device import outside_of_graphs

_LEAST = 1024
"""Numbers that are cleared together, so that calls of more programs seldom need new ones."""
_OF_GRAPHS = 1 << 20
"""Numbers for CUDA graphs: about a hundred graphs of 32 layers with 256 numbers each."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Counts:
    """Numbers (int32) for launches, by device and stream: 0 between launches.

    Launches on one stream come one after the other, so that they may share theirs. Those of a CUDA
    graph run on whatever stream it is replayed on, beside others, and each gets its own: some that
    were cleared before any graph, since clearing them within it would be a kernel of each launch.
    Where these are used up, or nothing has run before a graph, a graph clears its own. None may go
    while a launch or a graph may count in it: this is no cache.
    """

    of_graphs: int = _OF_GRAPHS
    """Numbers for CUDA graphs, of each device."""
    _found: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)
    _of_graphs: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    """By device: those that no launch has yet."""
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        CACHES.at_fork(self)

    def after_fork(self) -> None:
        """Make the lock anew in a forked process: another thread may have held it."""
        self._lock = Lock()

    def of(self, device: torch.device, stream: int, number: int = 1) -> torch.Tensor:
        """At least ``number`` zeros for a launch on ``stream``, the current one of ``device``."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return self._of_a_graph(device, number)
        found = self._found.get((device, stream))
        if found is None or found.numel() < number:
            if device.type == "cuda":
                self._prepare_for_graphs(device)
            if found is not None and device.type == "cuda":
                # Another thread's stream made it, and this one may use it yet.
                found.record_stream(torch.cuda.current_stream(device))
            found = _zeros(max(number, _LEAST), device)
            self._found[device, stream] = found
        return found

    def _of_a_graph(self, device: torch.device, number: int) -> torch.Tensor:
        with self._lock:
            left = self._of_graphs.get(device)
            if left is not None and left.numel() >= number:
                self._of_graphs[device] = left[number:]
                return left[:number]
        return torch.zeros(number, dtype=torch.int32, device=device)

    def _prepare_for_graphs(self, device: torch.device) -> None:
        """Once for each device, at its first launch: a graph may run on another stream, at once."""
        with self._lock:
            if device not in self._of_graphs:
                self._of_graphs[device] = _zeros(self.of_graphs, device)


def _zeros(number: int, device: torch.device) -> torch.Tensor:
    make = partial(torch.zeros, number, dtype=torch.int32, device=device)
    return outside_of_graphs(make, device)
