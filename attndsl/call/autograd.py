"""Differentiable calls of backends whose kernels torch cannot look into."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import profiler
from torch.nn import functional

from attndsl.backends.base import Backward
from attndsl.backends.log_sum import public_lse
from attndsl.backends.memory_order import arranged, is_window, memory_order, rows_contiguous
from attndsl.errors import AttnDSLError, UnsupportedError

from .batched_gradients import refuse_vectorized
from .chunked_autograd import attend_in_chunks, is_transformed
from .distributed_checks import OF_TORCH, refuse_context_parallel
from .double_backward import differentiable_gradients, in_order, wants_of
from .dropout_checks import check_probability
from .jvp import attend_with_tangents, has_tangents
from .profiling import BACKWARD, event_of_call

modes_on = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes that are on."""
if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.backends.base import Backend, Call, Form
    from attndsl.backends.dense.vjp import Tensors
    from attndsl.backends.memory_order import MemoryOrder
    from attndsl.pipeline import Lowered


class RecordedCall(NamedTuple):
    """A call as its autograd node keeps it, without tensors."""

    backend: Backend
    lowered: Lowered
    form: Form
    strides: list[tuple[int, ...]]
    """Strides of the call's tensors, output and log-sum-exp, which a backward gets."""


def attend(
    backend: Backend, lowered: Lowered, call: Call, return_lse: bool, first: bool = False,
    in_event: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``out`` or ``(out, lse)`` of ``call``.

    Both are differentiable in q, k, v, float captures and float params, any number of times. If the
    call is the ``first`` of its signature, the backend begins to prepare for its backward too. A
    profile has an event of the call, unless the caller has made it one already.

    Raises:
        ArgumentError: A dropout probability that is none.
        UnsupportedError: Checked mode, with tangents or within a transform of ``torch.func``; any
            call within torch's ``context_parallel``.
    """
    if profiler._is_profiler_enabled and not in_event:
        with event_of_call(backend, lowered, call):
            return attend(backend, lowered, call, return_lse, first, in_event=True)
    if functional.scaled_dot_product_attention is not OF_TORCH:
        refuse_context_parallel()
    call = without_neg(call)
    if lowered.program.dropout is not None:
        check_probability(lowered.program.dropout, call)
    if is_transformed():
        if backend.checked:
            raise UnsupportedError(
                "checked mode looks at values, which forward mode and torch.func do not show",
                hint="compile the program with checked=False",
            )
        if has_tangents():
            both = attend_with_tangents(backend, lowered, call)
        else:
            both = attend_in_chunks(lowered, call)
        return both if return_lse else both[0]
    if is_recorded(backend, lowered, call):
        form, tensors = call.flatten()
        if first:
            needs = tuple(x.requires_grad for x in tensors)
            with suppress(AttnDSLError):  # What cannot run is refused where it would.
                backend.start(lowered, call, wants_of(needs, form.tensors, form.given))
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = _apply(
            (backend, lowered, call, form, return_lse), *tensors
        )
        return found
    out, lse = backend.forward(lowered, call)
    return (out, public_lse(lse)) if return_lse else out


def is_recorded(backend: Backend, lowered: Lowered, call: Call) -> bool:
    """Return True if ``call`` is a node of autograd with a backward of ours."""
    # torch's own gradient of a product lets what is not finite reach all of its rows.
    own = not backend.differentiable or lowered.program.bounded
    return own and torch.is_grad_enabled() and needs_grad(call)


def without_neg(call: Call) -> Call:
    """``call`` with lazy negations of its tensors resolved: kernels read the stored values."""
    if not (
        call.q.is_neg() or call.k.is_neg() or call.v.is_neg()
        or (call.tensors and any(x.is_neg() for x in call.tensors.values()))
    ):  # fmt: skip
        return call
    return call._replace(
        q=rows_contiguous(call.q.resolve_neg()),
        k=rows_contiguous(call.k.resolve_neg()),
        v=rows_contiguous(call.v.resolve_neg()),
        tensors={name: x.resolve_neg() for name, x in call.tensors.items()},
        signature=None,  # Copies may have other strides.
    )


def needs_grad(call: Call) -> bool:
    """Return True if an operand or a capture of ``call`` requires a gradient."""
    if call.q.requires_grad or call.k.requires_grad or call.v.requires_grad:
        return True
    if not call.tensors and not call.params:
        return False
    values = (*call.tensors.values(), *call.params.values())
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in values)


ALIGNED = 16
"""Bytes that the address of an allocation is a multiple of."""


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, job: tuple[Any, ...], *tensors: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        # One argument and one attribute, since each costs time: see M20 in docs/dev/measured.md.
        backend, lowered, call, form, return_lse = job
        out, lse = backend.forward(lowered, call)
        ctx.set_materialize_grads(False)
        # Tensors are kept by save_for_backward alone, which hooks and checkpointing look into.
        ctx.save_for_backward(*tensors, out, lse)
        strides = [x.stride() for x in (*tensors, out, lse)]
        ctx.kept = RecordedCall(backend, lowered, form, strides)
        # An output that nobody sees takes torch as long as an allocation.
        return (out, public_lse(lse)) if return_lse else out

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        return (None, *gradients_of_saved(ctx.kept, needs, ctx.saved_tensors, grad_out, grad_lse))


def gradients_of_saved(
    recorded: RecordedCall, needs: tuple[bool, ...],
    saved: Tensors, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """Gradients of a call's tensors, in their order.

    Args:
        recorded: The call; its strides are those of ``saved`` in the forward.
        needs: The tensors that need a gradient.
        saved: The call's tensors, output and log-sum-exp.
        grad_out: The output's gradient, (B, Hq, Lq, Dv); None for zeros.
        grad_lse: That of the log-sum-exp, (B, Hq, Lq); None for zeros.
    """
    if grad_out is None and grad_lse is None:
        return (None,) * len(needs)
    backend, lowered, form, strides = recorded
    *tensors, out, lse = saved
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    results = Backward(out, lse, grad_out, grad_lse, wants_of(needs, form.tensors, form.given))
    refuse_vectorized(grad_out, grad_lse)
    call = form.call(tensors)
    if (
        call.signature is None or strides != [x.stride() for x in saved]
        or (out.data_ptr() | lse.data_ptr()) % ALIGNED or grad_out.is_neg()
        or (grad_lse is not None and (grad_lse.is_neg() or grad_lse.data_ptr() % ALIGNED))
    ):  # fmt: skip
        # Hooks of saved tensors, such as torch's save_on_cpu, may lay them out anew.
        call, results = _readable(call), settled(call, results)
    if profiler._is_profiler_enabled:
        with event_of_call(backend, lowered, call, BACKWARD):
            return _gradients(backend, lowered, call, form, results)
    return _gradients(backend, lowered, call, form, results)


def _readable(call: Call) -> Call:
    """``call`` as kernels read it, whatever the strides of its tensors are."""
    q, k, v = map(rows_contiguous, (call.q, call.k, call.v))
    return call._replace(q=q, k=k, v=v, signature=None)


def settled(
    call: Call, backward: Backward, order: MemoryOrder | None = None, windows: bool = False
) -> Backward:
    """The results of ``call`` and their gradients as backends take them: as forwards leave them.

    Args:
        call: The call.
        backward: The results as given.
        order: The output's, if it is known.
        windows: Whether the output may be some rows of such a one.
    """
    out, lse, grad_out, grad_lse, wanted = backward
    out = out.resolve_neg()
    order = order or memory_order(call.q, out.shape[3])
    if not (windows and is_window(out, order)):
        out = _aligned(out) if out.stride() == order.strides else arranged(out, order)
    lse = _aligned(lse.resolve_neg().contiguous())
    if grad_lse is not None:
        grad_lse = _aligned(grad_lse.resolve_neg().contiguous())
    return Backward(out, lse, grad_out.resolve_neg(), grad_lse, wanted)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, copied where its address is none that an allocation has."""
    return tensor.clone() if tensor.data_ptr() % ALIGNED else tensor


def _gradients(
    backend: Backend, lowered: Lowered, call: Call, form: Form, results: Backward
) -> tuple[torch.Tensor | None, ...]:
    if torch.is_grad_enabled() or is_transformed():
        return differentiable_gradients(backend, lowered, call, results)
    return in_order(backend.backward(lowered, call, results), form)


_apply: Callable[..., Any] = super(torch.autograd.Function, _Attend).apply
"""``_Attend.apply`` without its look for transforms: see M29 in docs/dev/measured.md. No call comes
here within a transform."""
