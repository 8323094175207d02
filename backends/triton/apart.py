"""Launches of the kernels that make gradients of captured tensors and params alone.

They make the gradient of the score again, from the operands and the rows' statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..emit.facts import strides
from ..gradients.distances import add_distance_gradients, sums_of_distances
from ..gradients.pairs import gradients_of, parts_of, rest_of, sums_of
from ..gradients.scattered import (
    bounds_from_operands,
    buffers,
    constant_factors,
    gradient_of,
    scales_of,
)
from ..gradients.terms import terms_of
from ..kernels.arguments import capture_arguments, origin
from ..kernels.streams import on_device, stream_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.pipeline import Lowered

    from ..base import Call, Gradients, Slopes, Wants
    from ..gradients.pairs import Rest, Sums
    from ..gradients.shares import Shares
    from ..kernels.arguments import Layout
    from ..kernels.compile import Executable


@dataclass(frozen=True, slots=True)
class Again:
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
    """Of (lowered, call, kind, grad_out, wants): the kernels of that kind."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no pairs."""
        return not self.lse.numel() or not self.call.k.shape[2]

    def layout_of(self, kind: str, wants: Wants | None = None) -> Layout:
        """The kernels of ``kind``."""
        return self.layout(self.lowered, self.call, kind, self.grad_out, wants)

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


def add_apart(again: Again, shares: Shares, found: Gradients) -> Gradients:
    """``found`` with the gradients that ``shares`` has kernels of their own for."""
    tensors: dict[str, torch.Tensor] = {}
    for wants in shares.pairs:
        tensors |= _pairs(again, wants)
    for wants in shares.stored:
        assert found.slopes is not None
        tensors |= _stored(again, wants, found.slopes)
    if shares.others.tensors:
        tensors |= _scattered(again, shares.others)
    found = replace(found, tensors={**found.tensors, **tensors}, slopes=None)
    if shares.distances.tensors or shares.distances.params:
        sums = _distances(again)
        block = sums.shape[-1]
        first = 1 - block * -(-again.call.k.shape[2] // block)
        found = add_distance_gradients(
            again.lowered, again.call, sums_of_distances(sums), first, shares.distances, found
        )
    return found


def _distances(again: Again) -> torch.Tensor:
    """Sums of dS, see :func:`.distances.sums_of_distances`."""
    batch, heads, q_len = again.lse.shape
    kv_len = again.call.k.shape[2]
    if again.is_empty:
        return again.lse.new_zeros((batch, heads, 1, 2, 1))
    layout = again.layout_of("distances")
    kernel = layout.executables["distances"]
    block_m, block_n = kernel.config.block_m, kernel.config.block_n
    ratio = block_m // block_n
    diagonals = ratio * (-(-q_len // block_m) - 1) + -(-kv_len // block_n)
    sums = again.lse.new_empty((batch, heads, diagonals, ratio + 1, block_n))
    again.launch(kernel, batch * heads * diagonals, layout, [], [sums])
    return sums


def _zeros(again: Again, wants: Wants) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(again.call.tensors[name]) for name in wants.tensors}


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
        """Of the sums."""
        return [argument for item in self.sums for argument in item.arguments()]


def _of_pairs(again: Again, wants: Wants, kind: str) -> _OfPairs:
    call = again.call
    terms = terms_of(again.lowered, wants.tensors)
    rest = rest_of(terms[0], call)
    layout = again.layout_of(kind, wants)
    kernel = layout.executables[kind]
    batch, heads, q_len = again.lse.shape
    tiles = -(-q_len // kernel.config.block_m) * -(-call.k.shape[2] // kernel.config.block_n)
    parts = parts_of(rest, call)
    programs = parts * tiles * (batch * heads // (rest.batches * rest.heads))
    return _OfPairs(layout, kernel, rest, parts, programs, sums_of(terms, call))


def _pairs(again: Again, wants: Wants) -> dict[str, torch.Tensor]:
    """Gradients of such tensors, which make dS again."""
    if again.is_empty:
        return _zeros(again, wants)
    own = _of_pairs(again, wants, "pairs")
    first = [own.rest.batches, own.rest.heads, own.parts]
    again.launch(own.kernel, own.programs, own.layout, first, own.arguments())
    return gradients_of(own.sums, again.call)


def _stored(again: Again, wants: Wants, slopes: Slopes) -> dict[str, torch.Tensor]:
    """Gradients of such tensors, each a sum of dS, which the attention kernels have stored."""
    own = _of_pairs(again, wants, "stored")
    batch, heads, q_len = again.lse.shape
    rest, device = own.rest, slopes.values.device
    members = rest.batches * rest.heads
    with on_device(device):
        own.kernel.launch(
            own.programs, stream_of(device),
            [
                slopes.values, slopes.stored, *slopes.values.shape[2:], *slopes.stored.shape[2:],
                heads, heads // rest.heads, batch // rest.batches, rest.heads,
                members, -(-members // own.parts), q_len, again.call.k.shape[2], *own.arguments(),
            ],
        )  # fmt: skip
    return gradients_of(own.sums, again.call)


def _scattered(again: Again, wants: Wants) -> dict[str, torch.Tensor]:
    """Gradients of tensors that any pairs may meet in, see ``scattered.py``."""
    if again.is_empty:
        return _zeros(again, wants)
    call = again.call
    batch, heads, q_len = again.lse.shape
    factors = constant_factors(again.lowered, wants.tensors)
    layout = again.layout_of("scattered" if factors is None else "bounded", wants)
    found = buffers(wants.tensors, call)

    def run(name: str, last: list[Any]) -> None:
        kernel = layout.executables[name]
        tiles = -(-q_len // kernel.config.block_m)
        again.launch(kernel, tiles * batch * heads, layout, [], last)

    if factors is None:
        bounds = torch.zeros(len(found), dtype=torch.int32, device=call.q.device)
        run("scatter_bounds", [bounds])
    else:
        bounds = bounds_from_operands(factors, call, again.grad_out, again.delta)
    scales, inverses = scales_of(bounds, batch * heads * q_len)
    run("scatter_sums", [scales, *(value for item in found for value in item.arguments())])
    return {
        item.name: gradient_of(item, inverse, call)
        for item, inverse in zip(found, inverses, strict=True)
    }
