"""Launches of the kernels that make gradients of captured tensors and params alone.

They make the gradient of the score again, from the operands and the rows' statistics.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..gradients.distances import add_distance_gradients, sums_of_distances
from ..gradients.pairs import gradients_of, parts_of, rest_of, sums_of
from ..gradients.scattered import (
    bounds_from_operands,
    buffers,
    gradient_of,
    known_factors,
    scales_of,
)
from ..gradients.terms import terms_of
from ..kernels.arguments import capture_arguments, origin
from ..kernels.device import on_device, stream_of
from ..kernels.kernel import Task
from ..memory_order import strides

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.pipeline import Lowered

    from ..base import Call, Gradients, StoredDS, Wants
    from ..gradients.pairs import Rest, Sums
    from ..gradients.plan import GradientPlan
    from ..kernels.compile import Executable
    from ..kernels.layout import Layout


@dataclass(frozen=True, slots=True)
class BackwardState:
    """A backward call, whose attention kernels have run."""

    lowered: Lowered
    call: Call
    lse: torch.Tensor
    """(batch, heads, q_len) fp32, natural logarithm; -inf in rows with no live pair."""
    delta: torch.Tensor
    """(batch, heads, padded rows) fp32, see ``library.statistics_rows``."""
    grad_out: torch.Tensor
    """With last stride 1."""
    layout: Callable[..., Layout]
    """Of (lowered, call, task, grad_out, wanted): the kernels of that task."""

    @property
    def is_empty(self) -> bool:
        """True if there are no pairs."""
        return not self.lse.numel() or not self.call.k.shape[2]

    def layout_of(self, task: Task, wants: Wants | None = None) -> Layout:
        """The kernels of ``task``."""
        return self.layout(self.lowered, self.call, task, self.grad_out, wants)

    def launch(
        self, kernel: Executable, programs: int, layout: Layout, own: list[Any], last: list[Any]
    ) -> None:
        """Launch ``kernel``.

        Args:
            kernel: One of ``layout``.
            programs: How many run.
            layout: Of the call.
            own: Arguments between the positions' origins and what the program adds.
            last: Arguments after what the program adds.
        """
        call = self.call
        device = self.lse.device
        with on_device(device):
            kernel.launch(
                programs, stream_of(device),
                [
                    call.q, call.k, call.v, self.grad_out, self.lse, self.delta, *layout.strides,
                    *strides(self.grad_out)[:3], call.scale, *layout.sizes,
                    origin(call.q_offset, call.q_index), origin(call.kv_offset, call.kv_index),
                    *own, *capture_arguments(layout.facts, call), *last,
                ],
            )  # fmt: skip


def task_of_exact(lowered: Lowered, plan: GradientPlan) -> Task:
    """Task of exact sums, by how they get bounds and whether pairs are summed up before."""
    bounded = known_factors(lowered, plan.others.tensors) is not None
    if plan.together is None:
        return Task.BOUNDED if bounded else Task.SCATTERED
    return Task.BOUNDED_TOGETHER if bounded else Task.SCATTERED_TOGETHER


def extra_tasks(lowered: Lowered, plan: GradientPlan) -> list[tuple[Task, Wants | None]]:
    """The tasks that :func:`run_extra` launches, and the tensors that each is for."""
    found: list[tuple[Task, Wants | None]] = []
    if plan.distances.tensors or plan.distances.params:
        found.append((Task.DISTANCES, None))
    found += [(Task.PAIRS, group) for group in plan.pairs]
    found += [(Task.STORED, group) for group in plan.stored]
    if plan.others.tensors:
        found.append((task_of_exact(lowered, plan), plan.others))
    return found


def run_extra(state: BackwardState, plan: GradientPlan, found: Gradients) -> Gradients:
    """``found`` with the gradients that ``plan`` has kernels of their own for."""
    tensors: dict[str, torch.Tensor] = {}
    for wants in plan.pairs:
        tensors |= _pairs(state, wants)
    for wants in plan.stored:
        assert found.stored_ds is not None
        tensors |= _stored(state, wants, found.stored_ds)
    if plan.others.tensors:
        tensors |= _scattered(state, plan)
    found = found._replace(tensors={**found.tensors, **tensors}, stored_ds=None)
    if plan.distances.tensors or plan.distances.params:
        sums = _distances(state)
        block = sums.shape[-1]
        first = 1 - block * -(-state.call.k.shape[2] // block)
        found = add_distance_gradients(
            state.lowered, state.call, sums_of_distances(sums), first, plan.distances, found
        )
    return found


def _distances(state: BackwardState) -> torch.Tensor:
    """Sums of dS, see :func:`sums_of_distances`."""
    _, batch, heads, q_len = state.lse.shape
    kv_len = state.call.k.shape[2]
    if state.is_empty:
        return state.lse.new_zeros((batch, heads, 1, 2, 1))
    layout = state.layout_of(Task.DISTANCES)
    kernel = layout.executables["distances"]
    block_m, block_n = kernel.config.block_m, kernel.config.block_n
    ratio = block_m // block_n
    diagonals = ratio * (-(-q_len // block_m) - 1) + -(-kv_len // block_n)
    sums = state.lse.new_empty((batch, heads, diagonals, ratio + 1, block_n))
    state.launch(kernel, batch * heads * diagonals, layout, [], [sums])
    return sums


def _zeros(state: BackwardState, wants: Wants) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(state.call.tensors[name]) for name in wants.tensors}


@dataclass(frozen=True, slots=True)
class _OfPairs:
    """A launch for tensors of which pairs look up an element each, see ``pairs.py``."""

    layout: Layout
    kernel: Executable
    rest: Rest
    parts: int
    programs: int
    sums: list[Sums]

    def arguments(self) -> list[object]:
        """Kernel arguments of the sums."""
        return [argument for item in self.sums for argument in item.arguments()]


def _of_pairs(state: BackwardState, wants: Wants, task: Task) -> _OfPairs:
    call = state.call
    terms = terms_of(state.lowered, wants.tensors)
    rest = rest_of(terms[0], call)
    layout = state.layout_of(task, wants)
    (kernel,) = layout.executables.values()
    parts = parts_of(rest, call)
    programs = _programs_of(state, kernel, rest, parts)
    return _OfPairs(layout, kernel, rest, parts, programs, sums_of(terms, call))


def _programs_of(state: BackwardState, kernel: Executable, rest: Rest, parts: int) -> int:
    """Tiles of what is told apart, of each part of what is not."""
    _, batch, heads, q_len = state.lse.shape
    kv_len, config = state.call.k.shape[2], kernel.config
    tiles = -(-q_len // config.block_m) * -(-kv_len // config.block_n)
    return parts * tiles * (batch * heads // (rest.batches * rest.heads))


def _pairs(state: BackwardState, wants: Wants) -> dict[str, torch.Tensor]:
    """Gradients of such tensors, which make dS state."""
    if state.is_empty:
        return _zeros(state, wants)
    own = _of_pairs(state, wants, Task.PAIRS)
    first = [own.rest.batches, own.rest.heads, own.parts]
    state.launch(own.kernel, own.programs, own.layout, first, own.arguments())
    return gradients_of(own.sums, state.call)


def _stored(state: BackwardState, wants: Wants, stored_ds: StoredDS) -> dict[str, torch.Tensor]:
    """Gradients of such tensors, each a sum of dS, which the attention kernels have stored."""
    own = _of_pairs(state, wants, Task.STORED)
    _, batch, heads, q_len = state.lse.shape
    rest, device = own.rest, stored_ds.values.device
    members = rest.batches * rest.heads
    with on_device(device):
        own.kernel.launch(
            own.programs, stream_of(device),
            [
                stored_ds.values, stored_ds.stored, *stored_ds.values.shape[2:],
                *stored_ds.stored.shape[2:],
                heads, heads // rest.heads, batch // rest.batches, rest.heads,
                members, -(-members // own.parts), q_len, state.call.k.shape[2], *own.arguments(),
            ],
        )  # fmt: skip
    return gradients_of(own.sums, state.call)


def _scattered(state: BackwardState, plan: GradientPlan) -> dict[str, torch.Tensor]:
    """Gradients of tensors that any pairs may meet in, see ``scattered.py``."""
    wants, rest = plan.others, plan.together
    if state.is_empty:
        return _zeros(state, wants)
    call = state.call
    _, batch, heads, q_len = state.lse.shape
    factors = known_factors(state.lowered, wants.tensors)
    layout = state.layout_of(task_of_exact(state.lowered, plan), wants)
    found = buffers(wants.tensors, call)

    def run(name: str, last: list[Any]) -> None:
        kernel = layout.executables[name]
        tiles = -(-q_len // kernel.config.block_m)
        state.launch(kernel, tiles * batch * heads, layout, [], last)

    if factors is None:
        bounds = torch.zeros(len(found), dtype=torch.int32, device=call.q.device)
        run("scatter_bounds", [bounds])
    else:
        bounds = bounds_from_operands(factors, call, state.grad_out, state.delta)
    scales, inverses = scales_of(bounds, batch * heads * q_len)
    last = [scales, *(value for item in found for value in item.arguments())]
    if rest is None:
        run("scatter_sums", last)
    else:
        kernel, parts = layout.executables["scatter_together"], parts_of(rest, call)
        programs = _programs_of(state, kernel, rest, parts)
        state.launch(kernel, programs, layout, [rest.batches, rest.heads, parts], last)
    return {
        item.name: gradient_of(item, inverse, call)
        for item, inverse in zip(found, inverses, strict=True)
    }
