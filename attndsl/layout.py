"""Strides of tensors that kernels write for themselves: workspaces and materialised biases."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

ALIGNMENT = 128
"""Rows are aligned to so many bytes: a cache line of NVIDIA GPUs, and enough for fast copies."""
THRESHOLD = 1024
"""Stride in elements up to which padding would take too much memory for too little."""


def pad_strides(
    strides: Sequence[int], sizes: Sequence[int], dtype: torch.dtype
) -> tuple[int, ...]:
    """Strides of a dense tensor, of the same order of dims, whose long rows are aligned.

    A stride above :data:`THRESHOLD` elements goes up to the next multiple of :data:`ALIGNMENT`
    bytes; those of slower dims follow. Channels-last strides stay as they are, and so do all where
    none is padded. The rule is that of PyTorch's inductor (``torch/_inductor/ir.py``). Only
    internal tensors are padded; users never see them.

    Args:
        strides: In elements, of a dense tensor; the least one becomes 1.
        sizes: Of the same dims.
        dtype: Of the elements.

    Raises:
        ArgumentError: ``strides`` and ``sizes`` are not of one length.

    Example:
        >>> import torch
        >>> pad_strides([32752, 2047, 1], [2, 16, 2047], torch.float32)
        (32768, 2048, 1)
    """
    if len(strides) != len(sizes):
        raise ArgumentError(
            f"strides are {tuple(strides)} and sizes are {tuple(sizes)}",
            hint="pass one stride a dim",
        )
    unit = max(1, ALIGNMENT // dtype.itemsize)
    # Of equal strides, the later dim is the faster one.
    order = sorted(range(len(sizes)), key=lambda dim: (strides[dim], -dim))
    if not order or _is_channels_last(strides, sizes):
        return tuple(strides)
    found, padded, dense = list(strides), False, 1
    for dim in order:
        if dense > THRESHOLD and dense % unit:
            dense, padded = -(-dense // unit) * unit, True
        found[dim] = dense
        dense *= sizes[dim]
    return tuple(found) if padded else tuple(strides)


def _is_channels_last(strides: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return True if a 4-D or 5-D tensor is dense with dim 1, of size other than 1, innermost."""
    if len(sizes) not in (4, 5) or sizes[1] == 1:
        return False
    dense = 1
    for dim in (1, *range(len(sizes) - 1, 1, -1), 0):
        if sizes[dim] != 1 and strides[dim] != dense:
            return False
        dense *= sizes[dim]
    return True
