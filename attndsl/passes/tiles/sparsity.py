"""Ways to find the tiles of a mask, one for each of its atoms, before tile sizes are known.

There are four ways, in order of preference. Integer sets: the whole mask is quasi-affine, and its
tiles have a closed form. Summaries: least and greatest values in a tile decide the atom. Cells:
the atom is evaluated once for each pair of blocks of positions. Evaluation: it is evaluated pair by
pair, in tiles that stay undecided. An atom that depends
on the score cannot be decided before the score is known: its tiles stay PARTIAL.

Needs no isl, so that a start from the cache does not import it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from attndsl.ir import Op, const, dependencies, leaf_names, node
from attndsl.passes.evaluate import Environment, evaluate

from .affine import guard_of, why_not_affine
from .cells import cells_of
from .closed_form import NoClosedForm, closed_segments, live_segments
from .intervals import SCORE_DEPENDENT, Bounds, bound_mask
from .mask_bounds import lower, upper
from .tile_plan import FORWARD, LoopPlan, guarded

if TYPE_CHECKING:
    from attndsl.ir import Node, Program

    from .cells import Cell
    from .tile_plan import Direction, Segment

_MANY = 64
"""Tiles of lengths that plans are looked at with, over the other side of a tile."""
_SAMPLES = 16
"""Query tiles looked at for rows that visit fewer: so many first ones, and some in the middle."""
SETS, SUMMARIES, EVALUATION, SCORES = "integer sets", "summaries", "evaluation", "the score"
CELLS = "cells"


@dataclass(frozen=True, slots=True)
class Atom:
    """A part of the mask without ``and``, ``or``, ``not``."""

    condition: Node
    way: str
    """``integer sets``, ``summaries``, ``cells``, ``evaluation`` or ``the score``."""
    reason: str
    """Reason why no earlier way is used; empty for integer sets."""


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Plan to find the tiles of a program."""

    mask: Node | None
    plain: bool
    """True if the score is ``scale * (q . k)`` itself."""
    not_affine: str | None
    """Reason why the mask is not quasi-affine; None where it is (or there is none)."""
    bounds: Bounds | None
    evaluate: bool
    """True if tiles that bounds leave undecided are evaluated."""
    by_batch: bool
    by_head: bool
    atoms: tuple[Atom, ...] = ()
    by_cells: Bounds | None = None
    """Tighter bounds, which evaluate conditions by cells; :attr:`bounds` where none has cells."""

    def maps(self, batch: int, heads: int) -> tuple[int, int]:
        """Numbers of batch entries and heads of which the tiles may differ: all, or 1."""
        return (batch if self.by_batch else 1), (heads if self.by_head else 1)

    def loop(
        self, direction: Direction, block_m: int, block_n: int, shifted: bool, indexed: bool,
        wide: frozenset[str] = frozenset(), bounded: bool = False,
    ) -> LoopPlan:  # fmt: skip
        """The plan of one loop at one tile size.

        Args:
            direction: Which loop.
            block_m: Query rows of a tile.
            block_n: Key rows of a tile.
            shifted: Whether the call gives offsets.
            indexed: Whether the call gives ``q_index`` or ``kv_index``.
            wide: Names of the int params and int tensors that may have more than 32 bits.
            bounded: Whether formulas that bound the mask's tiles from both sides take the place of
                lists. A condition that they do not decide leaves tiles PARTIAL.
        """
        sandwiched = bounded and self.mask is not None and self.not_affine is not None
        if self.mask is not None and self.not_affine is not None and not bounded:
            return LoopPlan(listed=self.not_affine)
        if self.mask is not None and indexed:
            return LoopPlan(listed="positions are looked up in q_index or kv_index")
        mask = const(True) if self.mask is None else self.mask
        sure = lower(mask) if sandwiched else None
        mask = upper(mask) if sandwiched else mask
        both = mask if sure is None else node(Op.AND, mask, sure)
        wide = wide & leaf_names(both)
        blocks = {"q": block_m, "kv": block_n}
        own, along = blocks[direction.own], blocks[direction.along]
        # Rows beyond the length have weights of 0, unless a score expression makes NaN of zeros.
        ragged_full = direction.along == "q" and self.plain
        try:
            full, partial = closed_segments(
                mask,
                (direction.own, own),
                (direction.along, along),
                shifted,
                ragged_full,
                wide,
                sure,
            )
        except NoClosedForm as reason:
            return LoopPlan(listed=str(reason))
        found = LoopPlan(full, partial)
        first, last = (_visited(found, own, along, _MANY, end) for end in (0.0, 1.0))
        middle, twice = (_visited(found, own, along, scale, 0.5) for scale in (_MANY, 2 * _MANY))
        found = replace(found, descending=last > first, short=middle == twice)
        return guarded(found, guard_of(both, wide).within)

    def loop_in_turn(
        self, direction: Direction, block_m: int, block_n: int, shifted: bool, indexed: bool,
        wide: frozenset[str] = frozenset(), peeled: bool = True,
    ) -> LoopPlan:  # fmt: skip
        """The plan of a loop whose owners take turns at each tile along it, with ``visitors``.

        Owners begin in their own order, from the last one on where the plan is ``descending``, and
        each waits for those before it. Nobody waits long where all go along the loop against that
        order. So FULL tiles are between PARTIAL ones or on one side of them; in any other plan all
        tiles are PARTIAL.

        Args:
            direction: As of :meth:`loop`, and so are all others but the last.
            block_m: Likewise.
            block_n: Likewise.
            shifted: Likewise.
            indexed: Likewise.
            wide: Likewise.
            peeled: Whether FULL tiles have a loop of their own.
        """
        found = self.loop(direction, block_m, block_n, shifted, indexed, wide)
        if found.listed is not None:
            return found
        mask = const(True) if self.mask is None else self.mask
        wide = wide & leaf_names(mask)
        blocks = {"q": block_m, "kv": block_n}
        own, along = ((name, blocks[name]) for name in (direction.own, direction.along))
        within = guard_of(mask, wide).within
        try:
            visitors = live_segments(mask, along, own, shifted, wide)
            if not _goes_on(found, own[1], along[1], peeled, False):
                found = replace(found, two_sided=True)
                if not _goes_on(found, own[1], along[1], peeled, True):
                    visited = LoopPlan(partial=live_segments(mask, own, along, shifted, wide))
                    partial = guarded(visited, within).partial
                    found = replace(found, full=(), partial=partial, two_sided=False)
        except NoClosedForm as reason:
            return LoopPlan(listed=str(reason))
        return replace(found, visitors=guarded(LoopPlan(partial=visitors), within).partial)

    def loop_of_rows(
        self, block_m: int, rows: int, block_n: int, shifted: bool, indexed: bool,
        wide: frozenset[str] = frozenset(),
    ) -> LoopPlan | None:  # fmt: skip
        """The forward's plan for ``rows`` of each query tile's ``block_m``.

        None where there is no closed form, or all rows of the tiles looked at visit the same.
        """
        if self.mask is None:
            return None
        whole, part = (
            self.loop(FORWARD, own, block_n, shifted, indexed, wide) for own in (block_m, rows)
        )
        if whole.listed is not None or part.listed is not None:
            return None
        length, parts = _MANY * block_m * block_n, block_m // rows
        middle = _MANY * block_n // 2
        for tile in (*range(_SAMPLES), *range(middle, middle + _SAMPLES)):
            all_rows = _count(whole, tile, length, block_n)
            for place in range(tile * parts, (tile + 1) * parts):
                if _count(part, place, length, block_n) < all_rows:
                    return part
        return None

    def work(self, direction: Direction, shifted: bool, indexed: bool) -> str:
        """The kind of the loop, for the choice of tile sizes (see the backends' tables)."""
        if self.mask is None:
            return "dense"
        loop = self.loop(direction, 128, 128, shifted, indexed)
        if loop.listed is not None:
            return "short partial"
        if not loop.short:
            return "masked"
        return "short" if loop.full else "short partial"

    def visited(self, direction: Direction, shifted: bool, indexed: bool) -> int | None:
        """Number of tiles of 128 that one of 128 visits in long sequences, where it does not grow.

        Params that are given at the call are taken to be 1024.
        """
        if self.mask is None:
            return None
        loop = self.loop(direction, 128, 128, shifted, indexed)
        if loop.listed is not None or not loop.short:
            return None
        return _visited(loop, 128, 128, _MANY, 0.5)


