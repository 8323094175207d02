"""Devices: which ones generated kernels run on, and the streams of launches."""

from __future__ import annotations

import contextlib

import torch
import triton

_UNCHANGED = contextlib.nullcontext()


def why_no_gpu(device: torch.device) -> str | None:
    """Why no generated kernel can run on ``device``, or None."""
    if device.type == "cpu":
        if triton.knobs.runtime.interpret:
            return None
        return (
            "Triton compiles for GPUs only "
            "(on CPU tensors, set TRITON_INTERPRET=1 before importing attndsl)"
        )
    if device.type != "cuda":
        return f"Triton has no target for device type {device.type!r}"
    if (device.index or 0) >= (found := torch.cuda.device_count()):
        return f"torch sees {found} GPU(s) here"
    if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] < 8:
        return "the kernels need compute capability 8.0 or higher"
    return None


def stream_of(device: torch.device) -> int:
    """Handle of the current stream."""
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes ``device`` the current one meanwhile, where it is not."""
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        return torch.cuda.device(device)
    return _UNCHANGED
