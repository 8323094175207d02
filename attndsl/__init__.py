"""attndsl: attention variants as text, compiled to fused GPU kernels, forward and backward.

``import attndsl`` is light: torch, and all that compiles, is imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attndsl.api import Attention, compile, load, verify  # noqa: A004
    from attndsl.errors import AttnDSLError
    from attndsl.flex.tracing import trace
    from attndsl.frontend.declare import tensor
    from attndsl.tilemap import TileMap

__version__ = "0.1.0"
__all__ = ["Attention", "AttnDSLError", "TileMap", "compile", "load", "tensor", "trace", "verify"]

_HOMES = {
    "Attention": "attndsl.api",
    "AttnDSLError": "attndsl.errors",
    "compile": "attndsl.api",
    "load": "attndsl.api",
    "TileMap": "attndsl.tilemap",
    "tensor": "attndsl.frontend.declare",
    "trace": "attndsl.flex.tracing",
    "verify": "attndsl.api",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'attndsl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
