"""Names and facts of what expressions read: captured tensors, params, positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..fast_math import EXACT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import DType, Node
    from attndsl.passes.index_bounds import Dim


@dataclass(frozen=True, slots=True)
class CaptureFacts:
    """Facts by which a kernel reaches a captured tensor."""

    name: str
    dtype: DType
    rank: int
    bits: int
    """Bits of an element."""
    wide: bool
    """True if offsets within the tensor need 64 bits."""
    unit_dims: frozenset[int] = frozenset()
    """Dims whose stride is 1."""
    dims: tuple[Dim, ...] = ()
    """Each dim as it is declared."""
    exact: tuple[str, ...] = ()
    """The variable of each dim, where all that it has at the call's pairs are inside."""
    is_position: bool = False
    """True if elements are below 2**30 in size."""
    is_padded: bool = False
    """True if no index leaves it (:class:`attndsl.ir.TensorDecl`)."""


@dataclass(frozen=True, slots=True)
class LeafNames:
    """Names of leaves, and facts known of them."""

    captures: Mapping[str, CaptureFacts]
    int_bits: Mapping[str, int]
    """Bits of int params and int tensors."""
    head_dim: int
    from_zero: bool = False
    """True if logical positions are row numbers."""
    reach: int | None = None
    """Number above all row numbers and sizes, where it makes angles small
    (:mod:`attndsl.passes.trig_ranges`)."""
    scalar: bool = False
    """True if values are scalars, as in loop bounds, rather than parts of a tile."""
    forms: str = EXACT
    """Set of fast forms that functions may take (:mod:`..fast_math`)."""
    packed_heads: bool = False
    """True if a tile's rows are of several query heads, so that ``h`` varies along them as ``q``
    does."""
    locals: Mapping[Node, str] = field(default_factory=dict)
    """Names of locals that hold some expressions, each of which then has a line of its own."""
    made: frozenset[str] = frozenset()
    """Captures with one int for each batch entry, of which the kernel has that of its own."""
    first_key: str | None = None
    """Text of the first key of a tile of keys that begins at a multiple of their number, a power of
    two, and whose logical positions are row numbers; None where that is not known."""


def made_field(name: str) -> str:
    """Name in ``given`` of the value of a capture that the kernel makes itself."""
    return f"own_{name}"
