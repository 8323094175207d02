"""The families of kernels, and the backends that are made of them.

A backend of generated kernels is the families that its name allows, in the order of
:data:`FAMILIES`: the first without an objection runs a task. The name of a family allows it and the
portable family, which runs all calls. ``auto`` allows the families that are best on a GPU.

Families are imported when a backend is made: Triton takes long, and CPU users never need it.
"""

from __future__ import annotations

from pkgutil import resolve_name
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from attndsl.foundation.caches import memoised

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..kernels.kernel import Family
    from ..triton.serve_launch import Serve

HOPPER = "cuda:90"


class FamilyEntry(NamedTuple):
    """A family, the GPUs that it is for, and where ``auto`` takes it."""

    name: str
    """Name of its kernels, and of the backend that asks for them."""
    made_by: str
    """Module and class."""
    target: str | None = None
    """The one architecture that its kernels are for; None for all GPUs that Triton has."""
    beside: str | None = None
    """The family beside which alone ``auto`` takes it; None for any.

    The limits of rows of ``short``'s backward and of ``decode`` were chosen against Hopper's
    kernels. Where they are faster than the portable ones on other GPUs awaits a measurement: until
    then these run them by their names.
    """
    options: Mapping[str, object] = MappingProxyType({})
    """Arguments of the class beside that family."""
    pages: str | None = None
    """Module and class of its kernels that read pages."""


FAMILIES = (
    FamilyEntry(
        "short", "attndsl.backends.triton.short_family:Short", beside="hopper",
        options={"beside_others": True},
    ),
    FamilyEntry(
        "decode", "attndsl.backends.triton.decode_family:Decode", beside="hopper",
        options={"beside_others": True}, pages="attndsl.backends.triton.serve_launch:Serve",
    ),
    FamilyEntry("hopper", "attndsl.backends.hopper.family:Hopper", target=HOPPER),
    FamilyEntry("triton", "attndsl.backends.triton.family:Portable"),
)  # fmt: skip
"""All families, in the order in which they are asked; the last one runs all calls."""
GENERATED = ("triton", "hopper", "short", "decode")
"""Names of the backends of a family, in the order of messages."""


@memoised("families of backends", None)
def families_of(name: str, target: str | None = None) -> tuple[str, ...]:
    """Names of the families that a backend's name allows.

    Args:
        name: ``auto``, or one of :data:`GENERATED`.
        target: Architecture of the GPU, such as ``cuda:90``, of which ``auto`` depends; None for
            GPUs of others than NVIDIA.
    """
    if name != "auto":
        return tuple(x.name for x in FAMILIES if x.name in (name, FAMILIES[-1].name))
    best = [x for x in FAMILIES if x.target in (None, target) and why_not_loaded(x.name) is None]
    names = {x.name for x in best}
    return tuple(x.name for x in best if x.beside is None or x.beside in names)


def name_of(families: tuple[str, ...]) -> str:
    """Name of the backend of ``families``: the first one's, or ``auto`` if it allows others."""
    return families[0] if families == families_of(families[0]) else "auto"


@memoised("reasons against families", None)
def why_not_loaded(name: str) -> str | None:
    """Reason why this Triton lacks what the kernels for one GPU are written in, or None.

    That is Gluon, an experimental part.
    """
    (entry,) = (x for x in FAMILIES if x.name == name)
    if entry.target is None:
        return None
    try:
        resolve_name(entry.made_by)
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def make_families(names: tuple[str, ...]) -> tuple[tuple[Family, ...], Serve | None]:
    """Make the families of a backend, and what reads pages for it or None."""
    entries = [x for x in FAMILIES if x.name in names]
    families = tuple(
        resolve_name(x.made_by)(**(x.options if x.beside in names else {})) for x in entries
    )
    return families, next((resolve_name(x.pages)() for x in entries if x.pages), None)
