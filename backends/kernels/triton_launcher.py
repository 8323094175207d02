"""Triton's launchers, 3.6 to 3.9: the C function beneath, called without Triton's Python.

Every use of the launchers' insides goes through this module, so that a new version of Triton breaks
one file.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import triton
from triton.backends.nvidia import driver

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
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
    kernel: Any, constants: tuple[object, ...], others: tuple[int, int] = (1, 1)
) -> Callable[[int, int, Sequence[object]], None]:
    """``(programs, stream, arguments) -> None``: calls the C function that launches ``kernel``.

    For kernels that :func:`why_wrapped` has no objection to. In place of each descriptor the
    arguments have what :func:`tensor_map_encoders` make of it.

    Args:
        kernel: A compiled kernel, loaded.
        constants: Values of its trailing constants.
        others: The grid's second and third size.
    """
    run = kernel.run
    function = _enclosed(run.launch)["launcher"] if _descriptors(kernel) else run.launch
    head = (kernel.function, run.launch_cooperative_grid, run.launch_pdl)
    nothing = (None, None)  # Global and profile scratch.
    described = (kernel.packed_metadata, None, None, None)  # And launch metadata, two hooks.
    if _VERSION == _OWN_LAUNCHER:
        middle = (*head, *nothing, *described)

        def launch(programs, stream, arguments):
            function(programs, *others, stream, *middle, *arguments, *constants)

        return launch
    middle = (*head, *described, *nothing, run.arg_annotations, run.kernel_signature)

    def launch(programs, stream, arguments):
        function(programs, *others, stream, *middle, (*arguments, *constants))

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
