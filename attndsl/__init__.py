"""attndsl: attention variants as text, compiled to fused GPU kernels, forward and backward.

``import attndsl`` is light: torch, and all that compiles, is imported when first used. Operators of
saved graphs are known from then on, whether torch is imported before or after.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attndsl import fingerprint as _fingerprint  # noqa: F401  First: it notes what is imported.
from attndsl.after_torch import register_operators
from attndsl.uncollected import uncollected

if TYPE_CHECKING:
    from types import ModuleType

    from attndsl import compat, errors, flex, hf, layout, nn, parallel  # noqa: F401
    from attndsl.api import Attention, compile, load, verify  # noqa: A004
    from attndsl.comparing import compare
    from attndsl.errors import AttnDSLError
    from attndsl.flex.tracing import trace
    from attndsl.frontend.declare import tensor
    from attndsl.joining import join
    from attndsl.merging import merge
    from attndsl.runtime.backward import Gradients
    from attndsl.runtime.paged import PagedCache
    from attndsl.runtime.plans import ServingPlan
    from attndsl.tilemap import TileMap
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
    "Gradients": "attndsl.runtime.backward",
    "compare": "attndsl.comparing",
    "compile": "attndsl.api",
    "join": "attndsl.joining",
    "load": "attndsl.api",
    "load_ipython_extension": "attndsl.notebook",
    "merge": "attndsl.merging",
    "PagedCache": "attndsl.runtime.paged",
    "ServingPlan": "attndsl.runtime.plans",
    "TileMap": "attndsl.tilemap",
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
    with uncollected():
        return import_module(name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if os.environ.get("ATTNDSL_LOG"):
    import_module("attndsl.logs").set_up()
register_operators()
