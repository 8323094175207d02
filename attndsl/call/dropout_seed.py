"""Seeds of dropout, from torch's generators."""

from __future__ import annotations

import torch

from attndsl.errors import ArgumentError


def draw_seed(device: torch.device) -> torch.Tensor:
    """A 0-d int64 seed for a call on ``device``, from a generator that ``torch.manual_seed`` sets.

    It lies on the CPU, where its value may be had without waiting; but while a CUDA graph is
    captured on the device, whose generator advances at each replay. In a graph of ``torch.compile``
    it is drawn anew whenever the graph runs.

    Raises:
        ArgumentError: Within ``torch.vmap``, unless that allows random operations.
    """
    captured = (
        device.type == "cuda"
        and not torch.compiler.is_compiling()
        and torch.cuda.is_current_stream_capturing()
    )
    try:
        return torch.randint(0, 1 << 62, (), device=device if captured else "cpu")
    except RuntimeError as refusal:
        if not torch._C._are_functorch_transforms_active():
            raise
        raise ArgumentError(
            "the call draws a seed for its dropout, which torch.vmap refuses",
            hint="pass seed=..., or give torch.vmap randomness='same'",
        ) from refusal


def seed_argument(drawn: torch.Tensor) -> int | torch.Tensor:
    """``drawn`` as backends take it: a number where that needs no waiting."""
    if drawn.device.type != "cpu" or torch._C._functorch.is_batchedtensor(drawn):
        return drawn
    return int(drawn.item())


def seed_of_call(given: int | torch.Tensor | None, device: torch.device) -> int | torch.Tensor:
    """The seed of a call on ``device``: as it was ``given``, or drawn. A tensor is a copy.

    The backward reads it again, so that nobody may change it meanwhile.
    """
    if given is None:
        return seed_argument(draw_seed(device))
    return given.clone() if isinstance(given, torch.Tensor) else given
