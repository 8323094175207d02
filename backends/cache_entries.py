"""Entries of the kernel cache, and what keeps them. Never imports torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class About:
    """A description of an entry, in words; empty where it does not say."""

    text: str = ""
    """The program, in one line."""
    program: str = ""
    """Digest of what it means: that of :attr:`attndsl.Attention.lowered`."""
    kernel: str = ""
    """The family and the name of the kernel; empty for checked programs."""
    target: str = ""
    """The architecture, such as ``cuda:90``."""
    dtype: str = ""
    """The dtype of q, k and v."""
    head_dim: int = 0
    value_dim: int = 0

    def to_json(self) -> dict[str, str | int]:
        """The JSON values of the description."""
        return {name: value for name, value in asdict(self).items() if value}


@dataclass(frozen=True, slots=True)
class Entry:
    """A cache entry: a real Python file and what is known of it."""

    path: Path
    """A file that holds ``source`` (Triton reads kernels from files)."""
    source: str
    meta: Mapping[str, object]
    """JSON values only."""


class Store(Protocol):
    """A place that keeps generated kernels; the runtime implements it and passes it to backends."""

    def load(self, key: str) -> Entry | None:
        """The entry of ``key`` (a hex digest), or None."""

    def save(self, key: str, source: str, meta: Mapping[str, object]) -> Entry:
        """Publish an entry atomically; this process's own where the directory cannot be written."""
