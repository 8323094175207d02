"""Differentiable calls of backends whose kernels torch cannot look into."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad, profiler
from torch.nn import functional

from attndsl.backends.base import Backward, matmul_precision
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

_MOST_BACKWARDS = 16
"""Bound backwards of one prepared call. Those of further strides are bound each time."""
_is_within_transform = torch._C._are_functorch_transforms_active
modes_on = torch._C._len_torch_dispatch_stack
"""Returns the number of dispatch modes that are on."""
if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.backends.base import Backend, BoundBackward, Call, CallGradients, Form
    from attndsl.backends.dense.vjp import Tensors
    from attndsl.backends.memory_order import MemoryOrder
    from attndsl.pipeline import Lowered


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
    # torch's own gradient of a product lets what is not finite reach all of its rows.
    own = not backend.differentiable or lowered.program.bounded
    if own and torch.is_grad_enabled() and needs_grad(call):
        form, tensors = call.flatten()
        if first:
            needs = tuple(x.requires_grad for x in tensors)
            with suppress(AttnDSLError):  # What cannot run is refused where it would.
                backend.start(lowered, call, wants_of(needs, form.tensors, form.given))
        found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] = _apply(
            (backend, lowered, call, form, return_lse, None), *tensors
        )
        return found
    out, lse = backend.forward(lowered, call)
    return (out, public_lse(lse)) if return_lse else out


class BoundCall:
    """Launches of calls that differ in elements and addresses alone, bound once.

    A look-up of the launch and of its arguments takes most of the host's time of a call. What they
    have in common is found out once (see M54 in docs/measured.md).
    """

    __slots__ = ("backend", "backwards", "form", "forward", "lowered", "precision", "strides")

    def __init__(self, backend: Backend, lowered: Lowered, call: Call) -> None:
        """See :func:`bound_call`."""
        self.backend, self.lowered = backend, lowered
        self.form, _ = call.flatten()
        self.forward = backend.bound_forward(lowered, call)
        self.precision = matmul_precision() if call.q.dtype is torch.float32 else None
        self.backwards: dict[object, BoundBackward] = {}
        """Bound backwards by wanted gradients, strides of the output's gradient, and presence of
        lse's."""
        self.strides: list[tuple[int, ...]] | None = None
        """Strides of what a backward gets: tensors, output, log-sum-exp. The first call tells."""


def bound_call(backend: Backend, lowered: Lowered, call: Call) -> BoundCall | None:
    """Bind calls like ``call``; None where torch listens to it, or an address is unusual."""
    _, tensors = call.flatten()
    return BoundCall(backend, lowered, call) if _is_usual(tensors) else None


def attend_bound(bound: BoundCall, tensors: Tensors, return_lse: bool) -> Any:
    """``out`` or ``(out, lse)`` of bound calls; None for one that has to be looked at.

    Args:
        bound: What was bound.
        tensors: q, k, v, and captures in their order.
        return_lse: Whether lse is asked for.
    """
    if not _is_usual(tensors) or (
        bound.precision is not None and bound.precision != matmul_precision()
    ):
        return None
    if torch.is_grad_enabled() and True in [x.requires_grad for x in tensors]:
        job = bound.backend, bound.lowered, None, bound.form, return_lse, bound
        return _apply(job, *tensors)
    out, lse = bound.forward(tensors)
    return (out, public_lse(lse)) if return_lse else out


def _is_usual(tensors: Tensors) -> bool:
    """Return True if no listener of torch is on, and tensors are aligned and not lazily negated.

    Listeners are profiles, modes, transforms and torch's ``context_parallel``.
    """
    if (
        profiler._is_profiler_enabled or modes_on() or _is_within_transform()
        or forward_ad._current_level >= 0 or functional.scaled_dot_product_attention is not OF_TORCH
    ):  # fmt: skip
        return False
    bits = 0
    for x in tensors:
        if x.is_neg():
            return False
        bits |= x.data_ptr()
    return not bits % ALIGNED


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
        # One argument and one attribute, since each costs time: see M20 in docs/measured.md.
        backend, lowered, call, form, return_lse, bound = job
        out, lse = backend.forward(lowered, call) if bound is None else bound.forward(tensors)
        strides = None if bound is None else bound.strides
        if strides is None:
            strides = [x.stride() for x in (*tensors, out, lse)]
            if bound is not None:
                bound.strides = strides
        ctx.set_materialize_grads(False)
        # Tensors are kept by save_for_backward alone, which hooks and checkpointing look into.
        ctx.save_for_backward(*tensors, out, lse)
        ctx.kept = backend, lowered, form, bound, strides
        # An output that nobody sees takes torch as long as an allocation.
        return (out, public_lse(lse)) if return_lse else out

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * len(ctx.needs_input_grad)
        backend, lowered, form, bound, strides = ctx.kept
        saved = ctx.saved_tensors
        *tensors, out, lse = saved
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        wanted = wants_of(ctx.needs_input_grad[1:], form.tensors, form.given)
        results = Backward(out, lse, grad_out, grad_lse, wanted)
        is_laid_out_anew = strides != [x.stride() for x in saved]
        if (
            bound is not None
            and not is_laid_out_anew
            and _is_like(bound, saved, grad_out, grad_lse)
        ):
            found = _bound_gradients(bound, tensors, results)
            captures = [found.tensors.get(name) for name in form.tensors]
            return (None, found.q, found.k, found.v, *captures)
        refuse_vectorized(grad_out, grad_lse)
        call = form.call(tensors)
        if (
            call.signature is None or is_laid_out_anew
            or (out.data_ptr() | lse.data_ptr()) % ALIGNED or grad_out.is_neg()
            or (grad_lse is not None and (grad_lse.is_neg() or grad_lse.data_ptr() % ALIGNED))
        ):  # fmt: skip
            # Hooks of saved tensors, such as torch's save_on_cpu, may lay them out anew.
            call, results = _readable(call), settled(call, results)
        if profiler._is_profiler_enabled:
            with event_of_call(backend, lowered, call, BACKWARD):
                return (None, *_gradients(backend, lowered, call, form, results))
        return (None, *_gradients(backend, lowered, call, form, results))


def _is_like(
    bound: BoundCall, saved: Tensors, grad_out: torch.Tensor, grad_lse: torch.Tensor | None
) -> bool:
    """Return True if a backward is like those that are bound, and is not differentiated itself."""
    given = (*saved, grad_out) if grad_lse is None else (*saved, grad_out, grad_lse)
    return (
        not torch.is_grad_enabled() and grad_out.dtype is saved[0].dtype
        and (grad_lse is None or grad_lse.is_contiguous()) and _is_usual(given)
        and (bound.precision is None or bound.precision == matmul_precision())
    )  # fmt: skip


def _bound_gradients(bound: BoundCall, tensors: Tensors, results: Backward) -> CallGradients:
    """Gradients by a bound launch; the first one of its kind is bound."""
    key = results.wanted, results.grad_out.stride(), results.grad_lse is None
    run = bound.backwards.get(key)
    if run is None:
        call = bound.form.call(tensors)
        run = bound.backend.bound_backward(bound.lowered, call, results)
        if len(bound.backwards) < _MOST_BACKWARDS:
            bound.backwards[key] = run
    return run(tensors, results)


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
"""``_Attend.apply`` without its look for transforms: see M29 in docs/measured.md. No call comes
here within a transform."""
