"""Numbers in GPU memory by which the programs of one launch share out its work."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class Counters:
    """One int32 for each stream: 0 between launches, since the last program to draw resets it.

    Launches on one stream come one after the other, so that they may share it; those of a CUDA
    graph run on whatever stream it is replayed on, beside others, and each gets its own.
    """

    _found: dict[tuple[torch.device, int], torch.Tensor] = field(default_factory=dict)

    def of(self, device: torch.device, stream: int) -> torch.Tensor:
        """The counter (1) of launches on ``stream``, the current one of ``device``."""
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(1, dtype=torch.int32, device=device)
        found = self._found.get((device, stream))
        if found is None:
            found = torch.zeros(1, dtype=torch.int32, device=device)
            self._found[device, stream] = found
        return found
