"""Differences between the versions of Gluon in Triton 3.6 to 3.9: names, ptxas, the end.

Every use of Gluon's Hopper operations goes through this module, so that a new version of Triton
breaks one file.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

if hasattr(tma, "async_load"):
    tma_load = tma.async_load
    tma_store = tma.async_store
else:
    tma_load = tma.async_copy_global_to_shared
    tma_store = tma.async_copy_shared_to_global
tma_wait = tma.store_wait
_MEMORY = gl.shared_memory_descriptor
view_memory = _MEMORY.reinterpret if hasattr(_MEMORY, "reinterpret") else _MEMORY._reinterpret
"""Shared memory in another shape and layout: ``(memory, dtype, shape, layout)``."""

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
COPIES_OPERANDS = tl.constexpr(_VERSION < (3, 9))
"""True if ptxas (12.8, 12.9) serialises products whose operands a loop carries; 13.4 does not."""

if _VERSION >= (3, 9):
    # The first time that a tile's layout is inferred, libtriton takes references to Gluon's layout
    # classes that it never gives up. Over their methods' globals these keep the names in _semantic,
    # among them a type of libtriton, which as Python ends prints 30 lines on what "leaked". Python
    # clears names of modules that are still there, but not of those that are gone before them. One
    # that its own names refer to is there as long as they are.
    # A Triton that has no such module needs no more than that it is not there.
    with suppress(ImportError):
        _module = import_module("triton.experimental.gluon.language._semantic")
        vars(_module)["_attndsl_keeps_the_module"] = _module
