"""The tile plan's data: which key-value tiles a query tile visits, and the reverse.

For a tile of BLOCK_M x BLOCK_N pairs: EMPTY (no live pair: not visited), FULL (every pair live: no
mask code), PARTIAL. A plan gives, for one direction and one tile size, the FULL and the PARTIAL
tiles: as segments in closed form, or, where there is none, as lists that a kernel writes.

Bounds are INT expressions over the program's own names and over those of this module. Names that
begin with ``$`` cannot be a user's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attndsl.ir import DType, Op, const, node, param

if TYPE_CHECKING:
    from attndsl.ir import Node

TILE = param("$tile", DType.INT)
"""Index of the tile whose loop it is."""
TILES = param("$tiles", DType.INT)
"""Number of tiles along the loop, the ragged last included."""
WHOLE = param("$whole", DType.INT)
"""Number of tiles along the loop that FULL may name: those that need no bound checks."""
OWN = param("$own", DType.INT)
"""Index of the owning tile, among those that ``LoopPlan.visitors`` names."""
EMPTY, PARTIAL, FULL = 0, 1, 2
"""Kinds of tiles, as arrays store them."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tile indices ``range(start, stop, step)``, none where ``guard`` is false."""

    start: Node
    stop: Node
    step: int = 1
    guard: Node | None = None


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """The tiles that one program visits: FULL ones first, then PARTIAL ones.

    Segments are disjoint. Lengths are taken as unbounded along the tile that owns the loop, so the
    last, ragged one may visit a PARTIAL tile that has no live pair within the lengths.
    """

    full: tuple[Segment, ...] = ()
    partial: tuple[Segment, ...] = ()
    listed: str | None = None
    """Reason why lists written at run time give the tiles; None where the segments do."""
    descending: bool = False
    """True if later tiles have more work, and so begin first."""
    short: bool = False
    """True if the number of tiles does not grow with the length."""
    within: Node | None = None
    """BOOL: where it is false, an int is too large for the closed form, and the segments name all
    tiles PARTIAL; None where that cannot be."""
    visitors: tuple[Segment, ...] = ()
    """For loops whose owning tiles take turns: the owning tiles that visit a tile along the loop,
    exactly those whose segments name it. ``$tile`` is the visited tile, and ``$tiles`` the number
    of owning tiles."""
    two_sided: bool = False
    """True if PARTIAL tiles may lie on both sides of the FULL ones, in such loops."""


def guarded(loop: LoopPlan, within: Node | None) -> LoopPlan:
    """``loop`` where ``within`` is true, and all tiles as PARTIAL ones where it is false."""
    if within is None:
        return loop
    full, partial = (
        tuple(
            replace(s, guard=within if s.guard is None else node(Op.AND, within, s.guard))
            for s in segments
        )
        for segments in (loop.full, loop.partial)
    )
    everything = Segment(const(0), TILES, 1, node(Op.NOT, within))
    return replace(loop, full=full, partial=(*partial, everything), within=within)


@dataclass(frozen=True, slots=True)
class Direction:
    """One of the kernels' loops."""

    name: str
    own: str
    """Position that the owning tile counts: ``q`` or ``kv``."""
    along: str
    """Position that the loop counts."""


FORWARD = Direction("forward", "q", "kv")
BACKWARD_Q = Direction("backward_q", "q", "kv")
BACKWARD_KV = Direction("backward_kv", "kv", "q")
DIRECTIONS = {d.name: d for d in (FORWARD, BACKWARD_Q, BACKWARD_KV)}
