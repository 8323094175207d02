"""Gradients that can be differentiated again: the first ones by kernels, the others in chunks."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Wants
from attndsl.backends.dense.pulled import pulled
from attndsl.backends.memory_order import arranged_like

from .higher import is_transformed, pull_in_chunks
from .positions import with_positions, without_positions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Backend, Call, Gradients, Scalar
    from attndsl.backends.dense.pulled import Tensors
    from attndsl.pipeline import Lowered


@lru_cache(maxsize=256)
def wants_of(needs: tuple[bool, ...], tensors: tuple[str, ...], params: tuple[str, ...]) -> Wants:
    """What to compute; ``needs`` is in the order q, k, v, tensors, params."""
    q, k, v, *rest = needs
    captures = {name for name, need in zip((*tensors, *params), rest, strict=True) if need}
    return Wants(q, k, v, frozenset(captures & {*tensors}), frozenset(captures & {*params}))


def in_order(
    found: Gradients, tensors: tuple[str, ...], params: tuple[str, ...]
) -> tuple[torch.Tensor | None, ...]:
    """``found`` in the order q, k, v, tensors, params."""
    captures = {**found.tensors, **found.params}
    return (found.q, found.k, found.v, *(captures.get(name) for name in (*tensors, *params)))


def differentiable_gradients(
    backend: Backend,
    lowered: Lowered,
    call: Call,
    needs: tuple[bool, ...],
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """What ``backend.backward`` finds, in the order q, k, v, tensors, params that are tensors.

    Args:
        backend: What ran the forward.
        lowered: The program.
        call: The forward's arguments.
        needs: Which gradients are wanted, in that order.
        out: The forward's output.
        lse: Its log-sum-exp.
        grad_out: The gradient of ``out``; the result is differentiable in it too.
        grad_lse: The gradient of ``lse``, or None for zeros.
    """
    wanted = tuple(place for place, need in enumerate(needs) if need)
    if is_transformed():
        if grad_lse is None:
            grad_lse = torch.zeros_like(lse)
        found = pull_in_chunks(lowered, call, wanted, grad_out, grad_lse)
    else:
        given = [x for x in call.params.values() if isinstance(x, torch.Tensor)]
        found = _Gradients.apply(  # type: ignore[no-untyped-call]
            backend, lowered, call, wanted, out.detach(), lse.detach(), grad_out, grad_lse,
            call.q, call.k, call.v, *call.tensors.values(), *given,
        )  # fmt: skip
    each = iter(found)
    return tuple(next(each) if need else None for need in needs)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        lowered: Lowered,
        call: Call,
        wanted: tuple[int, ...],
        out: torch.Tensor,
        lse: torch.Tensor,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        *inputs: torch.Tensor,
    ) -> Tensors:
        tensors = tuple(call.tensors)
        params = tuple(n for n, x in call.params.items() if isinstance(x, torch.Tensor))
        needs = tuple(place in wanted for place in range(len(inputs)))
        found = in_order(
            backend.backward(
                lowered, call, out, lse, grad_out, grad_lse, wants_of(needs, tensors, params)
            ),
            tensors,
            params,
        )
        grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
        call, names, positions = without_positions(call)
        ctx.save_for_backward(*inputs, grad_out, grad_lse, *positions)
        # Tensors are kept by save_for_backward alone, which hooks and checkpointing look into.
        empty = call.q.new_empty(0)
        numbers = {n: None if isinstance(x, torch.Tensor) else x for n, x in call.params.items()}
        template = replace(call, q=empty, k=empty, v=empty, tensors={}, params={})
        ctx.kept = lowered, template, numbers, wanted, tensors, names
        return tuple(x for place in wanted if (x := found[place]) is not None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        lowered, template, numbers, wanted, tensors, names = ctx.kept
        both = ctx.saved_tensors  # Once, since checkpoints unpack them once.
        saved, positions = both[: len(both) - len(names)], both[len(both) - len(names) :]
        grad_out_need, grad_lse_need, *input_needs = ctx.needs_input_grad[6:]
        needs = (*input_needs, grad_out_need, grad_lse_need)
        places = [place for place, need in enumerate(needs) if need]

        def gradients(*some: torch.Tensor) -> Tensors:
            given = list(saved)
            for place, each in zip(places, some, strict=True):
                given[place] = each
            *inputs, grad_out, grad_lse = given
            call = _call(template, tensors, numbers, inputs)
            call = with_positions(call, names, positions)
            return pull_in_chunks(lowered, call, wanted, grad_out, grad_lse)

        parts = pulled(gradients, tuple(saved[place] for place in places), grads)
        found = {
            place: arranged_like(part, saved[place]) if place < 3 else part
            for place, part in zip(places, parts, strict=True)
        }
        count = len(input_needs)
        return (
            *[None] * 6, found.get(count), found.get(count + 1), *map(found.get, range(count)),
        )  # fmt: skip


def _call(
    template: Call,
    tensors: tuple[str, ...],
    numbers: Mapping[str, Scalar | None],
    inputs: list[torch.Tensor],
) -> Call:
    """``template`` with ``inputs``: q, k, v, captures, then the params whose number is None."""
    q, k, v, *rest = inputs
    each = iter(rest)
    found = {name: next(each) for name in tensors}
    params = {name: next(each) if number is None else number for name, number in numbers.items()}
    return replace(template, q=q, k=k, v=v, tensors=found, params=params)
