"""Devices: which ones generated kernels run on, and the streams of launches."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
import triton

if TYPE_CHECKING:
    from collections.abc import Callable

_UNCHANGED = contextlib.nullcontext()


def why_no_gpu(device: torch.device) -> str | None:
    """Reason why no generated kernel can run on ``device``, or None."""
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
    """Handle of the current stream of a tensor's ``device``; 0 on the CPU."""
    # A CPU has no number. Asking for a device's type takes three times as long.
    return 0 if device.index is None else int(torch._C._cuda_getCurrentRawStream(device.index))


def stream_if_current(index: int | None) -> int | None:
    """Handle of the current stream of a GPU, if that is the current GPU; 0 for None, the CPU."""
    if index is None:
        return 0
    if torch._C._cuda_getDevice() != index:
        return None
    return int(torch._C._cuda_getCurrentRawStream(index))


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Makes a tensor's ``device`` the current one meanwhile, where it is not."""
    return _UNCHANGED if is_current(device) else torch.cuda.device(device)


def is_current(device: torch.device) -> bool:
    """Return True if ``device`` is the current one, where launches go; true of the CPU."""
    return device.index is None or bool(torch._C._cuda_getDevice() == device.index)


def outside_of_graphs(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    """A tensor that outlives the call, in memory that no CUDA graph has.

    Before torch captures a graph of its own (``mode="reduce-overhead"``) it runs the function with
    the graph's memory, and refuses what is left there. That memory is a thread's. So another thread
    makes the tensor, and waits for it.

    Args:
        make: Makes the tensor on ``device``.
        device: Where to.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return make()
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_made, make, device).result()


def _made(make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
    with torch.cuda.device(device):
        found = make()
        torch.cuda.current_stream().synchronize()
    return found
