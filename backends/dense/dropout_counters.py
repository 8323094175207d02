"""By which numbers dropout draws the pairs of a call, which may be a part of a larger one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .philox import kept_at

if TYPE_CHECKING:
    from ..base import Call
    from .philox import Rows

Range = tuple[int, int]


def kept_pairs(call: Call, p: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """Kept pairs of ``call``: bool (batch, heads, q_len, kv_len).

    Args:
        call: The call.
        p: With what probability a pair is dropped; broadcasts.
        first_row: How many rows of a call in one piece lie before those of q.
    """
    batch, heads, q_len, _ = call.q.shape
    numbers = heads_of(call, (0, batch), (0, heads))
    rows = rows_of(call, "q", (0, q_len))
    if isinstance(rows, tuple):  # Tensors are of these rows already.
        rows = rows[0] + first_row, rows[1] + first_row
    return kept_at(call.seed, p, numbers, rows, rows_of(call, "kv", (0, call.k.shape[2])))


def heads_of(call: Call, batches: Range, heads: Range) -> torch.Tensor:
    """Numbers of heads of batch entries, as :mod:`.philox` counts them: int64 (batches, heads)."""
    draws, device = call.draws, call.q.device
    b, h = (torch.arange(*part, device=device) for part in (batches, heads))
    if draws is None:
        return b[:, None] * call.q.shape[1] + h
    return (b + draws.b_offset)[:, None] * draws.heads + (h + draws.h_offset)


def rows_of(call: Call, name: str, part: Range) -> Rows:
    """Numbers of the rows ``part`` of queries (``q``) or of keys (``kv``)."""
    start: int | None = 0
    if call.draws is not None:
        start = call.draws.q_start if name == "q" else call.draws.kv_start
    if start is not None:
        return start + part[0], start + part[1]
    index = call.q_index if name == "q" else call.kv_index
    if index is not None:
        return index[part[0] : part[1]].to(torch.int64)
    offset = call.q_offset if name == "q" else call.kv_offset
    return torch.arange(*part, device=call.q.device) + offset
