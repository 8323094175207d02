"""Double backward: the first gradients by kernels, the second and higher ones in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Backward, Wants
from attndsl.backends.dense.vjp import pulled
from attndsl.backends.memory_order import arranged_like
from attndsl.foundation.caches import memoised

from .batched_gradients import refuse_vectorized
from .chunked_autograd import is_transformed, pull_in_chunks

if TYPE_CHECKING:
    from attndsl.backends.base import Backend, Call, CallGradients, Form
    from attndsl.backends.dense.vjp import Tensors
    from attndsl.pipeline import Lowered


@memoised("gradients of double backwards", 256)
def wants_of(needs: tuple[bool, ...], tensors: tuple[str, ...], params: tuple[str, ...]) -> Wants:
    """Gradients to compute; ``needs`` has q, k, v, tensors, params, then inputs without any."""
    q, k, v, *rest = needs
    captures = {name for name, need in zip((*tensors, *params), rest, strict=False) if need}
    return Wants(q, k, v, frozenset(captures & {*tensors}), frozenset(captures & {*params}))


def in_order(found: CallGradients, form: Form) -> tuple[torch.Tensor | None, ...]:
    """``found`` in the order of the tensors that a call of ``form`` has."""
    captures = {**found.tensors, **found.params}
    positions = (None,) * len(form.positions)
    return (found.q, found.k, found.v, *map(captures.get, form.captures), *positions)


def places_of(wanted: Wants, form: Form) -> tuple[int, ...]:
    """Places of what has a gradient that is ``wanted``, among the tensors of a call of ``form``."""
    needs = [wanted.q, wanted.k, wanted.v, *(name in wanted.tensors for name in form.tensors)]
    needs += [name in wanted.params for name in form.given]
    return tuple(place for place, need in enumerate(needs) if need)


def differentiable_gradients(
    backend: Backend, lowered: Lowered, call: Call, backward: Backward
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of a call, differentiable again, in the order of :meth:`Call.flatten`.

    Args:
        backend: What ran the forward.
        lowered: The program.
        call: The forward's arguments.
        backward: The forward's results; what is found is differentiable in their gradients too.
    """
    form, tensors = call.flatten()
    places, (out, lse, grad_out, grad_lse, _) = places_of(backward.wanted, form), backward
    if is_transformed():
        if grad_lse is None:
            grad_lse = torch.zeros_like(lse[0])
        found = pull_in_chunks(lowered, call, places, grad_out, grad_lse)
    else:
        results = backward._replace(out=out.detach(), lse=lse.detach())
        found = _FirstGradients.apply(  # type: ignore[no-untyped-call]
            backend, lowered, call, form, results, grad_out, grad_lse, *tensors
        )
    each = dict(zip(places, found, strict=True))
    return tuple(map(each.get, range(len(tensors))))


class _FirstGradients(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        lowered: Lowered,
        call: Call,
        form: Form,
        backward: Backward,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> Tensors:
        found = in_order(backend.backward(lowered, call, backward), form)
        grad_lse = torch.zeros_like(backward.lse[0]) if grad_lse is None else grad_lse
        # Tensors are kept by save_for_backward alone, which hooks and checkpointing look into.
        ctx.save_for_backward(*tensors, grad_out, grad_lse)
        places = places_of(backward.wanted, form)
        ctx.kept = lowered, form, places
        return tuple(x for place in places if (x := found[place]) is not None)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        refuse_vectorized(*grads)
        lowered, form, wanted = ctx.kept
        saved = ctx.saved_tensors  # Once, since checkpoints unpack them once.
        grad_out_need, grad_lse_need, *input_needs = ctx.needs_input_grad[5:]
        needs = (*input_needs, grad_out_need, grad_lse_need)
        places = [place for place, need in enumerate(needs) if need]

        def gradients(*some: torch.Tensor) -> Tensors:
            given = list(saved)
            for place, each in zip(places, some, strict=True):
                given[place] = each
            *tensors, grad_out, grad_lse = given
            return pull_in_chunks(lowered, form.call(tensors), wanted, grad_out, grad_lse)

        parts = pulled(gradients, tuple(saved[place] for place in places), grads)
        found = {
            place: arranged_like(part, saved[place]) if place < 3 else part
            for place, part in zip(places, parts, strict=True)
        }
        count = len(input_needs)
        return (*[None] * 5, found.get(count), found.get(count + 1), *map(found.get, range(count)))
