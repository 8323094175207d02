"""Live tiles by least and greatest values, from large squares to small ones: never a map.

A square of tiles of which no pair can be live is not looked into. So the work grows with the live
tiles, not with all. It is sound as the bounds are: no tile with a live pair is left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..dense.interpret import evaluate
from .tile_kinds import ends_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attndsl.passes.tiles.intervals import Bounds

    from ..dense.interpret import LeafValues
    from .tile_kinds import Grid

    Ends = Mapping[str, torch.Tensor]

_SIDE = 8
"""Tiles along a side of a square, and such squares along that of the next larger one."""
_SPARSE = 0.25
"""The largest part of all tiles that is looked at so: of more, a map costs less."""


class LiveTiles(NamedTuple):
    """Tiles that are live for some batch entry and head, in no order."""

    rows: torch.Tensor
    """(n,) int64, query tiles."""
    columns: torch.Tensor
    """(n,) int64, key-value tiles."""
    counts: torch.Tensor
    """(n,) int64, for how many of the batch entries and heads that differ they are."""


def live_tiles(
    bounds: Bounds, grid: Grid, outer: tuple[int, int], together: int
) -> Iterator[LiveTiles] | None:
    """The tiles of ``grid`` that ``bounds``, which have no cells, do not find EMPTY; some at once.

    None where so many may be live that a map of all tiles costs less.

    Args:
        bounds: Of the mask.
        grid: At least one tile.
        outer: Batch entries and heads that differ.
        together: How many tiles are looked at together.
    """
    sides = [grid.shape]
    ends: list[tuple[Ends, Ends]] = [ends_of(bounds, grid)]
    while max(sides[-1]) > _SIDE:
        by_row, by_column = ends[-1]
        ends.append((_of_squares(by_row, 2), _of_squares(by_column, 3)))
        sides.append((-(-sides[-1][0] // _SIDE), -(-sides[-1][1] // _SIDE)))
    variables = {name: grid.scope.variables[name][..., None] for name in ("b", "h", "hkv")}
    scope = replace(grid.scope, variables=variables)
    # The largest square holds all tiles of its level.
    found = LiveTiles(*(torch.zeros(1, dtype=torch.int64, device=grid.scope.device),) * 3)
    each = max(1, together // (_SIDE * _SIDE * outer[0] * outer[1]))
    while len(sides) > 1:
        parts = _parts(bounds, scope, (ends.pop(), sides.pop()), outer, (found, each))
        found = LiveTiles(*(torch.cat(x) for x in zip(*parts, strict=True)))
    if len(found.rows) * _SIDE**2 > max(_SIDE**2, _SPARSE * sides[0][0] * sides[0][1]):
        return None
    return _parts(bounds, scope, (ends[0], sides[0]), outer, (found, each))


def _parts(
    bounds: Bounds,
    scope: LeafValues,
    level: tuple[tuple[Ends, Ends], tuple[int, int]],
    outer: tuple[int, int],
    squares: tuple[LiveTiles, int],
) -> Iterator[LiveTiles]:
    """The live tiles in the ``squares``, so many of these at once."""
    found, each = squares
    parts = torch.split(found.rows, each), torch.split(found.columns, each)
    for some in zip(*parts, strict=True):
        yield _inside(bounds, scope, *level, outer, some)


def _of_squares(ends: Ends, dim: int) -> Ends:
    """Least and greatest values of the next larger squares."""
    found = {}
    for name, x in ends.items():
        reduce = torch.amin if name.endswith("_low") else torch.amax
        found[name] = reduce(_in_squares(x, dim), dim + 1)
    return found


def _in_squares(x: torch.Tensor, dim: int) -> torch.Tensor:
    """``x`` with ``dim`` as squares and tiles in them; the last tile stands for those beyond."""
    length = x.shape[dim]
    if length % _SIDE:
        squares = -(-length // _SIDE)
        index = torch.arange(squares * _SIDE, device=x.device).clamp(max=length - 1)
        x = x.index_select(dim, index)
    return torch.unflatten(x, dim, (-1, _SIDE))


def _inside(
    bounds: Bounds,
    scope: LeafValues,
    ends: tuple[Ends, Ends],
    side: tuple[int, int],
    outer: tuple[int, int],
    squares: tuple[torch.Tensor, torch.Tensor],
) -> LiveTiles:
    """The live tiles in some ``squares``, given by row and column."""
    rows, columns = squares
    params = dict(scope.params)
    # (batch, heads, squares, rows of tiles, columns of tiles)
    for name, x in ends[0].items():
        params[name] = _in_squares(x, 2).index_select(2, rows)
    for name, x in ends[1].items():
        chosen = _in_squares(x, 3).index_select(3, columns)
        params[name] = chosen.movedim(2, 3)
    may, must = evaluate((bounds.may, bounds.must), replace(scope, params=params))
    live = (may | must).expand(*outer, len(rows), _SIDE, _SIDE)
    number, i, j = live.flatten(0, 1).any(0).nonzero(as_tuple=True)
    row, column = rows[number] * _SIDE + i, columns[number] * _SIDE + j
    there = (row < side[0]) & (column < side[1])
    number, i, j = number[there], i[there], j[there]
    counts = live[:, :, number, i, j].sum((0, 1))
    return LiveTiles(row[there], column[there], counts)
