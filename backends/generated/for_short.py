"""The backend of the kernels for keys that fit, and the portable ones for all other calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..triton.family import Portable
from ..triton.short import Short
from .backend import GeneratedBackend

if TYPE_CHECKING:
    from ..entries import Store


def short_backend(store: Store) -> GeneratedBackend:
    """Runs on every GPU that Triton has, and by its interpreter on CPU tensors."""
    return GeneratedBackend("short", (Short(), Portable()), store)
