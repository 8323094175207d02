"""Seeds of dropout, from torch's generator."""

from __future__ import annotations

import torch


def draw_seed() -> torch.Tensor:
    """A 0-d int64 seed from torch's default CPU generator, which ``torch.manual_seed`` sets.

    In a graph it is drawn anew whenever the graph runs; its value may be had elsewhere only.
    """
    return torch.randint(0, 1 << 62, ())
