"""Where kernels are launched: streams and devices."""

from __future__ import annotations

import contextlib

import torch

_UNCHANGED = contextlib.nullcontext()


def stream_of(device: torch.device) -> int:
    """Handle of the current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes ``device`` the current one meanwhile, where it is not."""
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        return torch.cuda.device(device)
    return _UNCHANGED
