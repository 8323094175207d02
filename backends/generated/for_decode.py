"""The backend of the kernels for few rows, and the portable ones for all other calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..triton.decode import Decode
from ..triton.family import Portable
from ..triton.serve import Serve
from .backend import GeneratedBackend

if TYPE_CHECKING:
    from ..entries import Store


def decode_backend(store: Store) -> GeneratedBackend:
    """Runs on every GPU that Triton has, and by its interpreter on CPU tensors."""
    return GeneratedBackend("decode", (Decode(), Portable()), store, Serve())
