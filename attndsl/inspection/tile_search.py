"""Tiles of a program at given lengths: found, and checked against the mask itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attndsl.backends.base import TileKinds
from attndsl.backends.dense.interpret import LeafValues, evaluate, scope_of
from attndsl.backends.tiled.tile_kinds import (
    fits_plan,
    grid_of,
    kinds_by_bounds,
    kinds_by_segments,
    segment_counts,
    segment_kinds,
    wide_ints,
)
from attndsl.call.call_slice import plain_int
from attndsl.errors import ArgumentError, PlanError, UnsupportedError
from attndsl.ir import reads_score
from attndsl.passes.int_ranges import POSITION_LIMIT
from attndsl.passes.tiles.tile_plan import BACKWARD_KV, BACKWARD_Q, EMPTY, FORWARD, FULL, PARTIAL
from attndsl.settings import asks_to_verify

from .tilemap import TileMap

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.backends.base import Call
    from attndsl.backends.tiled.tile_kinds import Grid
    from attndsl.passes.tiles.tile_plan import Direction, LoopPlan
    from attndsl.pipeline import Lowered

_DIRECTIONS = {
    "forward": FORWARD,
    "backward": BACKWARD_KV,
    "backward_kv": BACKWARD_KV,
    "backward_q": BACKWARD_Q,
}
_MOST_TILES = 1 << 31
"""Tiles of a map: a byte each."""
_MOST_COUNTED = 1 << 29
"""Tiles of a map that are looked at one by one to be counted: see M21 in docs/dev/measured.md."""
_MOST_EVALUATED = 1 << 17
"""The same where all of their pairs are looked at: see M21 in docs/dev/measured.md."""
_TILES_AT_ONCE = 1 << 22
"""Tiles whose kinds are found together to be counted."""
_EDGE_PAIRS = 1 << 25
"""Pairs in the last row and column of tiles that are looked at one by one to be counted."""
_ROWS_AT_ONCE = 1 << 24
"""Pairs whose mask is computed together while a plan is checked."""
_CHECKED_TILES = {"forward": (128, 64), "backward_q": (128, 64), "backward_kv": (64, 128)}
"""Tiles to check a plan with: of the shape that kernels of the direction use."""


def find_tiles(
    lowered: Lowered, call: Call, block_m: int, block_n: int, direction: str, exact: bool = False
) -> TileMap:
    """The tiles of ``call``, by closed form where there is one.

    With ``exact``, all tiles that bounds leave undecided are evaluated pair by pair. The mask must
    not depend on the score then.

    Raises:
        ArgumentError: A tile size below 1, an unknown direction, or more tiles than a map may have.
    """
    block_m, block_n = plain_int(block_m), plain_int(block_n)
    which = direction_named(direction)
    rows, columns = sides_of(call, block_m, block_n)
    number = rows * columns
    if number > _MOST_TILES:
        raise ArgumentError(
            f"the map would have {number} tiles",
            hint="use larger block_m and block_n, or shorter lengths: calls need no map",
        )
    sparsity, grid = lowered.sparsity, grid_of(call, block_m, block_n)
    sparsity = replace(sparsity, evaluate=sparsity.evaluate or exact)
    with torch.no_grad():
        loop = loop_of(lowered, call, which, block_m, block_n)
        if loop.listed is None and fits_plan(loop, grid):
            kinds = kinds_by_segments(loop, which, sparsity, grid)
            reason = "in closed form"
        else:
            kinds = kinds_by_bounds(sparsity, grid)
            ways = "least and greatest values" + (" and evaluation" if sparsity.evaluate else "")
            reason = f"by {ways}: {loop.listed or 'an int has more than 32 bits'}"
    return TileMap(
        kinds, call.q.shape[2], call.k.shape[2], block_m, block_n, reason, _mask_mod(lowered, call)
    )


def kinds_by_pairs(lowered: Lowered, call: Call, block_m: int, block_n: int) -> torch.Tensor:
    """Kinds of the tiles of ``call`` from the mask of all pairs.

    Slower than :func:`find_tiles`, but its work does not depend on values, so that a CUDA graph can
    hold it.

    Returns:
        int8 (batch or 1, heads or 1, q tiles, kv tiles), as of :class:`~.tilemap.TileMap`.
    """
    sides_of(call, block_m, block_n)
    with torch.no_grad():
        return _true_kinds(lowered, call, grid_of(call, block_m, block_n))


@dataclass(frozen=True, slots=True)
class TileCounts:
    """Numbers of tiles in the forward's loop, over all batch entries and heads that differ."""

    rows: int
    """Query tiles of one of them."""
    columns: int
    """Key-value tiles of one."""
    total: int
    full: int
    partial: int


