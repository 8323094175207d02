"""Differences between the versions of Triton, 3.6 to 3.9: names in Gluon, the launcher, the end.

Every use of Gluon's Hopper operations and of the launcher's insides goes through this module, so
that a new version of Triton breaks one file.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.backends.nvidia import driver
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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

_OWN_LAUNCHER = (3, 6)
"""Triton that generates a C function for each signature, which takes the kernel's arguments one by
one; later ones have one function for all, which takes a sequence of arguments and their types."""
_READ_VERSIONS = (_OWN_LAUNCHER, (3, 7), (3, 8), (3, 9))
"""Versions whose launchers have been read: the order of arguments of their C functions is known."""
_LAUNCHER_FIELDS = (
    "global_scratch_size", "launch", "launch_cooperative_grid", "launch_pdl", "profile_scratch_size"
)  # fmt: skip


def why_wrapped(kernel: Any) -> str | None:
    """Reason why only Triton's own Python may launch a compiled ``kernel``, or None."""
    if _VERSION not in _READ_VERSIONS:
        return f"its launcher in Triton {triton.__version__} is not one of those that are known"
    run = kernel.run
    wanted = _LAUNCHER_FIELDS
    if _VERSION != _OWN_LAUNCHER:
        wanted = (*wanted, "arg_annotations", "kernel_signature")
    missing = [name for name in wanted if not hasattr(run, name)]
    if missing:
        return f"its launcher, a {type(run).__name__}, has no {', '.join(missing)}"
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        return "it takes buffers that Triton's launcher allocates"
    names = _descriptors(kernel)
    if not names:
        return None
    if not inspect.isfunction(run.launch) or "launcher" not in _enclosed(run.launch):
        return "what turns its descriptors into tensor maps holds no C function"
    if len(kernel.metadata.tensordesc_meta or ()) != len(names):
        return "it takes descriptors apart instead of reading tensor maps"
    return None


def direct_launch(
    kernel: Any, constants: tuple[object, ...]
) -> Callable[[int, int, Sequence[object]], None]:
    """``(programs, stream, arguments) -> None``: calls the C function that launches ``kernel``.

    For kernels that :func:`why_wrapped` has no objection to. In place of each descriptor the
    arguments have what :func:`tensor_map_encoders` make of it.

    Args:
        kernel: A compiled kernel, loaded.
        constants: Values of its trailing constants.
    """
    run = kernel.run
    function = _enclosed(run.launch)["launcher"] if _descriptors(kernel) else run.launch
    head = (kernel.function, run.launch_cooperative_grid, run.launch_pdl)
    nothing = (None, None)  # Global and profile scratch.
    described = (kernel.packed_metadata, None, None, None)  # And launch metadata, two hooks.
    if _VERSION == _OWN_LAUNCHER:
        middle = (*head, *nothing, *described)

        def launch(programs, stream, arguments):
            function(programs, 1, 1, stream, *middle, *arguments, *constants)

        return launch
    middle = (*head, *described, *nothing, run.arg_annotations, run.kernel_signature)

    def launch(programs, stream, arguments):
        function(programs, 1, 1, stream, *middle, (*arguments, *constants))

    return launch


def tensor_map_encoders(kernel: Any) -> dict[str, Callable[[Any], Sequence[object]]]:
    """Functions by argument by which Triton makes a descriptor's tensor map, sizes and strides."""
    rest = (None,) * (len(inspect.signature(driver.make_tensordesc_arg).parameters) - 2)

    def encoder(meta):
        return lambda descriptor: driver.make_tensordesc_arg(descriptor, meta, *rest)

    metas = kernel.metadata.tensordesc_meta or ()
    return {n: encoder(m) for n, m in zip(_descriptors(kernel), metas, strict=True)}


def _descriptors(kernel: Any) -> list[str]:
    return [n for n, kind in kernel.src.signature.items() if kind.startswith("tensordesc")]


def _enclosed(function: Any) -> dict[str, Any]:
    return inspect.getclosurevars(function).nonlocals
