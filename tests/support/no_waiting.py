"""A block in which the host must not wait for the GPU."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise where torch would make the host wait; afterwards it may again, whatever happened.

    torch sets the mode before it warns that the mode is a prototype. Where the warning is an error,
    it must not leave the mode behind for all tests that follow.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
