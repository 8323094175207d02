"""Bound launches behind guards: the fast way of a call.

A guard is one call of C that looks at type, dispatch keys, dtype, device, shape, strides and
``requires_grad`` of all tensors (torch's own ``TensorGuards``, by which graphs of ``torch.compile``
are found). The dispatch keys tell of dispatch modes, transforms of ``torch.func``, autocast,
inference mode and lazy negations too. Calls that pass differ from the bound one in elements and
addresses alone, and launch what was bound. All others go by their signatures
(:mod:`.signature`), which finds the same launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad, profiler
from torch.nn import functional

from attndsl.backends.base import Backward, matmul_precision
from attndsl.backends.log_sum import public_lse
from attndsl.foundation.scalars import number_key

from .autograd import ALIGNED, RecordedCall, gradients_of_saved, is_recorded, modes_on
from .batched_gradients import refuse_vectorized
from .chunked_autograd import is_transformed
from .distributed_checks import OF_TORCH
from .double_backward import wants_of
from .options import NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attndsl.backends.base import Backend, Call
    from attndsl.backends.dense.vjp import Tensors
    from attndsl.pipeline import Lowered

_MOST_BACKWARDS = 16
"""Bound backwards of one launch; others find out about each call anew."""
_NUMBERS = frozenset((bool, int, float))
_FIXED = frozenset((bool, torch.dtype, type(None)))
"""Types of the options that a launch is bound with: equal ones are one object."""
_is_deterministic = torch._C._get_deterministic_algorithms
_is_grad_enabled = torch.is_grad_enabled


class _Guard:
    """Test of tensors and of torch's state, by those of one call."""

    __slots__ = ("_check", "_deterministic", "_grad_mode", "_precision")

    def __init__(self, tensors: Tensors) -> None:
        sizes: Any = [[*x.shape] for x in tensors]
        strides: Any = [[*x.stride()] for x in tensors]
        self._check: Callable[..., bool] = TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        self._grad_mode, self._deterministic = _is_grad_enabled(), _is_deterministic()
        self._precision = matmul_precision() if tensors[0].dtype is torch.float32 else None

    def passes(self, tensors: Tensors) -> bool:
        """Return True if the call of ``tensors`` differs in elements and addresses alone."""
        if (
            not self._check(*tensors)
            or _is_grad_enabled() is not self._grad_mode
            or _is_deterministic() is not self._deterministic
            or _is_listened_to()
            or (self._precision is not None and self._precision != matmul_precision())
        ):
            return False
        addresses = 0
        for x in tensors:
            addresses |= x.data_ptr()
        return not addresses % ALIGNED


