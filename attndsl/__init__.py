"""attndsl: attention variants as text, compiled to fused GPU kernels, forward and backward.

``import attndsl`` is light: torch, and all that compiles, is imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attndsl.api import Attention, compile, load  # noqa: A004
    from attndsl.errors import AttnDSLError
    from attndsl.frontend.declare import tensor

__version__ = "0.1.0"
__all__ = ["Attention", "AttnDSLError", "compile", "load", "tensor"]

_HOMES = {
    "Attention": "attndsl.api",
    "AttnDSLError": "attndsl.errors",
    "compile": "attndsl.api",
    "load": "attndsl.api",
    "tensor": "attndsl.frontend.declare",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'attndsl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