def _visited(loop: LoopPlan, own: int, along: int, scale: int, place: float) -> int:
    """Tiles that one of many owning tiles visits, the first (0.0), the last (1.0), or between."""
    length = scale * own * along
    return _count(loop, int((length // own - 1) * place), length, along)


def _goes_on(loop: LoopPlan, own: int, along: int, peeled: bool, two_sided: bool) -> bool:
    """Return True if owners go one way along the loop, against their order.

    FULL tiles come first, then PARTIAL ones; where ``two_sided``, PARTIAL ones before and behind
    them. Some owners in the middle of a long loop are looked at, with a ragged last tile and
    without.
    """
    if not loop.full or not loop.partial:
        return True
    length, middle = _MANY * own * along, _MANY * along // 2
    way = 1 if loop.descending else -1
    for tile in range(middle, middle + _SAMPLES):
        for ragged in (False, True):
            full, partial = (
                _indices(segments, tile, length, along, ragged)[::way]
                for segments in (loop.full, loop.partial)
            )
            ahead = 0
            if two_sided and full:
                ahead = sum(way * index < way * min(full) for index in partial)
            visited = [*partial[:ahead], *full, *partial[ahead:]]
            if visited != sorted(visited, reverse=way < 0) or (full and not peeled):
                return False
    return True


def _count(loop: LoopPlan, tile: int, length: int, along: int) -> int:
    """Tiles that owning tile number ``tile`` visits, where both lengths are ``length``."""
    return sum(map(len, _ranges((*loop.full, *loop.partial), tile, length, along)))


def _indices(
    segments: tuple[Segment, ...], tile: int, length: int, along: int, ragged: bool
) -> list[int]:
    """The tiles of ``segments`` that owning tile number ``tile`` visits, in their order."""
    return list(chain(*_ranges(segments, tile, length, along, ragged)))


def _ranges(
    segments: tuple[Segment, ...], tile: int, length: int, along: int, ragged: bool = False
) -> list[range]:
    """``segments`` of owning tile number ``tile``, where both lengths are ``length``.

    ``ragged``: behind it there is another tile along the loop, which is not whole.
    """
    tiles = length // along
    lengths = ("q_len", "kv_len", "whole_q_len", "whole_kv_len")
    names = {"$tile": tile, "$tiles": tiles + ragged, "$whole": tiles}
    names |= dict.fromkeys(lengths, length)
    begins = dict.fromkeys(("$q_offset", "$kv_offset", "q_start", "kv_start"), 0)
    entries = {"q_starts": 0, "kv_starts": 0, "kv_lengths": length}
    known = Environment(_Guess(names | begins), lambda name, at: entries.get(name, 1024))
    found = []
    for segment in segments:
        if segment.guard is None or evaluate(segment.guard, known):
            start, stop = (int(evaluate(bound, known)) for bound in (segment.start, segment.stop))
            found.append(range(start, stop, segment.step))
    return found


class _Guess(dict[str, bool | int | float]):
    """Values of names; what only calls know is taken to be some middling number.

    What calls of parts add to programs (:mod:`attndsl.passes.sub_program`) is that of long wholes.
    """

    def __missing__(self, name: str) -> int:
        return 1024


def analyse(program: Program) -> Sparsity:
    """The sparsity of the mask of ``program``, for every length and tile size."""
    mask = program.mask
    plain = program.score.op is Op.SCORE and program.weights is None
    if mask is None:
        return Sparsity(None, plain, None, None, False, False, False)
    deps = dependencies(mask)[mask]
    not_affine = why_not_affine(mask)
    bounds = bound_mask(mask)
    score = SCORE_DEPENDENT in bounds.opaque
    cells = cells_of(mask)
    atoms = tuple(_atom(item, cells.get(item)) for item in _conditions(mask))
    # Conditions that may each hold somewhere in a tile may hold together at no pair.
    pairs = [a for a in atoms if {"q", "kv"} <= dependencies(a.condition)[a.condition]]
    correlated = sum(atom.way == SUMMARIES for atom in pairs) > 1
    return Sparsity(
        mask,
        plain,
        not_affine,
        bounds,
        # A quasi-affine mask without a closed form is to be as exact as one with it.
        evaluate=not score and (bool(bounds.opaque) or not_affine is None or correlated),
        by_batch="b" in deps,
        by_head="h" in deps,
        atoms=atoms,
        by_cells=bound_mask(mask, cells) if cells else bounds,
    )


def _conditions(mask: Node) -> list[Node]:
    found: dict[Node, None] = {}
    joined: set[Node] = set()
    stack = [mask]
    while stack:
        item = stack.pop()
        if item.op not in (Op.AND, Op.OR, Op.NOT):
            found[item] = None
        elif item not in joined:
            joined.add(item)
            stack += reversed(item.args)
    return list(found)


def _atom(condition: Node, cell: Cell | None) -> Atom:
    reason = why_not_affine(condition)
    if reason is None:
        return Atom(condition, SETS, "")
    opaque = bound_mask(condition).opaque
    if SCORE_DEPENDENT in opaque:
        return Atom(condition, SCORES, SCORE_DEPENDENT)
    if opaque and cell is not None:
        size = f"{cell.q_size} queries x {cell.kv_size} keys have one value"
        return Atom(condition, CELLS, size)
    if opaque:
        return Atom(condition, EVALUATION, opaque[0])
    return Atom(condition, SUMMARIES, reason)
