"""The backend of Hopper's kernels, and the portable ones for what these do not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..hopper.family import Hopper
from ..triton.decode import Decode
from ..triton.family import Portable
from ..triton.short import Short
from .backend import GeneratedBackend

if TYPE_CHECKING:
    from ..entries import Store


def hopper_backend(store: Store) -> GeneratedBackend:
    """Runs on GPUs of compute capability 9.0."""
    return GeneratedBackend("hopper", (Hopper(), Portable()), store)


def fastest_backend(store: Store) -> GeneratedBackend:
    """The same, with the kernels for keys that fit, and those for few rows, before all others."""
    families = (Short(), Decode(beside_others=True), Hopper(), Portable())
    return GeneratedBackend("hopper", families, store)
