"""A loop plan as device functions: how many tiles a program visits, and which the n-th is.

A kernel runs one flattened loop over all FULL segments and one over all PARTIAL ones, whatever
their number, so that the loop's body is printed once for each kind. Where the plan is a list, the
same functions read it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attndsl.ir import Op, const, node
from attndsl.passes.int_ranges import fits, ranges
from attndsl.passes.tiles.tile_plan import OWN

from .expression import print_expressions
from .module_lines import scope_function

if TYPE_CHECKING:
    from attndsl.ir import Node
    from attndsl.passes.tiles.tile_plan import LoopPlan, Segment

    from .leaf_names import LeafNames

LIST_PARAMETERS = ["tile_rows", "tile_list", "list_step_b", "list_step_h"]
"""Kernel arguments of a loop whose tiles are listed. ``tile_rows``: int32 (own tiles, 4 or more) a
map: numbers of FULL and of PARTIAL tiles, the first live tile, the first FULL tile; the first live
tile is -1 where the live tiles or the FULL ones have gaps. Where lists tell of parts of a tile's
rows, two more for each: which of the PARTIAL tiles, in their order, is its first, and which is
behind its last; of a part without any the number of tiles along, and 0. ``tile_list``: int32 (own
tiles, tiles along) a map: FULL tiles from the front, PARTIAL ones from the back. The steps are the
own tiles between the maps of two batch entries, and of two heads."""
_ROW = "row = (head.b * given.list_step_b + head.h * given.list_step_h + tile).to(tl.int64)"


def print_loop(
    name: str, along: str, loop: LoopPlan, param_values: list[str], names: LeafNames, parts: int = 1
) -> tuple[list[str], set[str]]:
    """``NAME_visits`` (how many tiles) and ``NAME_tile`` (the n-th FULL or PARTIAL one).

    Args:
        name: The loop.
        along: ``q`` or ``kv``: what the loop counts.
        loop: Its plan.
        param_values: Lines that define the values of the program's params.
        names: What leaves are called.
        parts: Of how many parts of an owning tile's rows lists tell which tiles they have; if of
            several, ``NAME_tiles_of_part`` reads it.

    Returns:
        The functions, and the library functions that they use.
    """
    if loop.listed is not None:
        return _listed(name, along, parts), set()
    names = replace(names, scalar=True)
    prologue = [*_lengths(along), *param_values]
    counts = (_total(loop.full), _total(loop.partial))
    printed = print_expressions(counts, names)
    found = ", ".join(
        _narrow(text, (root,), names) for text, root in zip(printed.results, counts, strict=True)
    )
    body = [*prologue, *printed.lines, f"return Visits({found}, 0, 0)"]
    doc = "Numbers of FULL and PARTIAL tiles; the rest is for lists."
    texts = [_function(f"{name}_visits", "tile", doc, body)]
    helpers = set(printed.helpers)
    branches = []
    for segments in (loop.partial, loop.full):
        nth, used = _nth(segments, names) if segments else (["return 0"], set[str]())
        branches.append(nth)
        helpers |= used
    doc = "Index of tile number ``step`` of the PARTIAL ones, or of the FULL ones."
    texts.append(_tile_function(name, doc, prologue, *branches))
    return texts, helpers


def _tile_function(
    name: str, doc: str, prologue: list[str], partial: list[str], full: list[str]
) -> str:
    """``NAME_tile``; each branch ends in a ``return``."""
    branches = ["if PARTIAL:", *map(_indented, partial), "else:", *map(_indented, full)]
    body = [*prologue, *branches]
    return scope_function(
        f"{name}_tile", "step, visits, tile, shift", doc, body, "PARTIAL: tl.constexpr"
    )


def _indented(line: str) -> str:
    return f"    {line}"


def print_turn(
    name: str, own: str, loop: LoopPlan, param_values: list[str], names: LeafNames
) -> tuple[str, set[str]]:
    """``NAME_turn``: how many owning tiles before ``own`` visit tile ``tile`` along the loop.

    Owners come in their order, or from the last one on where the plan is ``descending``.

    Args:
        name: The loop.
        own: ``q`` or ``kv``: what the owning tiles count.
        loop: Its plan, with ``visitors``. ``own`` is one of them.
        param_values: As of :func:`print_loop`.
        names: Likewise.
    """
    before = turn_of(loop)
    names = replace(names, scalar=True)
    printed = print_expressions((before,), names)
    result = _narrow(printed.results[0], (before,), names)
    body = [*_lengths(own), *param_values, *printed.lines, f"return {result}"]
    doc = "How many tiles visit ``tile`` before ``own`` does."
    return _function(f"{name}_turn", "own, tile", doc, body), set(printed.helpers)


def turn_of(loop: LoopPlan) -> Node:
    """Number of ``visitors`` that come before ``OWN``, which is one of them."""
    below = _below(loop.visitors)
    if not loop.descending:
        return below
    others = node(Op.SUB, _total(loop.visitors), const(1))
    return node(Op.SUB, others, below)


def _below(segments: tuple[Segment, ...]) -> Node:
    """Number of tiles of ``segments`` that are below ``OWN``, which is one of them."""
    total = const(0)
    for segment in segments:
        span = node(Op.SUB, node(Op.MIN, OWN, segment.stop), segment.start)
        if len(segments) == 1:
            # The only segment has it.
            total = node(Op.SUB, OWN, segment.start)
            return total if segment.step == 1 else _steps(total, segment.step)
        length = node(Op.MAX, _steps(span, segment.step), const(0))
        if segment.guard is not None:
            length = node(Op.WHERE, segment.guard, length, const(0))
        total = node(Op.ADD, total, length)
    return total


def _steps(span: Node, step: int) -> Node:
    """Steps in ``span``, rounded up."""
    if step == 1:
        return span
    return node(Op.FLOORDIV, node(Op.ADD, span, const(step - 1)), const(step))


def print_visited(
    name: str, along: str, loop: LoopPlan, param_values: list[str], names: LeafNames
) -> tuple[str, set[str]]:
    """``NAME_have``: whether tile number ``found`` is one of those of a plan's segments.

    Arguments and results are as those of :func:`print_loop`. Segments count as if they had no
    gaps.
    """
    segments = (*loop.full, *loop.partial)
    names = replace(names, scalar=True)
    bounds = tuple(bound for segment in segments for bound in (segment.start, segment.stop))
    guards = tuple(segment.guard for segment in segments if segment.guard is not None)
    printed = print_expressions((*bounds, *guards), names)
    guarded = iter(printed.terms[len(bounds) :])
    inside = []
    for number, segment in enumerate(segments):
        start, stop = printed.terms[2 * number : 2 * number + 2]
        guard = "" if segment.guard is None else f" & {next(guarded)}"
        inside.append(f"((found >= {start}) & (found < {stop}){guard})")
    body = [*_lengths(along), *param_values, *printed.lines, f"return {' | '.join(inside)}"]
    doc = "Whether tile number ``found`` may have a live pair."
    return _function(f"{name}_have", "found, tile", doc, body), set(printed.helpers)


def _lengths(along: str) -> list[str]:
    length, block = f"sizes.{along}_len", "BLOCK_M" if along == "q" else "BLOCK_N"
    return [f"tiles = tl.cdiv({length}, {block})", f"whole = {length} // {block}"]


def row_width(parts: int) -> int:
    """Numbers that ``tile_rows`` has of an owning tile."""
    return 4 + (2 * parts if parts > 1 else 0)


def _listed(name: str, along: str, parts: int) -> list[str]:
    tiles = _lengths(along)[0]
    found = f"found = given.tile_rows + row * {row_width(parts)}"
    of_part = _function(
        f"{name}_tiles_of_part", "part, tile",
        "The first PARTIAL tile that a part of the rows has, and the one behind the last.",
        [_ROW, f"{found} + 4 + 2 * part", "return tl.load(found), tl.load(found + 1)"],
    )  # fmt: skip
    # A list is read only where it has gaps: a load that depends on a load waits for memory twice.
    read = "mask=(visits.first_live < 0) & (step >= 0) & (step < tiles), other=0)"
    return [
        _function(
            f"{name}_visits", "tile",
            "Numbers of FULL and PARTIAL tiles, the first live tile (or -1), the first FULL one.",
            [_ROW, found, "return Visits(", "    tl.load(found), tl.load(found + 1), "
             "tl.load(found + 2), tl.load(found + 3)", ")"],
        ),
        _tile_function(
            name, "Index of tile number ``step`` of the PARTIAL ones, or of the FULL ones.",
            [_ROW, tiles],
            [f"listed = tl.load(given.tile_list + row * tiles + (tiles - 1 - step), {read}",
             "before = visits.first_full - visits.first_live",
             "banded = visits.first_live + step + tl.where(step < before, 0, visits.full)",
             "return tl.where(visits.first_live < 0, listed, banded)"],
            [f"listed = tl.load(given.tile_list + row * tiles + step, {read}",
             "return tl.where(visits.first_live < 0, listed, visits.first_full + step)"],
        ),
        *[of_part] * (parts > 1),
    ]  # fmt: skip


def _total(segments: tuple[Segment, ...]) -> Node:
    total = const(0)
    for segment in segments:
        length = _length(segment)
        total = length if total is const(0) else node(Op.ADD, total, length)
    return total


def _nth(segments: tuple[Segment, ...], names: LeafNames) -> tuple[list[str], set[str]]:
    lengths = tuple(_length(segment) for segment in segments[:-1])
    starts = tuple(segment.start for segment in segments)
    printed = print_expressions((*starts, *lengths), names)
    body = list(printed.lines)
    first, last = printed.terms[: len(starts)], segments[-1]
    for number, segment in enumerate(segments[:-1]):
        # Later segments see the steps that are left; the first segment with room is the one.
        element = _element(first[number], segment.step)
        body.append(f"count = {printed.results[len(starts) + number]}")
        if number == 0:
            body.append(f"found = {element}")
        else:
            body.append(f"found = tl.where((step >= 0) & (step < count), {element}, found)")
        body.append("step = step - count")
    element = _element(first[-1], last.step)
    result = element if len(segments) == 1 else f"tl.where(step >= 0, {element}, found)"
    # The step is as wide as what has been taken from it.
    return [*body, f"return {_narrow(result, (*starts, *lengths), names)}"], set(printed.helpers)


def _narrow(text: str, roots: tuple[Node, ...], names: LeafNames) -> str:
    """``text`` in 32 bits: tiles are few, but what is loaded makes bounds that have 64."""
    parts = ranges(roots, names.int_bits, names.from_zero).values()
    return text if all(fits(part) for part in parts) else f"tl.cast({text}, tl.int32)"


def _length(segment: Segment) -> Node:
    """Number of tiles of a segment."""
    span = node(Op.SUB, segment.stop, segment.start)
    if segment.start is const(0):
        span = segment.stop
    span = _steps(span, segment.step)
    if segment.stop is node(Op.ADD, segment.start, const(1)):
        span = const(1)
    else:
        span = node(Op.MAX, span, const(0))
    return span if segment.guard is None else node(Op.WHERE, segment.guard, span, const(0))


def _element(start: str, step: int) -> str:
    offset = "step" if step == 1 else f"step * {step}"
    return offset if start == "0" else f"{start} + {offset}"


def _function(name: str, first: str, doc: str, body: list[str]) -> str:
    return scope_function(name, f"{first}, shift", doc, body)
