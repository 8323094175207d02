"""Tensors of a call as matrices, one for each key head, and results in the caller's layout again.

A matrix has the rows of all query heads that share keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..log_sum import LogSumParts, settled
from ..memory_order import arranged_like, empty_like, rows_contiguous, wide_dtype
from .step_plan import BLOCK_M
from .tile_expressions import work_dtype

if TYPE_CHECKING:
    import torch

    from ..base import Call, Wants
    from .step_plan import QueryStep


@dataclass(frozen=True, slots=True)
class StepPlace:
    """A step's part of tensors laid out as matrices: (batch * kv_heads, group, length, width)."""

    step: QueryStep
    matrices: slice
    members: slice
    shape: tuple[int, int, int]
    """Batch entries, query heads and rows of the step."""

    def queries(self, tensor: torch.Tensor) -> torch.Tensor:
        """(matrices, group * rows, width) of a tensor (matrices, group, length, width)."""
        part = tensor[self.matrices, self.members, slice(*self.step.rows)]
        return part.flatten(1, 2)

    def store(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Write ``value``, laid out as :meth:`queries` gives it."""
        part = tensor[self.matrices, self.members, slice(*self.step.rows)]
        part.copy_(value.reshape(part.shape))

    def pairs(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view (batch, heads, rows, width) of contiguous (matrices, group * rows, width)."""
        return tensor.view(*self.shape, tensor.shape[-1])


def place_of(step: QueryStep, call: Call) -> StepPlace:
    """Place of ``step`` in tensors laid out as matrices."""
    kv_heads = call.k.shape[1]
    group = call.q.shape[1] // kv_heads
    (b, b_stop), (h, h_stop) = step.batches, step.heads
    first = b * kv_heads + h // group
    last = (b_stop - 1) * kv_heads + (h_stop - 1) // group + 1
    within = h_stop - h < group
    members = slice(h % group, h % group + h_stop - h) if within else slice(0, group)
    shape = (b_stop - b, h_stop - h, step.rows[1] - step.rows[0])
    return StepPlace(step, slice(first, last), members, shape)


def matrices(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """(batch, heads, length, width) as contiguous (batch * kv_heads, group, length, width)."""
    batch, heads, length, width = tensor.shape
    kv_heads = call.k.shape[1]
    shape = (batch * kv_heads, heads // max(1, kv_heads), length, width)
    return tensor.to(work_dtype(call)).contiguous().view(shape)


def keys_of(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """Keys or values as (batch * kv_heads, length, width).

    They are copied to be contiguous where several tile rows read them. One row of a long cache
    reads them once, which is what a copy takes.
    """
    found = rows_contiguous(tensor, work_dtype(call))
    if call.q.shape[2] > BLOCK_M:
        found = found.contiguous()
    return found.flatten(0, 1)


class StepResults:
    """Output and log-sum-exps of a call, to be filled in.

    Attributes:
        out: (matrices, group, rows, value_dim), in the dtype of the work.
        lse: The same of width 1.
    """

    def __init__(self, call: Call) -> None:
        # No view is returned: torch refuses to write to views that an autograd function returns.
        self._out = empty_like(call.q, call.v.shape[3], wide_dtype(call.wide))
        self._lse = self._out.new_empty((2, *call.q.shape[:3]), dtype=work_dtype(call))
        own = self._out.dtype is self._lse.dtype and self._out.is_contiguous()
        made = self._out if own else self._lse.new_empty(self._out.shape)
        self.out = matrices(made, call)
        self.lse = LogSumParts(*(matrices(x.unsqueeze(-1), call) for x in self._lse))
        self._is_own = own

    def as_given(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`attndsl.backends.base.Backend.forward`."""
        if not self._is_own:
            self._out.copy_(self.out.view(self._out.shape))
        return self._out, settled(self._lse)


def add_part(
    total: torch.Tensor, lse: LogSumParts, part: torch.Tensor, part_lse: LogSumParts
) -> LogSumParts:
    """Add the output over other keys to ``total`` in place (online softmax, arXiv 1805.02867).

    Args:
        total: Output over the keys so far.
        lse: Their log-sum-exp, of the same dims, the last one 1.
        part: Output over other keys.
        part_lse: Their log-sum-exp.

    Returns:
        The log-sum-exp of all these keys.
    """
    both, own, other = lse.merged(part_lse)
    total.mul_(own).addcmul_(part, other)
    return both


def gradient_like(
    found: torch.Tensor | None, given: torch.Tensor, wants: Wants
) -> torch.Tensor | None:
    """The gradient of ``given``, laid out as matrices, in its shape and memory order."""
    if found is None:
        return None
    return arranged_like(found.view(given.shape), given, wide_dtype(wants.wide))
