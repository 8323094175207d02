"""Kinds of tiles by plain torch, on any device: 0 EMPTY, 1 PARTIAL, 2 FULL.

The same three ways as the kernels' (see :mod:`attndsl.passes.tiles`): closed-form segments written
out, least and greatest values per tile in three-valued logic, and evaluation of the tiles that stay
undecided. Memory is that of the tiles, never of the pairs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attndsl.passes.int_ranges import fits
from attndsl.passes.tiles.tile_plan import EMPTY, FULL, PARTIAL

from ..dense.interpret import LeafValues, evaluate, scope_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attndsl.ir import Node
    from attndsl.passes.tiles.cells import Cell
    from attndsl.passes.tiles.intervals import Bounds
    from attndsl.passes.tiles.sparsity import Sparsity
    from attndsl.passes.tiles.tile_plan import Direction, LoopPlan
    from attndsl.pipeline import Lowered

    from ..base import Call, Scalar

_CHUNKS = {"cpu": 1 << 17}
"""Pairs that are evaluated at a time: on CPUs what fits into a cache."""
_CHUNK = 1 << 22
"""The same on other devices, which want much work at once."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The tiles of one call."""

    scope: LeafValues
    """Leaves of the mask; ``q`` is (1, 1, q_len, 1), ``kv`` is (1, 1, 1, kv_len)."""
    block_m: int
    block_n: int

    @property
    def shape(self) -> tuple[int, int]:
        """Query tiles and key-value tiles."""
        q, kv = self.scope.variables["q"], self.scope.variables["kv"]
        return -(-q.shape[2] // self.block_m), -(-kv.shape[3] // self.block_n)


def grid_of(call: Call, block_m: int, block_n: int) -> Grid:
    """The tiles of ``call``."""
    # The mask's leaves have no use for the score but its dtype and device.
    precision = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    score = torch.zeros((1, 1, 1, 1), dtype=precision, device=call.q.device)
    return Grid(scope_of(call, score), block_m, block_n)


def tile_kinds(lowered: Lowered, call: Call, block_m: int, block_n: int) -> torch.Tensor:
    """Kinds of the tiles of ``call``, sound for every mask; from ``call.tiles`` where it is given.

    Returns:
        int8 (batch or 1, heads or 1, q tiles, kv tiles), on the device of ``call.q``.
    """
    if call.tiles is not None:
        lengths = (call.q.shape[2], call.k.shape[2])
        old = (call.tiles.block_m, call.tiles.block_n)
        return resample(call.tiles.kinds, old, (block_m, block_n), lengths)
    with torch.no_grad():
        return kinds_by_bounds(lowered.sparsity, grid_of(call, block_m, block_n))


def kinds_by_bounds(sparsity: Sparsity, grid: Grid) -> torch.Tensor:
    """Kinds by least and greatest values, then by evaluation where the mask asks for it."""
    shape = _outer(sparsity, grid)
    if sparsity.bounds is None or 0 in shape:
        return torch.full(shape, FULL, dtype=torch.int8, device=grid.scope.device)
    scope, bounds = grid.scope, sparsity.by_cells or sparsity.bounds
    by_row, by_column = ends_of(bounds, grid)
    params = {**scope.params, **by_row, **by_column}
    for number, cell in enumerate(bounds.cells):
        ends = cell_extremes(cell, grid)
        params[f"$cell{number}_low"], params[f"$cell{number}_high"] = ends
    roots = (bounds.may, bounds.must, bounds.sure)
    may, must, sure = evaluate(roots, replace(scope, params=params))
    kinds = may.to(torch.int8) * PARTIAL
    kinds = torch.where(must, FULL, kinds).to(torch.int8).expand(shape).contiguous()
    if sparsity.evaluate:
        assert sparsity.mask is not None
        evaluate_tiles(sparsity.mask, grid, kinds, (kinds == PARTIAL) & ~sure)
    return kinds


def ends_of(bounds: Bounds, grid: Grid) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Least and greatest values in the rows and in the columns of tiles, by the bounds' names.

    Returns:
        Tensors (batch or 1, heads or 1, q tiles, 1), and (batch or 1, heads or 1, 1, kv tiles).
    """
    scope = grid.scope
    found: list[dict[str, torch.Tensor]] = []
    for name, dim, size, values, stem in (
        ("q", 2, grid.block_m, bounds.rows, "row"),
        ("kv", 3, grid.block_n, bounds.columns, "column"),
    ):
        whole = scope.variables[name]
        together = _CHUNKS.get(whole.device.type, whole.shape[dim])
        parts: dict[str, list[torch.Tensor]] = {}
        for part in torch.split(whole, -(-together // size) * size, dim):
            inner = replace(scope, variables={**scope.variables, name: part})
            for number, value in enumerate((part, *evaluate(values, inner))):
                full = value.expand(*value.shape[:dim], part.shape[dim], *value.shape[dim + 1 :])
                label = f"${stem}{number - 1}" if number else f"${name}"
                for end, x in zip(("low", "high"), _extremes(full, dim, size), strict=True):
                    parts.setdefault(f"{label}_{end}", []).append(x)
        found.append({label: torch.cat(some, dim) for label, some in parts.items()})
    return found[0], found[1]


def cell_extremes(cell: Cell, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Tell for each tile whether the condition holds at all pairs, and whether at some.

    Returns:
        Two bool tensors, (batch or 1, heads or 1, q tiles, kv tiles).
    """
    variables = grid.scope.variables
    q = _representatives(variables["q"].flatten(), grid.block_m, cell.q_size)
    kv = _representatives(variables["kv"].flatten(), grid.block_n, cell.kv_size)
    per_pair = variables["b"].numel() * variables["h"].numel() * max(1, kv.numel())
    parts = []
    for rows in torch.split(q, max(1, _CHUNK // max(1, per_pair * q.shape[1]))):
        points = {"q": rows.reshape(1, 1, -1, 1), "kv": kv.reshape(1, 1, 1, -1)}
        scope = replace(grid.scope, variables={**variables, **points})
        (live,) = evaluate((cell.condition,), scope)
        full = live.expand(*live.shape[:2], rows.numel(), kv.numel())
        tiles = torch.unflatten(torch.unflatten(full, 3, kv.shape), 2, rows.shape)
        parts.append((tiles.all(5).all(3), tiles.any(5).any(3)))
    low, high = zip(*parts, strict=True)
    return torch.cat(low, 2), torch.cat(high, 2)


def _representatives(positions: torch.Tensor, block: int, size: int) -> torch.Tensor:
    """One position of each cell that a tile meets; (tiles, most of a tile), some repeated."""
    length = positions.numel()
    tiles = -(-length // block)
    rows = torch.arange(length, device=positions.device)
    tile = rows // block
    cell = torch.zeros_like(positions) if size == 0 else positions // size
    first = (rows % block == 0) | (cell != cell.roll(1))
    chosen = first.nonzero().flatten()
    counts = torch.bincount(tile[chosen], minlength=tiles)
    most = int(counts.max())
    starts = counts.cumsum(0) - counts
    places = starts[:, None] + torch.minimum(
        torch.arange(most, device=positions.device), counts[:, None] - 1
    )
    return positions[chosen[places]]


def wide_ints(call: Call) -> frozenset[str]:
    """Names of the int params and int tensors of ``call`` that may have more than 32 bits."""
    values = {**call.tensors, **call.params}
    return frozenset(name for name, value in values.items() if _is_wide(value))


def _is_wide(value: Scalar | torch.Tensor) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype is torch.int64
    return isinstance(value, int) and not fits((value, value))


def fits_plan(loop: LoopPlan, grid: Grid) -> bool:
    """Return True if all ints of the call are small enough for the closed form of ``loop``."""
    if loop.within is None:
        return True
    return bool(evaluate((loop.within,), grid.scope)[0].all())


def kinds_by_segments(
    loop: LoopPlan, direction: Direction, sparsity: Sparsity, grid: Grid
) -> torch.Tensor:
    """Kinds as the kernels' closed forms have them, the ragged last tiles made exact."""
    shape = _outer(sparsity, grid)
    kinds = torch.full(shape, EMPTY, dtype=torch.int8, device=grid.scope.device)
    if kinds.numel() == 0:
        return kinds
    tiles = segment_kinds(loop, direction, grid, shape[:2])
    view = kinds if direction.along == "kv" else kinds.transpose(2, 3)
    view.copy_(tiles)
    if sparsity.mask is None:
        return kinds.fill_(FULL)
    q_len, kv_len = grid.scope.variables["q"].shape[2], grid.scope.variables["kv"].shape[3]
    edge = torch.zeros_like(kinds, dtype=torch.bool)
    # The closed forms take the owning tiles as whole, and name no ragged tile FULL.
    edge[:, :, -1, :] |= bool(q_len % grid.block_m)
    edge[:, :, :, -1] |= bool(kv_len % grid.block_n)
    evaluate_tiles(sparsity.mask, grid, kinds, edge & (kinds != EMPTY))
    return kinds


def segment_kinds(
    loop: LoopPlan, direction: Direction, grid: Grid, outer: tuple[int, int]
) -> torch.Tensor:
    """Kinds that the segments of ``loop`` give, (batch or 1, heads or 1, own tiles, tiles along).

    Raises:
        RuntimeError: A tile is in two segments (a defect of the plan).
    """
    rows, columns = grid.shape if direction.own == "q" else grid.shape[::-1]
    device = grid.scope.device
    kinds = torch.zeros((*outer, rows, columns), dtype=torch.int8, device=device)
    steps = torch.arange(columns, device=device)
    for kind, step, start, stop, guard in segment_ranges(loop, direction, grid):
        inside = (steps >= start) & (steps < stop) & ((steps - start) % step == 0)
        if guard is not None:
            inside = inside & guard
        inside = inside.expand(kinds.shape)
        if bool((kinds[inside] != EMPTY).any()):
            raise RuntimeError("a tile is in two segments of its plan")
        kinds[inside] = kind
    return kinds


def segment_counts(
    loop: LoopPlan, direction: Direction, grid: Grid, outer: tuple[int, int]
) -> Counter[int]:
    """Numbers of tiles that :func:`segment_kinds` would make FULL and PARTIAL, in memory of a row.

    No positions of ``grid`` are used but the first; lengths are those of its sizes.
    """
    counts: Counter[int] = Counter()
    rows, columns = _sides(direction, grid)
    if 0 in (rows, columns):
        return counts
    for kind, step, start, stop, guard in segment_ranges(loop, direction, grid):
        length = ((stop - start + step - 1) // step).clamp(min=0)
        if guard is not None:
            length = length * guard
        counts[kind] += int(length.expand(*outer, rows, 1).sum())
    return counts


def segment_ranges(
    loop: LoopPlan, direction: Direction, grid: Grid
) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
    """Kind, step, start, stop and guard of each segment; (batch or 1, heads or 1, own tiles, 1)."""
    rows, columns = _sides(direction, grid)
    block = grid.block_n if direction.along == "kv" else grid.block_m
    length = grid.scope.sizes[f"{direction.along}_len"]
    device = grid.scope.device
    scope = replace(
        grid.scope,
        params={
            **grid.scope.params,
            "$tile": torch.arange(rows, device=device).reshape(1, 1, rows, 1),
            "$tiles": torch.full((1, 1, 1, 1), columns, device=device),
            "$whole": torch.full((1, 1, 1, 1), length // block, device=device),
            "$q_offset": grid.scope.variables["q"][:, :, :1],
            "$kv_offset": grid.scope.variables["kv"][..., :1],
        },
    )
    for kind, segments in ((FULL, loop.full), (PARTIAL, loop.partial)):
        for segment in segments:
            start, stop = evaluate((segment.start, segment.stop), scope)
            guard = None if segment.guard is None else evaluate((segment.guard,), scope)[0]
            yield kind, segment.step, start, stop, guard


def _sides(direction: Direction, grid: Grid) -> tuple[int, int]:
    """Owning tiles, and tiles along."""
    sizes = grid.scope.sizes
    sides = -(-sizes["q_len"] // grid.block_m), -(-sizes["kv_len"] // grid.block_n)
    return sides if direction.own == "q" else sides[::-1]


def resample(
    kinds: torch.Tensor, old: tuple[int, int], new: tuple[int, int], lengths: tuple[int, int]
) -> torch.Tensor:
    """``kinds`` for tiles of another size: a tile takes from all the old ones that it meets.

    Sound for any sizes, and exact where the new ones are multiples of the old.

    Args:
        kinds: int8 (batch or 1, heads or 1, q tiles, kv tiles).
        old: Rows and columns of its tiles.
        new: Those wanted.
        lengths: q_len and kv_len.
    """
    for dim, before, after, length in zip((2, 3), old, new, lengths, strict=True):
        if before == after:
            continue
        tiles = -(-length // after)
        first = torch.arange(tiles, device=kinds.device) * after
        last = (first + after).clamp(max=length) - 1
        least = most = None
        for step in range((after - 2) // before + 2):
            place = (first // before + step).minimum(last // before)
            part = kinds.index_select(dim, place)
            least = part if least is None else torch.minimum(least, part)
            most = part if most is None else torch.maximum(most, part)
        assert least is not None
        assert most is not None
        # Equal kinds stay; FULL beside anything else, and PARTIAL beside anything, are PARTIAL.
        kinds = torch.where(least == most, least, PARTIAL).to(torch.int8)
    return kinds.contiguous()


def evaluate_tiles(mask: Node, grid: Grid, kinds: torch.Tensor, chosen: torch.Tensor) -> None:
    """Write the exact kinds of the ``chosen`` tiles into ``kinds``.

    Args:
        mask: BOOL, independent of the score.
        grid: The tiles.
        kinds: (batch or 1, heads or 1, q tiles, kv tiles), written to.
        chosen: Bool, of the same shape.
    """
    where = chosen.nonzero()
    if not where.numel():
        return
    chunk = _CHUNKS.get(where.device.type, _CHUNK)
    for part in torch.split(where, max(1, chunk // (grid.block_m * grid.block_n))):
        live, there = _tile_masks(mask, grid, part)
        some = (live & there).flatten(1).any(1)
        every = (live | ~there).flatten(1).all(1)
        kinds[tuple(part.T)] = (some.to(torch.int8) + (some & every).to(torch.int8)) * PARTIAL


def _tile_masks(mask: Node, grid: Grid, tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mask of ``tiles`` (n, 4), and which pairs exist: bool (n, block_m, block_n) each."""
    scope = grid.scope
    b, h, i, j = (column.reshape(-1, 1, 1, 1) for column in tiles.T)
    rows = i * grid.block_m + torch.arange(grid.block_m, device=scope.device).reshape(1, 1, -1, 1)
    columns = j * grid.block_n + torch.arange(grid.block_n, device=scope.device)
    q, kv = scope.variables["q"].flatten(), scope.variables["kv"].flatten()
    there = (rows < q.numel()) & (columns < kv.numel())
    group = max(1, scope.sizes["heads"] // max(1, scope.sizes["kv_heads"]))
    variables: Mapping[str, torch.Tensor] = {
        "b": b,
        "h": h,
        "hkv": h // group,
        "q": q[rows.clamp(max=q.numel() - 1)],
        "kv": kv[columns.clamp(max=kv.numel() - 1)],
    }
    (live,) = evaluate((mask,), replace(scope, variables=variables))
    return live.expand(there.shape)[:, 0], there[:, 0]


def _extremes(values: torch.Tensor, dim: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest of each ``block`` along ``dim``; everything where a NaN is among them."""
    length = values.shape[dim]
    tiles = -(-length // block)
    if length % block:
        index = torch.arange(tiles * block, device=values.device).clamp(max=length - 1)
        values = values.index_select(dim, index)
    blocks = torch.unflatten(values, dim, (tiles, block))
    low, high = torch.aminmax(blocks, dim=dim + 1)
    if values.is_floating_point():
        strange = blocks.isnan().any(dim + 1)
        low = low.masked_fill(strange, -torch.inf)
        high = high.masked_fill(strange, torch.inf)
    return low, high


def _outer(sparsity: Sparsity, grid: Grid) -> tuple[int, int, int, int]:
    sizes = grid.scope.sizes
    return (*sparsity.maps(sizes["batch"], sizes["heads"]), *grid.shape)