class GuardedLaunch:
    """Launches of calls that differ in elements and addresses alone, bound once.

    A look-up of the launch and of its arguments takes most of the host's time of a call: see M54 in
    docs/dev/measured.md. What they have in common is found out once. For the guard see M65.
    """

    __slots__ = (
        "_backwards", "_captures", "_forward", "_guard", "_is_recorded", "_keywords", "_numbers",
        "_options", "_params", "_recorded", "_return_lse",
    )  # fmt: skip

    def __init__(
        self, backend: Backend, lowered: Lowered, call: Call, given: Mapping[str, Any],
        captures: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Bind calls like ``call``.

        Args:
            backend: The backend that runs it.
            lowered: The program.
            call: One call; its params are numbers, see :func:`guarded_launch`.
            given: Keywords of the call.
            captures: Captures by name.
        """
        form, tensors = call.flatten()
        self._captures, self._params = form.tensors, tuple(x for x in call.params if x in captures)
        self._options = tuple((name, x) for name, x in given.items() if name in NAMES)
        self._keywords = frozenset(given)
        self._numbers = self._keys_of(captures)
        self._guard = _Guard(tensors)
        self._is_recorded = is_recorded(backend, lowered, call)
        self._return_lse = bool(given.get("return_lse"))
        self._forward = backend.bound_forward(lowered, call)
        self._backwards: tuple[_GuardedBackward, ...] = ()
        self._recorded = RecordedCall(backend, lowered, form, [])
        """Without strides before the first forward."""

    def _keys_of(self, captures: Mapping[str, Any]) -> list[object]:
        return [number_key(captures[name]) for name in self._params]

    def __call__(
        self, operands: Tensors, given: Mapping[str, Any], captures: Mapping[str, Any]
    ) -> Any:
        """``out`` or ``(out, lse)``; None for a call that is not like the bound one.

        Args:
            operands: q, k and v.
            given: All keywords of the call.
            captures: Captures by name; the keywords, if these are all there are.
        """
        if given or self._keywords:
            if given.keys() != self._keywords:
                return None
            for name, value in self._options:
                if given[name] is not value:
                    return None
        if self._params and self._keys_of(captures) != self._numbers:
            return None
        if self._captures:
            operands = *operands, *[captures[name] for name in self._captures]
        if not self._guard.passes(operands):
            return None
        if self._is_recorded:
            return _apply(self, *operands)
        out, lse = self._forward(operands)
        return (out, public_lse(lse)) if self._return_lse else out

    def forward(self, ctx: Any, tensors: Tensors) -> Any:
        """The forward of an autograd node."""
        out, lse = self._forward(tensors)
        if not self._recorded.strides:
            # In one step, since other threads may be here too.
            strides = [x.stride() for x in (*tensors, out, lse)]
            self._recorded = self._recorded._replace(strides=strides)
        ctx.set_materialize_grads(False)
        # Tensors are kept by save_for_backward alone, which hooks and checkpointing look into.
        ctx.save_for_backward(*tensors, out, lse)
        ctx.kept = self  # One attribute, since each costs time: see M20 in docs/dev/measured.md.
        # An output that nobody sees takes torch as long as an allocation.
        return (out, public_lse(lse)) if self._return_lse else out

    def gradients(
        self, needs: tuple[bool, ...], saved: Tensors, grad_out: torch.Tensor | None,
        grad_lse: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        """Gradients of the tensors; see :func:`.autograd.gradients_of_saved`."""
        if grad_out is None:
            return gradients_of_saved(self._recorded, needs, saved, grad_out, grad_lse)
        given = (*saved, grad_out) if grad_lse is None else (*saved, grad_out, grad_lse)
        for bound in self._backwards:
            if bound.takes(needs, given):
                return bound.run(given)
        refuse_vectorized(grad_out, grad_lse)
        if len(self._backwards) < _MOST_BACKWARDS and self._is_bindable(given):
            bound = _GuardedBackward(self._recorded, needs, given)
            self._backwards = *self._backwards, bound
            return bound.run(given)
        return gradients_of_saved(self._recorded, needs, saved, grad_out, grad_lse)

    def _is_bindable(self, given: Tensors) -> bool:
        """Return True if nothing else is to be done for a backward of these tensors."""
        strides = self._recorded.strides
        number = len(strides)
        return (
            not torch.is_grad_enabled()
            and _is_plain(given)
            and given[number].dtype is given[0].dtype
            and strides == [x.stride() for x in given[:number]]
            and (len(given) == number + 1 or given[-1].is_contiguous())
        )


class _GuardedBackward:
    """One bound backward behind its guard."""

    __slots__ = ("_captures", "_guard", "_launch", "_length", "_needs", "_number", "_wanted")

    def __init__(self, recorded: RecordedCall, needs: tuple[bool, ...], given: Tensors) -> None:
        backend, lowered, form, strides = recorded
        self._needs, self._captures = needs, form.tensors
        self._number, self._length = len(strides) - 2, len(given)
        self._wanted = wants_of(needs, form.tensors, form.given)
        self._guard = _Guard(given)
        call = form.call(given[: self._number])
        self._launch = backend.bound_backward(lowered, call, self._results(given))

    def _results(self, given: Tensors) -> Backward:
        out, lse, grad_out, *grad_lse = given[self._number :]
        return Backward(out, lse, grad_out, grad_lse[0] if grad_lse else None, self._wanted)

    def takes(self, needs: tuple[bool, ...], given: Tensors) -> bool:
        """Return True if a backward is like the bound one; ``given`` are as of :meth:`run`."""
        # torch's guard refuses another number of tensors by an error.
        same = needs == self._needs and len(given) == self._length
        return same and self._guard.passes(given)

    def run(self, given: Tensors) -> tuple[torch.Tensor | None, ...]:
        """Gradients of a call's tensors, in their order.

        Args:
            given: The call's tensors, output, log-sum-exp, the output's gradient, and that of the
                log-sum-exp if there is one.
        """
        found = self._launch(given[: self._number], self._results(given))
        if not self._captures:
            return found.q, found.k, found.v
        return found.q, found.k, found.v, *map(found.tensors.get, self._captures)


def guarded_launch(
    backend: Backend, lowered: Lowered, call: Call, given: Mapping[str, Any],
    captures: Mapping[str, Any],
) -> GuardedLaunch | None:  # fmt: skip
    """Bind calls like ``call``; None where more is to be done for each of them.

    That is so where torch listens to it, where an address is unusual, where a param is a tensor,
    and where an option is no constant.
    """
    _, tensors = call.flatten()
    if (
        not _is_plain(tensors) or any(type(x) not in _NUMBERS for x in call.params.values())
        or any(name in NAMES and type(x) not in _FIXED for name, x in given.items())
    ):  # fmt: skip
        return None
    return GuardedLaunch(backend, lowered, call, given, captures)


def _is_listened_to() -> bool:
    """Return True if somebody listens whom the dispatch keys of tensors do not tell of.

    These are profiles, dual numbers, and torch's ``context_parallel``.
    """
    return (
        profiler._is_profiler_enabled or forward_ad._current_level >= 0
        or functional.scaled_dot_product_attention is not OF_TORCH
    )  # fmt: skip


def _is_plain(tensors: Sequence[torch.Tensor]) -> bool:
    """Return True if nobody listens, and tensors are aligned and not lazily negated."""
    if _is_listened_to() or modes_on() or is_transformed():
        return False
    return not any(x.is_neg() or x.data_ptr() % ALIGNED for x in tensors)


class _AttendBound(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, launch: GuardedLaunch, *tensors: torch.Tensor) -> Any:
        return launch.forward(ctx, tensors)

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        return (None, *ctx.kept.gradients(needs, ctx.saved_tensors, grad_out, grad_lse))


_apply: Callable[..., Any] = super(torch.autograd.Function, _AttendBound).apply
"""``_AttendBound.apply`` without its look for transforms: see M29 in docs/dev/measured.md. No call
comes here within a transform."""
