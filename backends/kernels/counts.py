"""Memory in which the programs of a launch count: the last one leaves it at 0."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

_LEAST = 1024
"""Numbers that are cleared together, so that calls of more programs seldom need new ones."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers (int32) for launches, by device and stream: 0 between launches.

    Launches on one stream come one after the other, so that they may share theirs. Those of a CUDA
    graph run on whatever stream it is replayed on, beside others, and each gets its own.
    """

    _found: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)

    def of(self, device: torch.device, stream: int, number: int = 1) -> torch.Tensor:
        """At least ``number`` zeros for a launch on ``stream``, the current one of ``device``."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(number, dtype=torch.int32, device=device)
        found = self._found.get((device, stream))
        if found is None or found.numel() < number:
            found = torch.zeros(max(number, _LEAST), dtype=torch.int32, device=device)
            self._found[device, stream] = found
        return found
