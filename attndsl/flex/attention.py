"""``flex_attention`` with torch's signature, run by attndsl's kernels."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

from attndsl.errors import ArgumentError, DeviceError, ShapeError, UnsupportedError
from attndsl.passes.tiles.plan import FULL, PARTIAL
from attndsl.runtime.arguments import check_operands
from attndsl.tilemap import TileMap

from .block_mask import BlockMask, listed_blocks
from .cache import default_traces
from .compiled import compiled, near, position_ranges
from .graphs import attend_in_graph
from .maxima import row_maxima

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.attention import Attention

    from .tracing import Mod

_LARGEST_TILE = 1 << 12
"""Blocks beyond this are no tiles of kernels; torch's block mask that masks nothing has one."""
_CAST = (torch.float16, torch.bfloat16, torch.float32)
_TORCH_OPTIONS = frozenset(
    {
        "num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2",
        "BLOCK_N2", "PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ",
        "FORCE_USE_FLEX_ATTENTION", "USE_TMA", "kpack", "matrix_instr_nonkdim", "waves_per_eu",
        "BACKEND",
    }
)  # fmt: skip


class AuxRequest(NamedTuple):
    """Which auxiliary results to return; torch's own is taken too."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """Auxiliary results, None where not asked for; (B, Hq, Lq), fp32 (fp64 for fp64)."""

    lse: torch.Tensor | None = None
    """Log-sum-exp of each row, natural logarithm; differentiable."""
    max_scores: torch.Tensor | None = None
    """Largest live score of each row, -inf where there is none; not differentiable."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a call comes to: a compiled program and its captures."""

    attention: Attention
    captures: Mapping[str, Any]
    tiles: TileMap | None = None


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Mod | None = None,
    block_mask: TorchBlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Attention with a score and a mask written in Python: torch's ``flex_attention``.

    The functions are traced into a program of the language, which :func:`attndsl.trace` shows.
    Eager calls run fused kernels, and CPUs have gradients.

    Args:
        query: (B, Hq, Lq, D).
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        score_mod: A function of ``(score, b, h, q_idx, kv_idx)``.
        block_mask: Of :func:`create_block_mask` or of torch's. A pair is live where its block is
            listed and, in blocks that are not full, the ``mask_mod`` holds.
        scale: Factor of the raw score; 1 / sqrt(D) by default.
        enable_gqa: Whether there may be more query heads than key heads.
        return_lse: Whether to return the log-sum-exp too, natural logarithm.
        kernel_options: ``{"backend": name}`` chooses a backend of attndsl's. Options of torch's
            kernels are taken and have no meaning here: attndsl chooses its own tiles.
        return_aux: Which auxiliary results to return, in place of ``return_lse``.

    Returns:
        The output (B, Hq, Lq, Dv); with ``return_lse`` ``(output, lse)``; with ``return_aux``
        ``(output, AuxOutput)``.

    Raises:
        TraceError: A function cannot be traced; names its file and line.
        ShapeError: Sizes that do not go together, or not with the block mask.
        ArgumentError: Options that there are not, or that exclude each other.
        AttnDSLError: What a call of :class:`attndsl.Attention` raises.
    """
    if return_lse and return_aux is not None:
        raise ArgumentError(
            "both return_lse and return_aux are given",
            hint="write return_aux=AuxRequest(lse=True) alone",
        )
    query, key, value = (_autocast(x) for x in (query, key, value))
    key, value = _same_batch(query, key, value, block_mask)
    check_operands(query, key, value)
    _check_heads(query, key, enable_gqa)
    if block_mask is not None:
        _check_block_mask(query, key, block_mask)
    backend = _backend(kernel_options)
    asked = return_aux or AuxRequest(lse=return_lse)
    if torch.compiler.is_dynamo_compiling():
        if asked.max_scores:
            raise UnsupportedError(
                "max_scores is asked for in a graph of torch.compile",
                hint="ask for it in a call outside of the graph",
            )
        mask_mod = None if block_mask is None else _mask_of(query, key, block_mask)[0]
        graph = attend_in_graph(query, key, value, score_mod, mask_mod, scale, backend)
        if return_aux is not None:
            return graph[0], AuxOutput(graph[1] if asked.lse else None)
        return graph if return_lse else graph[0]
    prepared = prepare(query, key, score_mod, block_mask, backend)
    found = prepared.attention(
        query, key, value, scale=scale, return_lse=asked.lse, tiles=prepared.tiles,
        **prepared.captures,
    )  # fmt: skip
    out, lse = found if asked.lse else (found, None)
    if return_aux is None:
        return (out, lse) if return_lse else out
    maxima = None
    if asked.max_scores:
        lowered = prepared.attention.lowered
        maxima = row_maxima(lowered, query, key, scale, prepared.captures)
    return out, AuxOutput(lse, maxima)


def prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    score_mod: Mod | None,
    block_mask: TorchBlockMask | None,
    backend: str,
) -> Prepared:
    """The program of a call, and what it captures.

    Raises:
        TraceError: A function cannot be traced.
    """
    batch, heads, q_len, _ = query.shape
    lengths = position_ranges(batch, heads, q_len, key.shape[2])
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    mask_mod, tiles = None, None
    if block_mask is not None:
        mask_mod, tiles = _mask_of(query, key, block_mask)
    traces = default_traces()
    traced = traces.trace(score_mod, mask_mod, dtype, query.device, lengths)
    attention = compiled(traced.text, backend)
    captures = near(traced.captures, query.device)
    if tiles is not None and score_mod is not None:
        # A score_mod may mask pairs too, and then the blocks are not those of the whole mask.
        alone = traces.trace(None, mask_mod, dtype, query.device, lengths)
        mask = compiled(alone.text, backend).lowered.program.mask
        if attention.lowered.program.mask is not mask:
            tiles = None
    if tiles is not None:
        wanted = attention.lowered.sparsity.maps(batch, heads)
        tiles = _expanded(tiles, wanted)
    return Prepared(attention, captures, tiles)


def _mask_of(
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


def _expanded(tiles: TileMap, wanted: tuple[int, int]) -> TileMap | None:
    """``tiles`` for as many batch entries and heads as the mask tells apart."""
    shape = tiles.kinds.shape[:2]
    if any(a not in (1, b) for a, b in zip(shape, wanted, strict=True)):
        return None
    kinds = tiles.kinds.expand(*wanted, -1, -1).contiguous()
    return TileMap(
        kinds, tiles.q_len, tiles.kv_len, tiles.block_m, tiles.block_n, tiles.reason, tiles.mask_mod
    )


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the dtype that autocast asks for."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype not in _CAST:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _same_batch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_mask: TorchBlockMask | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value of one batch entry for a batch of queries, as torch has it."""
    tensors = (query, key, value)
    if not all(isinstance(x, torch.Tensor) and x.dim() == 4 for x in tensors):
        return key, value
    batch = query.shape[0]
    if block_mask is None or batch == 1 or key.shape[0] != 1 or value.shape[0] != 1:
        return key, value
    return key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)


