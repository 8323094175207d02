"""Lookups and products of rows of captured tensors, over all pairs at once."""

from __future__ import annotations

import torch


def clamped_indices(
    indices: tuple[torch.Tensor, ...], tensor: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """``indices``, one a dim, moved into ``tensor``, which has no dim of size 0."""
    return tuple(
        index.clamp(0, size - 1) for index, size in zip(indices, tensor.shape, strict=True)
    )


def flat_places(indices: tuple[torch.Tensor, ...], shape: torch.Size) -> torch.Tensor:
    """Offsets, in contiguous memory of ``shape``, of the elements at ``indices``, one a dim."""
    flat = torch.zeros((), dtype=torch.int64, device=indices[0].device)
    for index, size in zip(indices, shape, strict=True):
        flat = flat * size + index.clamp(0, size - 1)
    return flat


def elements_at(tensor: torch.Tensor, indices: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Elements of ``tensor``, which has some, at ``indices`` of four dims each."""
    if tensor.device.type != "cpu" or not tensor.is_floating_point():
        return tensor[clamped_indices(indices, tensor)]
    # With one dim, CPUs add up what comes back one after the other; with several, their threads
    # add atomically, in no fixed order. GPUs sort.
    flat = flat_places(indices, tensor.shape)
    return tensor.reshape(-1).gather(0, flat.reshape(-1)).view(flat.shape)


def rows_at(tensor: torch.Tensor, indices: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Rows of ``tensor`` along its last dim: five dims, those of ``indices`` (four each) and it."""
    width = tensor.shape[-1]
    if not indices:
        return tensor.reshape(1, 1, 1, 1, width)
    if tensor.numel() == 0:
        shape = torch.broadcast_tensors(*indices)[0].shape  # type: ignore[no-untyped-call]
        return tensor.new_zeros((*shape, width))
    if tensor.device.type != "cpu":
        return tensor[clamped_indices(indices, tensor[..., 0])]
    # As in :func:`elements_at`.
    flat = flat_places(indices, tensor.shape[:-1])
    found = tensor.reshape(-1, width).index_select(0, flat.reshape(-1))
    return found.view(*flat.shape, width)


def add_elements(
    total: torch.Tensor, indices: tuple[torch.Tensor, ...], values: torch.Tensor
) -> None:
    """Add ``values`` (four dims) to the elements at ``indices``, in a fixed order.

    Args:
        total: Contiguous.
        indices: One a dim; where they do not vary along a dim of ``values``, its sums are added.
        values: Of the dims of all pairs, or 1.
    """
    if not indices:
        total += values.sum()
        return
    flat = flat_places(indices, total.shape)
    values = values.sum_to_size(flat.shape).reshape(-1).to(total.dtype)
    flat = flat.reshape(-1)
    # CPUs and GPUs have different functions for that: with one dim scatter_add_ adds one after the
    # other there, and index_put_ sorts here.
    if total.device.type == "cuda":
        total.view(-1).index_put_((flat,), values, accumulate=True)
    else:
        total.view(-1).scatter_add_(0, flat, values)


def add_rows(total: torch.Tensor, indices: tuple[torch.Tensor, ...], rows: torch.Tensor) -> None:
    """Add ``rows``, as :func:`rows_at` gives them, to those of ``total``, in a fixed order."""
    width = total.shape[-1]
    values = rows.reshape(-1, width).to(total.dtype)
    if not indices:
        total += values.sum(0)
        return
    flat = flat_places(indices, total.shape[:-1]).reshape(-1)
    if total.device.type == "cuda":
        total.view(-1, width).index_put_((flat,), values, accumulate=True)
    else:
        total.view(-1, width).index_add_(0, flat, values)


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
