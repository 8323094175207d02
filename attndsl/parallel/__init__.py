"""Calls of tensors that several processes have parts of.

``ContextParallel`` is for one sequence on many ranks. Calls of DTensors need nothing of this
package: ``Attention`` takes them. What is public here is imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .calls import Sharded
    from .context import ContextParallel
    from .costs import Machine, Shape

__all__ = ["ContextParallel", "Machine", "Shape", "Sharded"]
_HOMES = {
    "ContextParallel": ".context", "Machine": ".costs", "Shape": ".costs", "Sharded": ".calls",
}  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
