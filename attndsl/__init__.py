"""attndsl: attention variants as text, compiled to fused GPU kernels, forward and backward.

``import attndsl`` is light: torch, and all that compiles, is imported when first used. Operators of
saved graphs are known from then on, whether torch is imported before or after.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attndsl.foundation import fingerprint as _fingerprint  # noqa: F401  First: it notes what is imported.
from attndsl.foundation.gc_pause import gc_paused
from attndsl.foundation.torch_import_hook import register_operators

if TYPE_CHECKING:
    from types import ModuleType

    from attndsl import compat, errors, flex, hf, layout, nn, parallel  # noqa: F401
    from attndsl.api import Attention, compile, load, verify  # noqa: A004
    from attndsl.call.backward_call import Gradients
    from attndsl.call.lse_merge import merge
    from attndsl.errors import AttnDSLError
    from attndsl.flex.tracing import trace
    from attndsl.frontend.declare import tensor
    from attndsl.inspection.reference_check import compare
    from attndsl.inspection.tilemap import TileMap
    from attndsl.program_join import join
    from attndsl.serving.paged import PagedCache
    from attndsl.serving.serving_plan import ServingPlan
    from attndsl.torch_api.sdpa import scaled_dot_product_attention

__version__ = "0.2.0"
__all__ = [
    "Attention", "AttnDSLError", "Gradients", "PagedCache", "ServingPlan", "TileMap", "compare",
    "compat", "compile", "errors", "flex", "join", "layout", "load", "merge", "nn", "parallel",
    "scaled_dot_product_attention", "tensor", "trace", "verify",
]  # fmt: skip

_HOMES = {
    "Attention": "attndsl.api",
    "AttnDSLError": "attndsl.errors",
    "Gradients": "attndsl.call.backward_call",
    "compare": "attndsl.inspection.reference_check",
    "compile": "attndsl.api",
    "join": "attndsl.program_join",
    "load": "attndsl.api",
    "load_ipython_extension": "attndsl.notebook",
    "merge": "attndsl.call.lse_merge",
    "PagedCache": "attndsl.serving.paged",
    "ServingPlan": "attndsl.serving.serving_plan",
    "TileMap": "attndsl.inspection.tilemap",
    "scaled_dot_product_attention": "attndsl.torch_api.sdpa",
    "tensor": "attndsl.frontend.declare",
    "trace": "attndsl.flex.tracing",
    "unload_ipython_extension": "attndsl.notebook",
    "verify": "attndsl.api",
}
_MODULES = ("compat", "errors", "flex", "layout", "nn", "parallel")
_OF_EXTRAS = ("hf", "torchtitan")
"""Modules for packages that need not be installed: no names of ``import *`` or of ``dir``."""

# Type checkers know the names above. To them this function would make any other name one too.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(_home(_HOMES[name]), name)
        if name in (*_MODULES, *_OF_EXTRAS):
            return import_module(f"attndsl.{name}")
        message = f"module 'attndsl' has no attribute {name!r}"
        if isinstance(getattr(import_module("attndsl.errors"), name, None), type):
            message += f": it is attndsl.errors.{name}"
        raise AttributeError(message, name=name, obj=sys.modules[__name__])


def _home(name: str) -> ModuleType:
    if name in sys.modules:
        return import_module(name)
    with gc_paused():
        return import_module(name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if os.environ.get("ATTNDSL_LOG"):
    import_module("attndsl.foundation.logs").set_up()
register_operators()
