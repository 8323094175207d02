"""Numbers that a graph of ``torch.compile`` leaves open, as tensors.

An operator's ``float`` is a constant of the graph, so that another number compiles another graph;
what is made of tensors is not. Apart from the others, since what tells open numbers from constants
is in a part of torch that takes long to import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.fx.experimental import symbolic_shapes

if TYPE_CHECKING:
    from collections.abc import Sequence


def _always(number: float) -> bool:
    return True


_is_constant: Any = getattr(symbolic_shapes, "has_static_value", _always)
"""Before torch 2.8 there is no telling, and numbers are constants."""


def varying_numbers(numbers: Sequence[float]) -> torch.Tensor | None:
    """``numbers`` (n,) in fp64 on the CPU, or None where the graph has them all as constants.

    Constants stay numbers: a tensor of the CPU keeps torch from using CUDA graphs.
    """
    if all(map(_is_constant, numbers)):
        return None
    # torch.compile turns sums with open numbers into sums of tensors; not so torch.tensor.
    zero = torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.stack([zero + number for number in numbers])
