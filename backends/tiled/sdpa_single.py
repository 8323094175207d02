"""Few rows over keys that they all see: torch's own attention, once, and no plan.

A step of decoding has one row, and its cache has another length each time, or room for keys to
come. To look for tiles and to make a bias for them takes several times what the attention does: see
M57 in docs/dev/measured.md.

Non-goals: scores that are not plain ones, masks with several runs of live keys, masks that read
tensors or heads (:mod:`.step_plan` has all of these), gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..log_sum import of_one_number
from ..memory_order import memory_order, wide_dtype
from .scalar_bounds import boundary, bounds_of
from .sdpa import flash_attention, is_spoilt
from .tile_expressions import work_dtype

if TYPE_CHECKING:
    import torch

    from attndsl.pipeline import Lowered

    from ..base import Backward, Call, CallGradients

_MOST_ROWS = 8
"""Most rows, of all heads that share keys, of a call whose bounds are looked at: the bounds of many
rows decide little. torch takes so few rows for one block, whatever their number is."""


class SingleCall(NamedTuple):
    """One call of torch's attention, over the keys that every row sees: no row sees others."""

    start: int
    stop: int

    def forward(self, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See :class:`.cpu.Strategy`."""
        batch, heads, _, width = call.q.shape
        kv_heads, length = call.k.shape[1:3]
        q, k, v = call.q, call.k, call.v
        if self != (0, length):
            k, v = k[:, :, slice(*self)], v[:, :, slice(*self)]
        if q.dtype is not (dtype := work_dtype(call)):
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if heads != kv_heads:
            q = q.reshape(batch, kv_heads, -1, width)
        out, lse = flash_attention(q, k, v, scale=call.scale)
        return None if is_spoilt(out, lse) else _as_results(call, out, lse)

    def backward(self, lowered: Lowered, call: Call, backward: Backward) -> CallGradients | None:
        """None: gradients are made otherwise."""
        return None


def single_call(lowered: Lowered, call: Call) -> SingleCall | None:
    """The single call that makes a forward of plain scores; None where one does not.

    That is where each row sees the same keys, and these are the first ones or the last.
    """
    batch, heads, rows, _ = call.q.shape
    kv_heads, length = call.k.shape[1:3]
    if (
        0 in (batch, rows, kv_heads, length) or rows * (heads // kv_heads) > _MOST_ROWS
        or lowered.program.sink is not None
    ):  # fmt: skip
        return None
    if lowered.program.mask is None:
        return SingleCall(0, length)
    bounds = bounds_of(lowered, call)
    if bounds is None or (bounds.of_one_row and rows > 1):
        return None
    start, stop = bounds.kv_offset, bounds.kv_offset + length
    q = (bounds.q_offset, bounds.q_offset + rows)
    if bounds.must(q, (start, stop)):
        return SingleCall(0, length)
    # The fewer keys there are, the sooner the bounds are sure of them.
    if bounds.must(q, (stop - 1, stop)):
        first = boundary(lambda place: bounds.must(q, (place, stop)), stop - 1, start)
        return None if bounds.may(q, (start, first)) else SingleCall(first - start, length)
    if bounds.must(q, (start, start + 1)):
        last = boundary(lambda place: bounds.must(q, (start, place)), start + 1, stop)
        return None if bounds.may(q, (last, stop)) else SingleCall(0, last - start)
    return None


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
        out = order.empty(call.q, dtype).copy_(out.reshape(order.shape))
    return out, of_one_number(lse.reshape(order.shape[:3]))
