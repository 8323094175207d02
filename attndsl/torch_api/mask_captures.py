"""Masks of any shape that broadcasts, as captured tensors of the dims that they vary along."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.call.argument_checks import FLOATS
from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError

from .sdpa_call import MaskCapture
from .sdpa_programs import POSITION, CaptureForm

if TYPE_CHECKING:
    from collections.abc import Sequence

_DIMS = tuple(POSITION)
_PER_HEAD = {"heads", "q_len", "kv_len"}


def capture_mask(
    name: str,
    mask: torch.Tensor,
    full: Sequence[int],
    device: torch.device,
    bool_kind: str = "live",
) -> MaskCapture:
    """``mask`` without the dims that it is constant along.

    A dim of size 1, or of stride 0 where no gradient distinguishes its elements, is looked up by
    nothing: a padding mask stays one number a key, whatever it was expanded to, and so does the
    work of finding its tiles. A float mask shared by heads is taken to say who sees whom, and its
    -inf to leave out tiles; one of its own for every pair of every head is taken to be a bias, for
    which looking for -inf would cost more than it spares (the result is the same).

    Args:
        name: Name of the argument and of the captured tensor.
        mask: Bool or float; its shape broadcasts to ``full``.
        full: (..., heads, q_len, kv_len): at least the last two.
        device: That of the query.
        bool_kind: What a true element says: ``live`` or ``dead``.

    Raises:
        ArgumentError, DTypeError, DeviceError, ShapeError: What does not fit, and what would.
    """
    _check(name, mask, full, device)
    if len(full) > len(_DIMS) <= mask.dim():
        mask = _one_batch(mask, full)
    names = _DIMS[len(_DIMS) - mask.dim() :]
    varies = [
        size != 1 and (step != 0 or size == 0 or mask.requires_grad)
        for size, step in zip(mask.shape, mask.stride(), strict=True)
    ]
    if not all(varies):
        mask = mask[tuple([slice(None) if vary else 0 for vary in varies])]
    dims = [name for name, vary in zip(names, varies, strict=True) if vary]
    if not dims:
        dims, mask = ["kv_len"], mask.expand(full[-1])
    if mask.dtype is torch.bool:
        kind = bool_kind
    else:
        kind = "bias" if set(dims) >= _PER_HEAD else "sparse bias"
    return MaskCapture(CaptureForm(name, kind, tuple(dims)), mask)


def _one_batch(mask: torch.Tensor, full: Sequence[int]) -> torch.Tensor:
    """``mask`` with all dims before the heads as one, expanded where it varies along any."""
    last = len(full) - len(_DIMS)
    mask = mask[(None,) * (len(full) - mask.dim())]
    if any(size != 1 for size in mask.shape[: last + 1]):
        mask = mask.expand(*full[: last + 1], *mask.shape[last + 1 :])
    return mask.flatten(0, last)


def _check(name: str, mask: object, full: Sequence[int], device: torch.device) -> None:
    if not isinstance(mask, torch.Tensor):
        raise ArgumentError(
            f"{name} is a {type(mask).__name__}", hint="pass a bool or float tensor, or None"
        )
    if mask.layout is not torch.strided:
        raise ArgumentError(
            f"{name} is of layout {mask.layout}", hint=f"make it dense: {name}.to_dense()"
        )
    if mask.dtype is not torch.bool and mask.dtype not in FLOATS:
        raise DTypeError(
            f"{name} is of dtype {mask.dtype}",
            hint=f"pass bools, as {name}.bool(), or floats to add to the scores",
        )
    if mask.device != device:
        raise DeviceError(
            f"{name} is on {mask.device} and query is on {device}",
            hint=f"move it: {name}.to(query.device)",
        )
    shape = tuple(mask.shape)
    fits = len(shape) <= len(full) and all(
        size in (1, wanted) for size, wanted in zip(shape[::-1], tuple(full)[::-1], strict=False)
    )
    if not fits:
        raise ShapeError(
            f"{name} has shape {shape}, and the scores have shape {tuple(full)}",
            hint="give it that shape, or one that broadcasts to it: 1 where it does not vary",
        )