def _check_heads(query: torch.Tensor, key: torch.Tensor, enable_gqa: bool) -> None:
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ShapeError(
            f"query has {query.shape[1]} heads and key has {key.shape[1]}",
            hint="pass enable_gqa=True for grouped heads",
        )


def _check_block_mask(query: torch.Tensor, key: torch.Tensor, block_mask: TorchBlockMask) -> None:
    if not isinstance(block_mask, TorchBlockMask):
        raise ArgumentError(
            f"block_mask is a {type(block_mask).__name__}",
            hint="make it with attndsl.flex.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN)",
        )
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise ArgumentError(
            "the block_mask was sliced, and has no mask_mod since",
            hint="set its mask_mod, from that of the whole mask",
        )
    if block_mask.kv_num_blocks.device != query.device:
        raise DeviceError(
            f"block_mask is on {block_mask.kv_num_blocks.device} and query is on {query.device}",
            hint="block_mask.to(query.device)",
        )
    if min(block_mask.BLOCK_SIZE) >= 1 << 30:
        return
    lengths = tuple(block_mask.shape[-2:])
    if lengths != (query.shape[2], key.shape[2]):
        raise ShapeError(
            f"block_mask is of {lengths[0]} queries x {lengths[1]} keys, and the call has "
            f"{query.shape[2]} x {key.shape[2]}",
            hint="make a block mask of the call's lengths",
        )
    sizes = block_mask.kv_num_blocks.shape[:-1]
    for name, size, wanted in zip(
        ("heads", "batch entries"), reversed(sizes), (query.shape[1], query.shape[0]), strict=False
    ):
        if size not in (1, wanted):
            raise ShapeError(
                f"block_mask is of {size} {name}, and query has {wanted}",
                hint="make it with the call's own sizes, or with None for all alike",
            )


def _backend(options: Mapping[str, Any] | None) -> str:
    """The backend that ``kernel_options`` asks for.

    Raises:
        ArgumentError: An option that neither torch nor attndsl has.
    """
    for name in options or {}:
        if name != "backend" and name.removeprefix("fwd_").removeprefix("bwd_") not in (
            _TORCH_OPTIONS
        ):
            close = difflib.get_close_matches(name, ["backend", *_TORCH_OPTIONS], n=1)
            raise ArgumentError(
                f"there is no kernel option {name!r}",
                hint=f"did you mean '{close[0]}'?" if close else "attndsl's own is 'backend'",
            )
    return str((options or {}).get("backend", "auto"))
