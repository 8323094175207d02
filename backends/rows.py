"""Lookups and products of rows of captured tensors, over all pairs at once.

Non-goals: views in place of gathered copies (see :mod:`.cpu_tiles` and :mod:`.widened`).
"""

from __future__ import annotations

import torch


def clamped_indices(
    indices: tuple[torch.Tensor, ...], tensor: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """``indices``, one a dim, moved into ``tensor``, which has no dim of size 0."""
    return tuple(
        index.clamp(0, size - 1) for index, size in zip(indices, tensor.shape, strict=True)
    )


def rows_at(tensor: torch.Tensor, indices: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Rows of ``tensor`` along its last dim: five dims, those of ``indices`` (four each) and it."""
    if not indices:
        return tensor.reshape(1, 1, 1, 1, -1)
    if tensor.numel() == 0:
        shape = torch.broadcast_tensors(*indices)[0].shape  # type: ignore[no-untyped-call]
        return tensor.new_zeros((*shape, tensor.shape[-1]))
    return tensor[clamped_indices(indices, tensor[..., 0])]


def product_of_rows(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sums over the last dim, of all pairs, four dims.

    Args:
        left: (batch or 1, heads or 1, q_len or 1, 1, n), as :func:`rows_at` gives it.
        right: (batch or 1, heads or 1, 1, kv_len or 1, n).
    """
    return left.squeeze(3) @ right.squeeze(2).mT


def gradients_of_rows(
    part: torch.Tensor, left: torch.Tensor, right: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of both arguments of :func:`product_of_rows`, of their shapes.

    Args:
        part: The gradient of the product: (batch, heads, q_len, kv_len).
        left: The argument.
        right: The other one.
    """
    width = left.shape[-1]
    # First the sums over what a side has once for all, so that no product is larger than needed.
    of_left = part if left.shape[2] != 1 else part.sum(2, keepdim=True)
    of_right = part if right.shape[3] != 1 else part.sum(3, keepdim=True)
    keys = right.squeeze(2).expand(*right.shape[:2], part.shape[3], width)
    queries = left.squeeze(3).expand(*left.shape[:2], part.shape[2], width)
    return (
        (of_left @ keys).unsqueeze(3).sum_to_size(left.shape),
        (of_right.mT @ queries).unsqueeze(2).sum_to_size(right.shape),
    )
