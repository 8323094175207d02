"""Differentiable calls of backends whose kernels torch cannot look into."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Wants

if TYPE_CHECKING:
    from attndsl.backends.base import Backend, Call
    from attndsl.pipeline import Lowered


def attend(backend: Backend, lowered: Lowered, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` of ``call``, differentiable in q, k, v, float captures and float params."""
    if backend.differentiable:
        return backend.forward(lowered, call)
    if torch.is_grad_enabled() and _needs_grad(call):
        given = [p for p in call.params.values() if isinstance(p, torch.Tensor)]
        found: tuple[torch.Tensor, torch.Tensor] = _Attend.apply(  # type: ignore[no-untyped-call]
            backend, lowered, call, call.q, call.k, call.v, *call.tensors.values(), *given
        )
        return found
    return backend.forward(lowered, call)


def _needs_grad(call: Call) -> bool:
    if call.q.requires_grad or call.k.requires_grad or call.v.requires_grad:
        return True
    values = (*call.tensors.values(), *call.params.values())
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in values)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, backend: Backend, lowered: Lowered, call: Call, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = backend.forward(lowered, call)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, out, lse)
        ctx.backend, ctx.lowered = backend, lowered
        # Tensors are kept by save_for_backward alone, which hooks and checkpointing look into.
        ctx.param_names = [n for n, p in call.params.items() if isinstance(p, torch.Tensor)]
        numbers = {n: p for n, p in call.params.items() if not isinstance(p, torch.Tensor)}
        empty = call.q.new_empty(0)
        ctx.call = replace(call, q=empty, k=empty, v=empty, tensors={}, params=numbers)
        ctx.tensor_names = list(call.tensors)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors
        names = [*ctx.tensor_names, *ctx.param_names]
        if grad_out is None and grad_lse is None:
            return (None,) * (6 + len(names))
        call = restore(ctx.lowered, ctx.call, inputs, ctx.tensor_names, ctx.param_names)
        needs = ctx.needs_input_grad[3:]
        wanted = {name for name, need in zip(names, needs[3:], strict=True) if need}
        gradients = ctx.backend.backward(
            ctx.lowered,
            call,
            out,
            lse,
            torch.zeros_like(out) if grad_out is None else grad_out,
            grad_lse,
            Wants(
                q=needs[0],
                k=needs[1],
                v=needs[2],
                tensors=frozenset(wanted & set(ctx.tensor_names)),
                params=frozenset(wanted & set(ctx.param_names)),
            ),
        )
        found = {**gradients.tensors, **gradients.params}
        return (
            None,
            None,
            None,
            gradients.q,
            gradients.k,
            gradients.v,
            *(found.get(name) for name in names),
        )


def restore(
    lowered: Lowered,
    call: Call,
    inputs: list[torch.Tensor],
    tensor_names: list[str],
    param_names: list[str],
) -> Call:
    """``call`` with its tensors: q, k, v, captures, then 0-d params."""
    q, k, v, *rest = inputs
    tensors = dict(zip(tensor_names, rest, strict=False))
    given = dict(zip(param_names, rest[len(tensor_names) :], strict=True))
    values = {**call.params, **given}
    params = {decl.name: values[decl.name] for decl in lowered.program.params}
    return replace(call, q=q, k=k, v=v, tensors=tensors, params=params)
