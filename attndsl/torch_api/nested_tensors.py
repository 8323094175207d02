"""Attention of jagged nested tensors: packed rows without padding, each seeing a range of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from attndsl.errors import ShapeError

from .sdpa_call import MaskCapture, attend
from .sdpa_checks import check_key_lengths, kv_heads
from .sdpa_programs import END_KEY, FIRST_KEY, CaptureForm

_WITH_HEADS = 4
"""Dims of (batch, heads, ragged length, dim)."""


@dataclass(frozen=True, slots=True)
class PackedEntries:
    """The entries of a batch one behind the other, and where each one lies."""

    rows: torch.Tensor
    """(heads, all rows, dim)."""
    start: torch.Tensor
    """(batch or 1,) ints: first row of each entry."""
    length: torch.Tensor
    """(batch or 1,) ints: its number of rows; there may be unused ones behind them."""


def ragged_dim(nested: torch.Tensor) -> int:
    """Number of the dim whose size varies."""
    # Sizes tell it too, but not within torch.compile.
    return int(nested._ragged_idx)  # type: ignore[attr-defined]


def attend_jagged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    dropout_p: float,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Compute :func:`~.sdpa.scaled_dot_product_attention`; at least one operand is jagged.

    A dense operand is (B or 1, heads, length, dim): one of batch 1 serves all entries. The output
    is nested as the query is, and dense if the query is.
    """
    operands = (("query", query), ("key", key), ("value", value))
    for name, x in operands:
        _check_dims(name, x)
    batch = max(x.shape[0] for _, x in operands)
    for name, x in operands:
        if x.shape[0] != batch and (x.shape[0] != 1 or (name == "query" and x.is_nested)):
            raise ShapeError(
                f"{name} has batch {x.shape[0]} and another operand has batch {batch}",
                hint="make them equal, or dense and 1",
            )
    if not query.is_nested:
        query = query.expand(batch, *query.shape[1:])
    # What has no batch of its own goes with its partner: a key and its value lie side by side.
    if not key.is_nested and key.shape[0] != value.shape[0]:
        key = key.expand(max(key.shape[0], value.shape[0]), *key.shape[1:])
    if not value.is_nested and value.shape[0] != key.shape[0]:
        value = value.expand(key.shape[0], *value.shape[1:])
    q, k, v = _pack(query), _pack(key), _pack(value)
    _check_same_lengths(k, v, key, value)
    shared = kv_heads(q.rows.shape[0], k.rows.shape[0], v.rows.shape[0], enable_gqa)
    heads = max(q.rows.shape[0], shared)
    if heads > 1 and query.dim() < _WITH_HEADS:
        raise ShapeError(
            f"query has the nested shape {tuple(query.shape)} and key or value has {heads} heads",
            hint="give it a dim for heads: (batch, heads, j, dim)",
        )
    out = attend_packed(
        q.rows.expand(heads, -1, -1)[None],
        k.rows.expand(shared, -1, -1)[None],
        v.rows.expand(shared, -1, -1)[None],
        ranges(q, k, is_causal),
        dropout_p,
        scale,
    )[0]
    return _unpack(out, query)


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: tuple[torch.Tensor, torch.Tensor],
    dropout_p: float,
    scale: float | None,
) -> torch.Tensor:
    """Attention (1, heads, rows, dim) in which query row i sees keys ``bounds[:][i]``."""
    captures = tuple(
        MaskCapture(CaptureForm(name, "bound", ("q_len",)), bound)
        for name, bound in zip((FIRST_KEY, END_KEY), bounds, strict=True)
    )
    return attend(q, k, v, "range", captures, dropout_p, scale)


def ranges(
    q: PackedEntries, k: PackedEntries, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """First key and end of the keys that each query row sees; found without a synchronisation."""
    row = torch.arange(q.rows.shape[1], device=q.start.device)
    # An entry of length 0 starts where its successor does: the last one that starts here is meant.
    entry = torch.searchsorted(q.start, row, right=True) - 1
    place = row - q.start[entry]
    first = k.start.expand(len(q.start))[entry]
    seen = k.length.expand(len(q.start))[entry]
    if is_causal:
        seen = torch.minimum(seen, place + 1)
    # Rows that no entry has see nothing: before the first one, between two, behind the last.
    inside = (place >= 0) & (place < q.length[entry])
    return first, first + torch.where(inside, seen, 0)


def _extents(nested: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Start and length of each entry of a jagged tensor."""
    offsets, lengths = nested.offsets(), nested.lengths()
    return offsets[:-1], offsets.diff() if lengths is None else lengths


def _pack(x: torch.Tensor) -> PackedEntries:
    if x.is_nested:
        rows = x.values()
        return PackedEntries(rows if rows.dim() > 2 else rows[None], *_extents(x))
    batch, heads, length, dim = x.shape
    rows = x.transpose(0, 1).reshape(heads, batch * length, dim)
    start = torch.arange(batch, device=x.device) * length
    return PackedEntries(rows, start, torch.full_like(start, length))


def _unpack(out: torch.Tensor, query: Any) -> torch.Tensor:
    """``out`` (heads, rows, dim) with the structure of ``query``."""
    if not query.is_nested:
        shape = (out.shape[0], query.shape[0], query.shape[2], out.shape[2])
        return out.reshape(shape).transpose(0, 1)
    rows = out.transpose(0, 1) if query.dim() == _WITH_HEADS else out[0]
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        rows, query.offsets(), query.lengths()
    )
    return nested.transpose(1, 2) if query.dim() == _WITH_HEADS else nested


def _check_dims(name: str, x: torch.Tensor) -> None:
    if x.is_nested:
        if ragged_dim(x) != x.dim() - 2 or x.dim() > _WITH_HEADS:
            raise ShapeError(
                f"{name} has the nested shape {tuple(x.shape)}",
                hint="the ragged dim is the length: (batch, heads, j, dim) or (batch, j, dim); "
                "transpose(1, 2) makes the former of (batch, j, heads, dim)",
            )
    elif x.dim() != _WITH_HEADS:
        raise ShapeError(
            f"{name} has {x.dim()} dims {tuple(x.shape)} beside nested operands",
            hint="pass (batch, heads, length, dim), batch being 1 where all entries share it",
        )


def _check_same_lengths(
    k: PackedEntries, v: PackedEntries, key: torch.Tensor, value: torch.Tensor
) -> None:
    if not key.is_nested and not value.is_nested:
        check_key_lengths(key, value)
        return
    if key.is_nested and value.is_nested and key.shape[-2] == value.shape[-2]:
        return
    same = k.start.shape == v.start.shape and bool(
        (k.start == v.start).all() and (k.length == v.length).all()
    )
    if not same or k.rows.shape[1] != v.rows.shape[1]:
        raise ShapeError(
            "key and value are nested with other lengths",
            hint="each key has one value: make both with the same offsets",
        )
