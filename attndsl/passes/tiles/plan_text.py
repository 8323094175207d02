"""Tile plans as formulas to read: ``kv tiles from max(0, i - 8) to i``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attndsl.ir import Op, const
from attndsl.passes.print_ir import print_expression

from .tile_plan import DIRECTIONS, LoopPlan, Segment

if TYPE_CHECKING:
    from attndsl.ir import Node

    from .sparsity import Sparsity
    from .tile_plan import Direction

_NAMES = {
    "$tile": "i",
    "$tiles": "tiles",
    "$whole": "whole",
    "$q_offset": "q_offset",
    "$kv_offset": "kv_offset",
}


def print_tiles(sparsity: Sparsity, block_m: int, block_n: int) -> str:
    """Lines that tell each loop's tiles, for tiles of ``block_m`` x ``block_n`` pairs."""
    lines = [f"tiles of {block_m} queries x {block_n} keys; i: index of the tile whose loop it is;"]
    lines.append("tiles: how many there are along the loop; whole: how many of these are complete")
    for direction in DIRECTIONS.values():
        loop = sparsity.loop(direction, block_m, block_n, shifted=False, indexed=False)
        lines += print_loop(loop, direction)
    return "\n".join(lines)


def print_loop(loop: LoopPlan, direction: Direction) -> list[str]:
    """One loop's tiles, a segment a line."""
    lines = [f"{direction.name}: for {direction.own} tile i"]
    if loop.listed is not None:
        return [*lines, f"  tiles from lists written at run time: {loop.listed}"]
    for kind, segments in (("FULL", loop.full), ("PARTIAL", loop.partial)):
        lines += [f"  {kind:<8} {direction.along} {_segment(s)}" for s in segments]
    if not loop.full and not loop.partial:
        lines.append("  none: no pair is live")
    return lines


def _segment(segment: Segment) -> str:
    last = _last(segment.stop)
    if last is segment.start:
        text = f"tile  {_text(segment.start)}"
    else:
        end = f"before {_text(segment.stop)}" if last is None else _text(last)
        text = f"tiles from {_text(segment.start)} to {end}"
    if segment.step != 1:
        text += f" in steps of {segment.step}"
    return text if segment.guard is None else f"{text} if {_text(segment.guard)}"


def _last(stop: Node) -> Node | None:
    """``x`` where ``stop`` is ``x + 1``."""
    return stop.args[0] if stop.op is Op.ADD and stop.args[1] is const(1) else None


def _text(item: Node) -> str:
    return print_expression(item, _NAMES)
