"""The backend of the portable kernels alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..triton.family import Portable
from .backend import GeneratedBackend

if TYPE_CHECKING:
    from ..entries import Store


def triton_backend(store: Store) -> GeneratedBackend:
    """Runs on every GPU that Triton has, and by its interpreter on CPU tensors."""
    return GeneratedBackend("triton", (Portable(),), store)
