"""Differentiable calls of backends whose kernels torch cannot look into."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from attndsl.backends.base import Call
from attndsl.backends.reference import ReferenceBackend
from attndsl.errors import UnsupportedError

from .distributed import OF_TORCH, refuse_context_parallel
from .forward_mode import attend_with_tangents, has_tangents
from .higher import attend_in_chunks, is_transformed
from .positions import with_positions, without_positions
from .probability import check_probability
from .second import differentiable_gradients, in_order, wants_of

if TYPE_CHECKING:
    from attndsl.backends.base import Backend, Scalar
    from attndsl.pipeline import Lowered


def attend(
    backend: Backend, lowered: Lowered, call: Call, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """``out`` or ``(out, lse)`` of ``call``.

    Both are differentiable in q, k, v, float captures and float params, any number of times.

    Raises:
        ArgumentError: A dropout probability that is none.
        UnsupportedError: Checked mode, with tangents or within a transform of ``torch.func``; any
            call within torch's ``context_parallel``.
    """
    if functional.scaled_dot_product_attention is not OF_TORCH:
        refuse_context_parallel()
    call = without_neg(call)
    if lowered.program.dropout is not None:
        check_probability(lowered.program.dropout, call)
    if is_transformed():
        if isinstance(backend, ReferenceBackend) and backend.checked:
            raise UnsupportedError(
                "checked mode looks at values, which forward mode and torch.func do not show",
                hint="compile the program with checked=False",
            )
        if has_tangents():
            both = attend_with_tangents(backend, lowered, call)
        else:
            both = attend_in_chunks(lowered, call)
        return both if return_lse else both[0]
    if not backend.differentiable and torch.is_grad_enabled() and _needs_grad(call):
        params = call.params
        given = [p for p in params.values() if isinstance(p, torch.Tensor)] if params else ()
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = _Attend.apply(  # type: ignore[no-untyped-call]
            backend, lowered, call, return_lse, call.q, call.k, call.v, *call.tensors.values(),
            *given,
        )  # fmt: skip
        return found
    out, lse = backend.forward(lowered, call)
    return (out, lse) if return_lse else out


def without_neg(call: Call) -> Call:
    """``call`` without tensors whose signs torch has yet to change: kernels read what is stored."""
    if not (
        call.q.is_neg() or call.k.is_neg() or call.v.is_neg()
        or (call.tensors and any(x.is_neg() for x in call.tensors.values()))
    ):  # fmt: skip
        return call
    return replace(
        call,
        q=call.q.resolve_neg(),
        k=call.k.resolve_neg(),
        v=call.v.resolve_neg(),
        tensors={name: x.resolve_neg() for name, x in call.tensors.items()},
    )


def _needs_grad(call: Call) -> bool:
    if call.q.requires_grad or call.k.requires_grad or call.v.requires_grad:
        return True
    if not call.tensors and not call.params:
        return False
    values = (*call.tensors.values(), *call.params.values())
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in values)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        backend: Backend,
        lowered: Lowered,
        call: Call,
        return_lse: bool,
        *inputs: torch.Tensor,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        out, lse = backend.forward(lowered, call)
        ctx.set_materialize_grads(False)
        call, names, positions = without_positions(call)
        ctx.save_for_backward(*inputs, out, lse, *positions)
        # Tensors are kept by save_for_backward alone, which hooks and checkpointing look into.
        plain = (
            call.scale, call.sizes, call.q_offset, call.kv_offset, call.q_index, call.kv_index,
            call.seed, call.deterministic, call.tiles, call.signature, call.wide, call.draws,
        )  # fmt: skip
        params = (
            {n: None if isinstance(p, torch.Tensor) else p for n, p in call.params.items()}
            if call.params
            else {}
        )
        # One attribute, since each costs time: see M20 in docs/measured.md.
        ctx.kept = backend, lowered, plain, tuple(call.tensors), params, names
        # An output that nobody sees takes torch as long as an allocation.
        return (out, lse) if return_lse else out

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        backend, lowered, plain, tensor_names, params, names = ctx.kept
        saved = ctx.saved_tensors
        end = len(saved) - len(names)
        *inputs, out, lse = saved[:end]
        given_names = tuple(n for n, p in params.items() if p is None) if params else ()
        if grad_out is None and grad_lse is None:
            return (None,) * (7 + len(tensor_names) + len(given_names))
        call = with_positions(_restore(plain, tensor_names, params, inputs), names, saved[end:])
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        needs = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled() or is_transformed():
            return (None,) * 4 + differentiable_gradients(
                backend, lowered, call, needs, out, lse, grad_out, grad_lse
            )
        wants = wants_of(needs, tensor_names, given_names)
        found = backend.backward(lowered, call, out, lse, grad_out, grad_lse, wants)
        return (None,) * 4 + in_order(found, tensor_names, given_names)


def _restore(
    plain: tuple[Any, ...],
    tensor_names: tuple[str, ...],
    params: dict[str, Scalar | None],
    inputs: list[torch.Tensor],
) -> Call:
    """The call again: ``inputs`` are q, k, v, captures, then the params that are None."""
    q, k, v, *rest = inputs
    given = iter(rest[len(tensor_names) :])
    scale, sizes, *others = plain
    return Call(
        q,
        k,
        v,
        scale,
        sizes,
        dict(zip(tensor_names, rest, strict=False)),
        {name: next(given) if value is None else value for name, value in params.items()},
        *others,
    )
