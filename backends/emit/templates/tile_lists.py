"""Kinds of tiles (0 EMPTY, 1 PARTIAL, 2 FULL) and the lists that attention kernels loop over.

1. Least and greatest values of the program's row and column expressions, a tile of positions each.
2. Kinds by three-valued logic over these bounds. Conditions that are constant over cells of pairs
   are evaluated once a cell.
3. Kinds by evaluation of all pairs, in tiles that stay undecided.
4. Lists: the FULL tiles of each owning tile from the front, the PARTIAL ones from the back.

A map is one (own tiles, tiles along) matrix; there is one a batch entry and head where the mask
depends on them.
"""
# ruff: noqa: F821

from typing import NamedTuple

import triton
import triton.language as tl

from attndsl.backends.device.records import Extremes, Head, Origins, Place, Scope, Sizes
from attndsl.backends.device.library import positions

#: imports

#: flags
UNDECIDED = tl.constexpr(3)
"""Kind of a tile that is to be evaluated."""


@triton.jit
def position_in_tile(row, tile, BLOCK: tl.constexpr, length, origin, KIND: tl.constexpr):
    """Logical position of a tile's row number ``row``, or of its last one."""
    index = tl.minimum(tile * BLOCK + tl.minimum(row, BLOCK - 1), length - 1)
    return positions(index, length, origin, KIND)


@triton.jit
def store_extremes(values, inside, LOW, HIGH):
    """Store the least and the greatest of ``values`` (a column); everything if a NaN is there."""
    values = values + tl.zeros(inside.shape, tl.int32).to(values.dtype)
    if values.dtype.is_floating():
        low = tl.min(tl.where(inside, tl.where(values != values, float("-inf"), values), float("inf")))
        high = tl.max(tl.where(inside, tl.where(values != values, float("inf"), values), float("-inf")))
        tl.store(LOW, low)
        tl.store(HIGH, high)
    else:
        wide = values.to(tl.int64)
        tl.store(LOW, tl.min(tl.where(inside, wide, 9223372036854775807)))
        tl.store(HIGH, tl.max(tl.where(inside, wide, -9223372036854775807)))


#: functions


@triton.jit
def rows_of_tile(tile, BLOCK: tl.constexpr):
    """Row numbers; where BLOCK is no power of two, the last one more than once."""
    return tile * BLOCK + tl.minimum(tl.arange(0, triton.next_power_of_2(BLOCK)), BLOCK - 1)


