"""Read a block mask as one ``mask_mod``, and as tiles where they are of use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.inspection.tilemap import TileMap
from attndsl.passes.tiles.tile_plan import FULL, PARTIAL

from .block_mask import BlockMask, listed_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    from .tracing import Mod

_LARGEST_TILE = 1 << 12
"""Blocks beyond this are no tiles of kernels; torch's block mask that masks nothing has one."""


def mask_of(
    query: torch.Tensor, key: torch.Tensor, block_mask: TorchBlockMask
) -> tuple[Mod, TileMap | None]:
    """All that a block mask says, as one ``mask_mod``, and its tiles where they are of use."""
    batch, heads, q_len, _ = query.shape
    if isinstance(block_mask, BlockMask) and block_mask.derived(batch, heads):
        return block_mask.mask_mod, block_mask.tiles
    return _by_blocks(block_mask, q_len, key.shape[2])


def _by_blocks(block_mask: TorchBlockMask, q_len: int, kv_len: int) -> tuple[Mod, TileMap | None]:
    """The mask of listed blocks and a ``mask_mod`` together, and its tiles."""
    rows, columns = block_mask.BLOCK_SIZE
    across = -(-kv_len // columns)
    partial_blocks = listed_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, across)
    full_blocks = None
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full_blocks = listed_blocks(
            block_mask.full_kv_num_blocks, block_mask.full_kv_indices, across
        )
    mask_mod = block_mask.mask_mod
    if full_blocks is not None:
        shapes = (partial_blocks.shape, full_blocks.shape)
        shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
        partial_blocks, full_blocks = partial_blocks.expand(shape), full_blocks.expand(shape)
    by_batch, by_head = (size > 1 for size in partial_blocks.shape[:2])

    def listed(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = (b if by_batch else 0, h if by_head else 0, q_idx // rows, kv_idx // columns)
        live = partial_blocks[place] & mask_mod(b, h, q_idx, kv_idx)
        return live if full_blocks is None else full_blocks[place] | live

    if max(rows, columns) > _LARGEST_TILE:
        return listed, None
    kinds = partial_blocks.to(torch.int8) * PARTIAL
    if full_blocks is not None:
        kinds = torch.where(full_blocks, FULL, kinds).to(torch.int8)
    down = -(-q_len // rows)
    return listed, TileMap(kinds[:, :, :down], q_len, kv_len, rows, columns, "by the block mask")


def expanded(tiles: TileMap, wanted: tuple[int, int]) -> TileMap | None:
    """``tiles`` for as many batch entries and heads as a mask tells apart; None where they fail."""
    shape = tiles.kinds.shape[:2]
    if any(a not in (1, b) for a, b in zip(shape, wanted, strict=True)):
        return None
    kinds = tiles.kinds.expand(*wanted, -1, -1).contiguous()
    return TileMap(
        kinds, tiles.q_len, tiles.kv_len, tiles.block_m, tiles.block_n, tiles.reason, tiles.mask_mod
    )
