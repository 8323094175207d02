"""Calls of DTensors of a program of :mod:`.sdpa_programs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attndsl.errors import UnsupportedError

from .sdpa_programs import program

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from .sdpa_programs import Key


def attend_shards(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    reach: str,
    key: Key,
    tensors: Mapping[str, torch.Tensor],
    dropout_p: float,
    scale: float | None,
) -> torch.Tensor:
    """Attention of q, k and v that are DTensors; see :mod:`attndsl.parallel.dtensor`.

    Args:
        operands: q, k and v, checked.
        reach: Which keys a query may see; a key of :data:`.sdpa_programs.REACH`.
        key: The forms of ``tensors``.
        tensors: Masks and biases, by name.
        dropout_p: Probability with which a weight is dropped.
        scale: Factor of q . k; 1 / sqrt(D) by default.

    Returns:
        (B, Hq, Lq, Dv), a DTensor of q's mesh and placements.

    Raises:
        UnsupportedError: Dropout, whose seed would be another one on each process.
    """
    if dropout_p > 0:
        raise UnsupportedError(
            "dropout of DTensors needs a seed that all processes have",
            hint="call a program with weights = dropout(softmax(score), p), and give it seed=...",
        )
    arguments: dict[str, Any] = dict(tensors)
    out: torch.Tensor = program(reach, key, False)(*operands, scale=scale, **arguments)
    return out