@triton.jit
def head_of_map(number, map_heads, sizes):
    """The first head that map ``number`` is of."""
    h = number % map_heads
    return Head(number // map_heads, h, h // (sizes.heads // sizes.kv_heads))


@triton.jit
def summarise(
    row_ints, row_floats, column_ints, column_floats,
    batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, map_batch, map_heads,
    #: given
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program: one tile of rows, or of columns, of one map.

    ``row_ints`` is int64 (maps, row values, 2, q tiles): least and greatest; the others likewise.
    """
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    given = Given(
        #: given
    )
    q_tiles = tl.cdiv(q_len, BLOCK_M)
    kv_tiles = tl.cdiv(kv_len, BLOCK_N)
    place = tl.program_id(0) % (q_tiles + kv_tiles)
    number = tl.program_id(0) // (q_tiles + kv_tiles)
    scope = Scope(head_of_map(number, map_heads, sizes), sizes, given)
    if place < q_tiles:
        rows = rows_of_tile(place, BLOCK_M)
        q = positions(tl.minimum(rows, q_len - 1), q_len, q_origin, Q_KIND)[:, None]
        rows_inside = (rows < q_len)[:, None]
        of_rows = Place(number, place, q_tiles)
        store_row_values(row_ints, row_floats, of_rows, rows_inside, q, scope)
    else:
        tile = place - q_tiles
        columns = rows_of_tile(tile, BLOCK_N)
        kv = positions(tl.minimum(columns, kv_len - 1), kv_len, kv_origin, KV_KIND)[:, None]
        columns_inside = (columns < kv_len)[:, None]
        of_columns = Place(number, tile, kv_tiles)
        store_column_values(column_ints, column_floats, of_columns, columns_inside, kv, scope)


@triton.jit
def classify(
    kinds, row_ints, row_floats, column_ints, column_floats,
    batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, map_batch, map_heads,
    #: given
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):
    """One program: CHUNK tiles of one row of tiles. ``kinds`` is int8 (maps, q tiles, kv tiles)."""
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    given = Given(
        #: given
    )
    q_tiles = tl.cdiv(q_len, BLOCK_M)
    kv_tiles = tl.cdiv(kv_len, BLOCK_N)
    chunks = tl.cdiv(kv_tiles, CHUNK)
    chunk = tl.program_id(0) % chunks
    row = (tl.program_id(0) // chunks) % q_tiles
    number = tl.program_id(0) // chunks // q_tiles
    scope = Scope(head_of_map(number, map_heads, sizes), sizes, given)
    tile = chunk * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside = tile < kv_tiles
    may, must, sure = bounds_of_tile(
        Extremes(row_ints, row_floats, column_ints, column_floats),
        Place(number, row, q_tiles), Place(number, tile, kv_tiles), inside,
        Origins(q_origin, kv_origin), scope, BLOCK_M, BLOCK_N,
    )
    partial = tl.where(sure, 1, UNDECIDED)
    kind = tl.where(must, 2, tl.where(may, partial, 0)) + tl.zeros([1, CHUNK], tl.int32)
    place = (number * q_tiles + row).to(tl.int64) * kv_tiles + tile
    tl.store(kinds + place, kind.to(tl.int8), mask=inside)


@triton.jit
def refine(
    kinds,
    batch, heads, kv_heads, q_len, kv_len, q_origin, kv_origin, map_batch, map_heads, together,
    #: given
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One program: evaluate those of ``together`` tiles that are undecided so far."""
    sizes = Sizes(batch, heads, kv_heads, q_len, kv_len)
    given = Given(
        #: given
    )
    kv_tiles = tl.cdiv(kv_len, BLOCK_N)
    q_tiles = tl.cdiv(q_len, BLOCK_M)
    first = tl.program_id(0).to(tl.int64) * together
    tiles = (map_batch * map_heads).to(tl.int64) * q_tiles * kv_tiles
    for place in range(first, tl.minimum(first + together, tiles)):
        if tl.load(kinds + place) == UNDECIDED:
            tile = (place % kv_tiles).to(tl.int32)
            row = (place // kv_tiles % q_tiles).to(tl.int32)
            number = (place // kv_tiles // q_tiles).to(tl.int32)
            scope = Scope(head_of_map(number, map_heads, sizes), sizes, given)
            rows = rows_of_tile(row, BLOCK_M)
            columns = rows_of_tile(tile, BLOCK_N)
            q = positions(rows, q_len, q_origin, Q_KIND)[:, None]
            kv = positions(columns, kv_len, kv_origin, KV_KIND)[None, :]
            there = (rows < q_len)[:, None] & (columns < kv_len)[None, :]
            zeros = (rows[:, None] + columns[None, :]) * 0
            mask = mask_of_pair(zeros.to(tl.float32), there, q, kv, scope)
            live = tl.where(mask, 1, 0) + zeros
            some = tl.max(tl.where(there, live, 0))
            every = tl.min(tl.where(there, live, 1))
            tl.store(kinds + place, (some + some * every).to(tl.int8))


@triton.jit
def list_tiles(
    kinds, tile_rows, tile_list, own_tiles, own_parts, along_tiles, own_step, along_step, map_step, whole,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):
    """One program: the list of one owning tile. FULL tiles from ``whole`` on count as PARTIAL.

    ``kinds`` is read with the given steps, so that one map serves both directions; an owning tile
    is PARTS of its ``own_parts`` tiles, of which the last may have fewer. ``tile_rows`` and
    ``tile_list`` are what attention kernels take (``loops.py``).
    """
    own = tl.program_id(0) % own_tiles
    number = tl.program_id(0) // own_tiles
    SLOTS: tl.constexpr = triton.next_power_of_2(PARTS)
    parts = tl.arange(0, SLOTS)
    there = ((parts < PARTS) & (own * PARTS + parts < own_parts))[:, None]
    rows = kinds + number.to(tl.int64) * map_step + (own * PARTS + parts).to(tl.int64)[:, None] * own_step
    place = tl.program_id(0).to(tl.int64)
    found = tile_list + place * along_tiles
    full_tiles = 0
    partial_tiles = 0
    first_live = along_tiles
    first_full = along_tiles
    last_live = -1
    last_full = -1
    first_of_part = along_tiles + tl.zeros([SLOTS], tl.int32)
    behind_part = tl.zeros([SLOTS], tl.int32)
    for first in tl.range(0, along_tiles, CHUNK):
        tile = first + tl.arange(0, CHUNK)
        inside = there & (tile < along_tiles)[None, :]
        of_part = tl.load(rows + tile.to(tl.int64)[None, :] * along_step, mask=inside, other=0).to(tl.int32)
        some = tl.max(tl.where(of_part != 0, 1, 0), 0)
        every = tl.min(tl.where(there & (of_part != 2), 0, 1), 0)
        kind = some + some * every
        kind = tl.where((kind == 2) & (tile >= whole), 1, kind)
        full = (kind == 2).to(tl.int32)
        partial = (kind == 1).to(tl.int32)
        tl.store(found + full_tiles + tl.cumsum(full, 0) - 1, tile, mask=full != 0)
        behind = partial_tiles + tl.cumsum(partial, 0)
        tl.store(found + along_tiles - behind, tile, mask=partial != 0)
        live = (of_part != 0) & (partial != 0)[None, :]
        first_of_part = tl.minimum(first_of_part, tl.min(tl.where(live, behind[None, :] - 1, along_tiles), 1))
        behind_part = tl.maximum(behind_part, tl.max(tl.where(live, behind[None, :], 0), 1))
        full_tiles += tl.sum(full, 0)
        partial_tiles += tl.sum(partial, 0)
        first_live = tl.minimum(first_live, tl.min(tl.where(kind != 0, tile, along_tiles), 0))
        first_full = tl.minimum(first_full, tl.min(tl.where(kind == 2, tile, along_tiles), 0))
        last_live = tl.maximum(last_live, tl.max(tl.where(kind != 0, tile, -1), 0))
        last_full = tl.maximum(last_full, tl.max(tl.where(kind == 2, tile, -1), 0))
    first_full = tl.where(full_tiles == 0, first_live, first_full)
    gaps = last_live - first_live + 1 != full_tiles + partial_tiles
    gaps = gaps | ((full_tiles != 0) & (last_full - first_full + 1 != full_tiles))
    row = tile_rows + place * WIDTH
    tl.store(row, full_tiles)
    tl.store(row + 1, partial_tiles)
    tl.store(row + 2, tl.where(gaps, -1, first_live))
    tl.store(row + 3, first_full)
    if PARTS > 1:
        tl.store(row + 4 + 2 * parts, first_of_part, mask=parts < PARTS)
        tl.store(row + 5 + 2 * parts, behind_part, mask=parts < PARTS)