def count_tiles(lowered: Lowered, call: Call, block_m: int, block_n: int) -> TileCounts:
    """The tiles of ``call``, in memory of the lengths.

    The ragged last tiles of long calls are as the loops have them: FULL ones count as PARTIAL, and
    in each row of tiles one may be visited that has no live pair within the lengths.

    Raises:
        ArgumentError: A tile size below 1, or lengths beyond what positions are counted in.
        UnsupportedError: There are too many tiles to look at each, and no closed form.
    """
    sparsity = lowered.sparsity
    batch, heads = sparsity.maps(call.q.shape[0], call.q.shape[1])
    block_m, block_n = plain_int(block_m), plain_int(block_n)
    rows, columns = sides_of(call, block_m, block_n)
    total = batch * heads * rows * columns
    loop = loop_of(lowered, call, FORWARD, block_m, block_n)
    with torch.no_grad():
        if loop.listed is not None:
            if total > (_MOST_EVALUATED if sparsity.evaluate else _MOST_COUNTED):
                raise UnsupportedError(
                    f"there are {total} tiles, and no closed form: {loop.listed}",
                    hint="ask with larger block_m and block_n, or shorter lengths",
                )
            grid = grid_of(call, block_m, block_n)
            together = max(1, _TILES_AT_ONCE * rows // max(1, total))
            parts = (rows_of(grid, first, together) for first in range(0, rows, together))
            counts = sum((_counts(kinds_by_bounds(sparsity, part)) for part in parts), Counter())
        elif total <= _TILES_AT_ONCE and (rows + columns) * block_m * block_n <= _EDGE_PAIRS:
            grid = grid_of(call, block_m, block_n)
            counts = _counts(kinds_by_segments(loop, FORWARD, sparsity, grid))
        else:
            # Positions take 8 bytes each, and of these the first is needed.
            first_row = call._replace(q=call.q[:, :, :1], k=call.k[:, :, :1])
            grid = grid_of(first_row, block_m, block_n)
            counts = segment_counts(loop, FORWARD, grid, (batch, heads))
    return TileCounts(rows, columns, total, counts[FULL], counts[PARTIAL])


def loop_of(
    lowered: Lowered, call: Call, direction: Direction, block_m: int, block_n: int
) -> LoopPlan:
    """The loop of a direction over tiles of these sizes."""
    return lowered.sparsity.loop(
        direction, block_m, block_n, call.shifted, call.indexed, wide_ints(call)
    )


def _counts(kinds: torch.Tensor) -> Counter[int]:
    return Counter({kind: int((kinds == kind).sum()) for kind in (FULL, PARTIAL)})


def sides_of(call: Call, block_m: int, block_n: int) -> tuple[int, int]:
    """Query tiles and key-value tiles, where there may be such tiles."""
    for name, size in (("block_m", block_m), ("block_n", block_n)):
        if not isinstance(size, int) or size < 1:
            raise ArgumentError(f"{name} is {size!r}", hint="pass a whole number, 1 or more")
    lengths = call.q.shape[2], call.k.shape[2]
    if max(lengths) >= POSITION_LIMIT:
        raise ArgumentError(
            f"there are {lengths[0]} queries and {lengths[1]} keys",
            hint=f"use lengths below {POSITION_LIMIT}",
        )
    return -(-lengths[0] // block_m), -(-lengths[1] // block_n)


def given_tiles(
    lowered: Lowered, call: Call, tiles: TileMap | None, device: torch.device | None = None
) -> TileKinds | None:
    """A caller's map for ``call``, on its device.

    Raises:
        ArgumentError: It is no map, or of other sizes.
    """
    if tiles is None:
        return None
    _check_is_map(tiles)
    sizes = call.sizes
    wanted = lowered.sparsity.maps(sizes["batch"], sizes["heads"])
    lengths = sizes["q_len"], sizes["kv_len"]
    if tiles.kinds.shape[:2] != wanted or (tiles.q_len, tiles.kv_len) != lengths:
        raise ArgumentError(
            f"tiles is a map of {tiles.q_len} x {tiles.kv_len} pairs for "
            f"{tuple(tiles.kinds.shape[:2])} batch entries and heads, and the call has "
            f"{lengths[0]} x {lengths[1]} for {wanted}",
            hint="make it with the call's own sizes",
        )
    kinds = tiles.kinds.to(call.q.device if device is None else device)
    return TileKinds(kinds, tiles.block_m, tiles.block_n)


def _check_is_map(tiles: object) -> None:
    if not isinstance(tiles, TileMap):
        raise ArgumentError(
            f"tiles is a {type(tiles).__name__}", hint="pass what Attention.tiles(...) gives"
        )


def tiles_key(tiles: TileMap | None) -> object:
    """Key of a caller's map: the shape and lengths that validation looks at.

    Raises:
        ArgumentError: It is no map.
    """
    if tiles is None:
        return None
    _check_is_map(tiles)
    return tiles.kinds.shape, tiles.q_len, tiles.kv_len


def direction_named(name: str) -> Direction:
    """One of the loops, by its name.

    Raises:
        ArgumentError: There is none of that name.
    """
    if name not in _DIRECTIONS:
        raise ArgumentError(f"there is no direction {name!r}", hint=f"use {', '.join(_DIRECTIONS)}")
    return _DIRECTIONS[name]


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a successful check of a program's tiles."""

    tiles: int
    """Tiles compared with the mask itself."""
    live: int
    """Tiles with a live pair among these."""
    surplus: int
    """Tiles that would be visited though no pair is live, or masked though all are: sound."""

    def __str__(self) -> str:
        return (
            f"{self.tiles} tiles checked against the mask, {self.live} of them live; "
            f"{self.surplus} treated with more care than needed"
        )

    __repr__ = __str__


def verify_if_asked(lowered: Lowered, call: Call) -> None:
    """Run :func:`verify_call` on tiles that kernels use, where the settings ask for it."""
    if asks_to_verify() and not needs_score(lowered):
        for direction, size in _CHECKED_TILES.items():
            verify_call(lowered, call, *size, direction)


def verify_call(
    lowered: Lowered, call: Call, block_m: int, block_n: int, direction: str
) -> Verification:
    """Compare the plan of one loop with the mask, pair by pair.

    Raises:
        PlanError: A live pair is left out, a FULL tile has a dead one, or a plan that is to be
            exact is not.
    """
    block_m, block_n = plain_int(block_m), plain_int(block_n)
    sparsity, which = lowered.sparsity, direction_named(direction)
    if needs_score(lowered):
        raise UnsupportedError(
            "the mask depends on the score, so that its tiles cannot be checked without q and k",
            None if sparsity.mask is None else sparsity.mask.span,
            "compare outputs with backend='reference' instead",
        )
    grid = grid_of(call, block_m, block_n)
    with torch.no_grad():
        true = _true_kinds(lowered, call, grid)
        loop = loop_of(lowered, call, which, block_m, block_n)
        found = find_tiles(lowered, call, block_m, block_n, direction).kinds
        exact = loop.listed is None or sparsity.evaluate
        _compare(found, true, exact, lowered, f"tile map of {direction}")
        used = found
        if loop.listed is None and used.numel():
            used = segment_kinds(loop, which, grid, (used.shape[0], used.shape[1]))
            used = used if which.along == "kv" else used.transpose(2, 3)
            _compare(used, true, False, lowered, f"loops of {direction}")
    return Verification(true.numel(), int((true != EMPTY).sum()), int((used != true).sum()))


def _true_kinds(lowered: Lowered, call: Call, grid: Grid) -> torch.Tensor:
    """Kinds by the mask of all pairs, some rows of tiles at a time."""
    sparsity, (rows, columns) = lowered.sparsity, grid.shape
    batch, heads = sparsity.maps(call.q.shape[0], call.q.shape[1])
    mask, kv_len = sparsity.mask, call.k.shape[2]
    shape = (batch, heads, rows, columns)
    if mask is None or 0 in shape:
        return torch.full(shape, FULL, dtype=torch.int8, device=call.q.device)
    together = max(1, _ROWS_AT_ONCE // (max(1, batch * heads * kv_len) * grid.block_m))
    kinds = []
    for first in range(0, rows, together):
        scope = rows_of(grid, first, together).scope
        (live,) = evaluate((mask,), scope)
        live = live.expand(batch, heads, scope.variables["q"].shape[2], kv_len)
        some = _pool(live, grid)
        every = ~_pool(~live, grid)
        kinds.append((some.to(torch.int8) + (some & every)) * PARTIAL)
    return torch.cat(kinds, 2)


def rows_of(grid: Grid, first: int, count: int) -> Grid:
    """``count`` rows of tiles from the one at ``first``."""
    variables = grid.scope.variables
    part = variables["q"][:, :, first * grid.block_m : (first + count) * grid.block_m]
    return replace(grid, scope=replace(grid.scope, variables={**variables, "q": part}))


def _pool(pairs: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Reduce pairs to tiles: True for a tile of which any pair holds."""
    for dim, block in ((3, grid.block_n), (2, grid.block_m)):
        rest = -pairs.shape[dim] % block
        if rest:
            shape = [*pairs.shape]
            shape[dim] = rest
            pairs = torch.cat([pairs, pairs.new_zeros(shape)], dim)
        pairs = torch.unflatten(pairs, dim, (-1, block)).any(dim + 1)
    return pairs


def _compare(
    found: torch.Tensor, true: torch.Tensor, exact: bool, lowered: Lowered, what: str
) -> None:
    wrong = (
        found != true
        if exact
        else ((found == EMPTY) & (true != EMPTY)) | ((found == FULL) & (true != FULL))
    )
    if not bool(wrong.any()):
        return
    b, h, row, column = (int(n) for n in wrong.nonzero()[0])
    names = {EMPTY: "EMPTY", PARTIAL: "PARTIAL", FULL: "FULL"}
    place = (b, h, row, column)
    raise PlanError(
        f"the {what} calls tile ({row}, {column}) of batch entry {b}, head {h} "
        f"{names[int(found[place])]}, and by the mask it is {names[int(true[place])]}",
        lowered.sparsity.mask.span if lowered.sparsity.mask is not None else None,
        "this is a defect of attndsl: report the program, the lengths and the tile sizes; "
        "backend='reference' looks at every pair",
    )


def needs_score(lowered: Lowered) -> bool:
    """Return True if the mask depends on the score."""
    return reads_score(lowered.sparsity.mask)


def _mask_mod(lowered: Lowered, call: Call) -> Callable[..., torch.Tensor] | None:
    """The mask as a function of 0-d int tensors b, h, q and kv, physical rows."""
    mask = lowered.sparsity.mask
    if needs_score(lowered):
        return None
    scope = scope_of(call, torch.zeros((1, 1, 1, 1), device=call.q.device))
    group = max(1, call.q.shape[1] // max(1, call.k.shape[1]))

    def logical(
        row: torch.Tensor, offset: int | torch.Tensor, index: torch.Tensor | None
    ) -> torch.Tensor:
        return row + offset if index is None else index[row]

    def mask_mod(
        b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor
    ) -> torch.Tensor:
        if mask is None:
            return q_idx >= 0
        variables = {"b": b, "h": h, "hkv": h // group}
        variables["q"] = logical(q_idx, call.q_offset, call.q_index)
        variables["kv"] = logical(kv_idx, call.kv_offset, call.kv_index)
        shaped = {name: value.reshape(1, 1, 1, 1) for name, value in variables.items()}
        inner = LeafValues(shaped, scope.sizes, scope.params, scope.tensors, scope.score)
        (live,) = evaluate((mask,), inner)
        return live.reshape(())

    return mask_mod
