"""Calls of tensors that are sharded over several processes.

``ContextParallel`` is for one sequence on many ranks. Calls of DTensors need nothing of this
package: ``Attention`` takes them. What is public here is imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .context_parallel import ContextParallel
    from .cp_call import Sharded
    from .plan_costs import Machine, Shape

__all__ = ["ContextParallel", "Machine", "Shape", "Sharded"]
_HOMES = {
    "ContextParallel": ".context_parallel", "Machine": ".plan_costs", "Shape": ".plan_costs",
    "Sharded": ".cp_call",
}  # fmt: skip

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
