"""The tile plan: which key-value tiles a query tile visits, and the reverse.

For a tile of BLOCK_M x BLOCK_N pairs: EMPTY (no live pair: not visited), FULL (every pair live: no
mask code), PARTIAL. A plan gives, for one direction, the FULL and the PARTIAL tiles as segments
``[start, stop)`` of tile indices. Bounds are text in the names that kernels define, so a plan is
printed into a kernel as it stands.

Non-goals: deciding from the mask which tiles are EMPTY. This version calls every tile of a masked
program PARTIAL, and every tile of an unmasked one FULL except the ragged last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attndsl.ir import Op

if TYPE_CHECKING:
    from attndsl.ir import Program


@dataclass(frozen=True, slots=True)
class Segment:
    """Tile indices ``range(start, stop, step)``; ``start`` and ``stop`` are integer expressions.

    Names in them: ``tile`` (index of the tile whose loop this is), ``q_len``, ``kv_len``,
    ``BLOCK_M``, ``BLOCK_N``, ``tl`` functions.
    """

    start: str
    stop: str
    step: int = 1


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """The tiles that one program visits: FULL ones first, then PARTIAL ones."""

    full: tuple[Segment, ...]
    partial: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Loops of a program's kernels."""

    forward: LoopPlan
    """Key-value tiles for a query tile, forward."""
    backward_q: LoopPlan
    """Key-value tiles for a query tile, in the pass that makes dQ."""
    backward_kv: LoopPlan
    """Query tiles for a key-value tile, in the pass that makes dK and dV."""
    ragged_full: bool
    """Whether the last FULL query tile of ``backward_kv`` may reach beyond ``q_len``."""


def plan_tiles(program: Program) -> TilePlan:
    """The plan of ``program``. Sound for every length: no live pair is left out."""
    masked = program.mask is not None
    by_query = _loop("kv_len", "BLOCK_N", masked)
    by_key = _loop("q_len", "BLOCK_M", masked)
    # Rows beyond the length are read as zeros with a log-sum-exp of +inf: their weights are 0
    # without a mask, unless a score expression makes NaN of the zeros.
    ragged_full = not masked and program.score.op is Op.SCORE
    if ragged_full:
        by_key = LoopPlan(full=(Segment("0", "tl.cdiv(q_len, BLOCK_M)"),), partial=())
    return TilePlan(by_query, by_query, by_key, ragged_full)


def _loop(length: str, block: str, masked: bool) -> LoopPlan:
    tiles = f"tl.cdiv({length}, {block})"
    if masked:
        return LoopPlan(full=(), partial=(Segment("0", tiles),))
    whole = f"{length} // {block}"
    return LoopPlan(full=(Segment("0", whole),), partial=(Segment(whole, tiles),))
