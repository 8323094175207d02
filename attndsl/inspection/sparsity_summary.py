"""Savings by a mask in one or two sentences that need no knowledge of tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.backends.tiled.tile_kinds import wide_ints
from attndsl.errors import UnsupportedError
from attndsl.ir import Op, const, leaf_names, toposort
from attndsl.passes.tiles.sparsity import SCORES, SETS
from attndsl.passes.tiles.tile_plan import FORWARD

from .tile_search import count_tiles

if TYPE_CHECKING:
    from attndsl.backends.base import Call
    from attndsl.passes.tiles.tile_plan import LoopPlan
    from attndsl.pipeline import Lowered

    from .tile_search import TileCounts

_SMALL = 32
"""Rows and keys of the smallest tiles that kernels have."""
_MOST_SMALL = 1 << 22
"""Small tiles that are looked at one by one to be counted."""


def saving(
    lowered: Lowered, blocks: tuple[int, int], call: Call | None, counts: TileCounts | None
) -> str:
    """Compare the work with that of dense attention, and tell what has to be found out for it.

    Args:
        lowered: The program.
        blocks: Queries and keys of a tile.
        call: The lengths, if they are known.
        counts: Its tiles, if they have been counted.
    """
    sparsity = lowered.sparsity
    if sparsity.mask is None:
        return "All of the work of dense attention: there is no mask."
    if sparsity.mask is const(False):
        return "No work: the mask is never true, and every output is 0."
    if all(atom.way == SCORES for atom in sparsity.atoms):
        return (
            "All of the work of dense attention: the mask depends on the scores, so that no tile "
            "can be left out."
        )
    loop = _loop(lowered, blocks, call)
    if counts is not None:
        said = _share(counts)
    elif loop.listed is None and loop.short and not _looks_up(lowered):
        said = (
            "Each query sees a limited number of keys: the work grows with the length, and not "
            "with its square."
        )
    else:
        said = "Tiles whose pairs are all masked out cost nothing."
    if loop.listed is None:
        said += " Nothing is computed beforehand."
    else:
        said += f" The tiles are found on the device at each call, from {_read(lowered)}."
    if any(atom.way == SCORES for atom in sparsity.atoms):
        said += " A condition on the scores leaves out no tile."
    return said


def smaller_tiles(
    lowered: Lowered, call: Call, blocks: tuple[int, int], counts: TileCounts
) -> str | None:
    """Text on how much less small tiles would visit; None where that is little or unknown.

    Args:
        lowered: The program.
        call: The lengths.
        blocks: Queries and keys of a tile.
        counts: The tiles of that size.
    """
    if counts.partial <= 4 * counts.full or min(blocks) <= _SMALL:
        return None
    listed = _loop(lowered, blocks, call).listed is not None
    if listed and counts.total * blocks[0] * blocks[1] > _MOST_SMALL * _SMALL**2:
        return None
    try:
        small = count_tiles(lowered, call, _SMALL, _SMALL)
    except UnsupportedError:
        return None
    now, then = (_visited(each) for each in (counts, small))
    if then > 0.9 * now:
        return None
    return (
        f"most live tiles are PARTIAL: tiles of {_SMALL} x {_SMALL} would visit {then:.2%} of the "
        f"pairs, in place of {now:.2%}"
    )


def _loop(lowered: Lowered, blocks: tuple[int, int], call: Call | None) -> LoopPlan:
    if call is None:
        return lowered.sparsity.loop(FORWARD, *blocks, shifted=False, indexed=False)
    return lowered.sparsity.loop(FORWARD, *blocks, call.shifted, call.indexed, wide_ints(call))


def _visited(counts: TileCounts) -> float:
    return (counts.full + counts.partial) / max(1, counts.total)


def _share(counts: TileCounts) -> str:
    dense = "of the work of dense attention at these lengths"
    share = 100 * _visited(counts)
    if share == 0:
        return "No work at these lengths: no pair takes part."
    if share == 100:
        return f"All {dense}."
    if share < 1:
        return f"Less than 1 % {dense}, with the same result."
    return f"About {min(99, round(share))} % {dense}, with the same result."


def _looks_up(lowered: Lowered) -> bool:
    mask = lowered.sparsity.mask
    return mask is not None and any(item.op is Op.LOAD for item in toposort(mask))


def _read(lowered: Lowered) -> str:
    """The captures that tiles are found from; the positions where there is none."""
    program, atoms = lowered.program, lowered.sparsity.atoms
    names = set[str]().union(*(leaf_names(a.condition) for a in atoms if a.way != SETS))
    found = [decl.name for decl in program.tensors if decl.name in names]
    found += [decl.name for decl in program.params if decl.name in names]
    *first, last = found or ["the positions"]
    return f"{', '.join(first)} and {last}" if first else last
