"""Few rows over keys that they all see: torch's own attention, once, and no plan.

A step of decoding has one row, and its cache has another length each time, or room for keys to
come. To look for tiles and to make a bias for them takes several times what the attention does: see
M57 in docs/measured.md.

Non-goals: scores that are not plain ones, masks with several runs of live keys, masks that read
tensors or heads (:mod:`.step_plan` has all of these).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..log_sum import of_one_number
from ..memory_order import memory_order, wide_dtype
from .scalar_bounds import boundary, bounds_of
from .sdpa import flash_attention, is_spoilt
from .tile_expressions import work_dtype

if TYPE_CHECKING:
    from attndsl.pipeline import Lowered

    from ..base import Call
    from .step_plan import Range

_MOST_ROWS = 8
"""Of all heads that share keys, of a call that is looked at: the bounds of many rows decide little.
torch takes so few rows for one block, whatever their number is."""


def in_one_piece(lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Output and log-sum-exp of a call of plain scores, or None where it has to be taken apart.

    Returns:
        As :meth:`attndsl.backends.base.Backend.forward`.
    """
    batch, heads, rows, _ = call.q.shape
    kv_heads = call.k.shape[1]
    if kv_heads == 0 or rows * (heads // kv_heads) > _MOST_ROWS or lowered.program.sink is not None:
        return None
    live = _live_keys(lowered, call)
    if live is None:
        return None
    q, k, v = call.q, call.k, call.v
    if live != (0, k.shape[2]):
        k, v = k[:, :, slice(*live)], v[:, :, slice(*live)]
    if q.dtype is not (dtype := work_dtype(call)):
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if heads != kv_heads:
        q = q.reshape(batch, kv_heads, -1, q.shape[3])
    out, lse = flash_attention(q, k, v, scale=call.scale)
    if is_spoilt(out, lse):
        return None
    return _as_results(call, out, lse)


def _as_results(
    call: Call, out: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch's results in the shapes, the order in memory and the dtype of a forward's."""
    if (
        out.shape == call.q.shape and out.shape[2] == 1 and out.dtype is call.q.dtype
        and call.q.is_contiguous() and out.is_contiguous() and lse.is_contiguous()
    ):  # fmt: skip
        return out, of_one_number(lse)
    order = memory_order(call.q, call.v.shape[3])
    dtype = wide_dtype(call.wide) or call.q.dtype
    if out.shape != order.shape or out.stride() != order.strides or out.dtype is not dtype:
        made = torch.empty_strided(order.shape, order.strides, dtype=dtype)
        out = made.copy_(out.reshape(order.shape))
    shape = order.shape[:3]
    return out, of_one_number(lse.reshape(shape))


def _live_keys(lowered: Lowered, call: Call) -> Range | None:
    """The keys that each row sees, if these are the same, and the first ones or the last."""
    rows, length = call.q.shape[2], call.k.shape[2]
    if 0 in (call.q.shape[0], rows, length):
        return None
    if lowered.program.mask is None:
        return 0, length
    bounds = bounds_of(lowered, call)
    if bounds is None or (bounds.of_one_row and rows > 1):
        return None
    start, stop = bounds.kv_offset, bounds.kv_offset + length
    q = (bounds.q_offset, bounds.q_offset + rows)
    if bounds.must(q, (start, stop)):
        return 0, length
    # The fewer keys there are, the sooner the bounds are sure of them.
    if bounds.must(q, (stop - 1, stop)):
        first = boundary(lambda place: bounds.must(q, (place, stop)), stop - 1, start)
        return None if bounds.may(q, (start, first)) else (first - start, length)
    if bounds.must(q, (start, start + 1)):
        last = boundary(lambda place: bounds.must(q, (start, place)), start + 1, stop)
        return None if bounds.may(q, (last, stop)) else (0, last - start)
    return None
