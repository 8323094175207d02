"""``flex_attention`` with torch's signature, run by attndsl's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch

from attndsl.call.argument_checks import autocast, check_operands, check_scale
from attndsl.errors import ArgumentError

from .block_tiles import expanded, mask_of
from .compiled_traces import compiled, near, position_ranges
from .flex_graph import GraphOptions, attend_in_graph
from .max_scores import find_maxima
from .operand_checks import (
    backend_of,
    check_block_mask,
    check_heads,
    number_of,
    same_batch,
    same_dtype,
)
from .trace_cache import default_traces
from .tracing import trace_mods

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn.attention.flex_attention import BlockMask as TorchBlockMask

    from attndsl.attention import Attention
    from attndsl.inspection.tilemap import TileMap

    from .tracing import Mod, Trace

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class AuxRequest(NamedTuple):
    """Auxiliary results to return; torch's own request is taken too."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """Auxiliary results, None where not asked for; (B, Hq, Lq), fp32 (fp64 for fp64)."""

    lse: torch.Tensor | None = None
    """Log-sum-exp of each row, natural logarithm; differentiable."""
    max_scores: torch.Tensor | None = None
    """Largest live score of each row, -inf where there is none; not differentiable."""


@dataclass(frozen=True, slots=True)
class PreparedFlexCall:
    """Compiled program of a call, with its captures and its tiles."""

    attention: Attention
    captures: Mapping[str, Any]
    tiles: TileMap | None = None


@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Mod | None = None,
    block_mask: TorchBlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: Literal[False] = False, kernel_options: Mapping[str, Any] | None = None, *,
    return_aux: None = None,
) -> torch.Tensor: ...  # fmt: skip


@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Mod | None = None,
    block_mask: TorchBlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    *, return_lse: Literal[True], kernel_options: Mapping[str, Any] | None = None,
    return_aux: None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Mod | None = None,
    block_mask: TorchBlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: Mapping[str, Any] | None = None, *,
    return_aux: AuxRequest,
) -> tuple[torch.Tensor, AuxOutput]: ...  # fmt: skip


@overload
def flex_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Mod | None = None,
    block_mask: TorchBlockMask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: Mapping[str, Any] | None = None, *,
    return_aux: AuxRequest | None = None,
) -> Any: ...  # fmt: skip


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
        key: (B, Hkv, Lk, D). Key and value may be of another floating dtype than query, fp8 too:
            they are converted to query's, and the call has no gradients.
        value: (B, Hkv, Lk, Dv).
        score_mod: A function of ``(score, b, h, q_idx, kv_idx)``.
        block_mask: Of :func:`.block_mask.create_block_mask` or of torch's. A pair is live where its
            block is listed and, in blocks that are not full, the ``mask_mod`` holds.
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
    if return_aux is not None and not hasattr(return_aux, "max_scores"):
        raise ArgumentError(
            f"return_aux is {return_aux!r}",
            hint="write return_aux=AuxRequest(lse=True, max_scores=True)",
        )
    query, key, value = autocast(query), autocast(key), autocast(value)
    key, value = same_batch(query, key, value, block_mask)
    key, value = same_dtype(query, key, value)
    check_operands(query, key, value)
    scale = number_of(scale)
    check_scale(scale)
    check_heads(query, key, enable_gqa)
    if block_mask is not None:
        check_block_mask(query, key, block_mask)
    backend = backend_of(kernel_options)
    asked = return_aux or AuxRequest(lse=return_lse)
    if torch.compiler.is_dynamo_compiling():
        mask_mod = None if block_mask is None else mask_of(query, key, block_mask)[0]
        options = GraphOptions(scale, backend, asked.max_scores)
        found = attend_in_graph(query, key, value, score_mod, mask_mod, options)
        return _results(*found, return_lse, return_aux)
    prepared = prepare(query, key, score_mod, block_mask, backend)
    called = prepared.attention(
        query, key, value, scale=scale, return_lse=asked.lse, tiles=prepared.tiles,
        **prepared.captures,
    )  # fmt: skip
    out, lse = called if isinstance(called, tuple) else (called, None)
    maxima = None
    if asked.max_scores:
        maxima = find_maxima(prepared.attention, query, key, scale, prepared.captures)
    return _results(out, lse, maxima, return_lse, return_aux)


def _results(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    maxima: torch.Tensor | None,
    return_lse: bool,
    return_aux: AuxRequest | None,
) -> Any:
    """Select the results that a call's options ask for."""
    if return_aux is not None:
        return out, AuxOutput(lse if return_aux.lse else None, maxima)
    return (out, lse) if return_lse else out


def prepare(
    query: torch.Tensor,
    key: torch.Tensor,
    score_mod: Mod | None,
    block_mask: TorchBlockMask | None,
    backend: str,
) -> PreparedFlexCall:
    """The program of a call, and what it captures.

    Raises:
        TraceError: A function cannot be traced.
    """
    mask_mod, tiles = None, None
    if block_mask is not None:
        mask_mod, tiles = mask_of(query, key, block_mask)
    traced = _trace(score_mod, mask_mod, query, key)
    attention = compiled(traced.text, backend)
    captures = near(traced.captures, query.device)
    if tiles is not None and score_mod is not None:
        # A score_mod may mask pairs too, and then the blocks are not those of the whole mask.
        alone = _trace(None, mask_mod, query, key)
        mask = compiled(alone.text, backend).lowered.program.mask
        if attention.lowered.program.mask is not mask:
            tiles = None
    if tiles is not None:
        tiles = expanded(tiles, attention.lowered.sparsity.maps(query.shape[0], query.shape[1]))
    return PreparedFlexCall(attention, captures, tiles)


def _trace(
    score_mod: Mod | None, mask_mod: Mod | None, query: torch.Tensor, key: torch.Tensor
) -> Trace:
    """The trace for a call, kept for later ones where its tensors have data.

    ``torch.export`` and fake tensors have none, and sizes that are no numbers.
    """
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    lengths = position_ranges(*sizes) if all(type(size) is int for size in sizes) else {}
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    if torch.compiler.is_compiling() or type(query) not in _PLAIN:
        return trace_mods(score_mod, mask_mod, dtype, query.device, lengths, (), None)
    return default_traces().trace(score_mod, mask_mod, dtype, query.device, lengths)
