"""Bound launches behind guards: the fast way of a call.

A guard is one call of C that looks at type, dispatch keys, dtype, device, shape, strides and
``requires_grad`` of all tensors (torch's own ``TensorGuards``, by which graphs of ``torch.compile``
are found). The dispatch keys tell of dispatch modes, transforms of ``torch.func``, autocast,
inference mode and lazy negations too. Calls that pass differ from the bound one in elements and
addresses alone, and launch what was bound. Steps of decoding differ in their offsets and their
number of keys too: the first call of a step binds anew, and all layers behind it launch that. All
others go by their signatures (:mod:`.signature`), which finds the same launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.autograd import forward_ad, profiler
from torch.nn import functional

from attndsl.backends.base import Backward, matmul_precision
from attndsl.backends.log_sum import public_lse
from attndsl.foundation.scalars import number_key
from attndsl.ir import Op, toposort
from attndsl.passes.int_ranges import POSITION_LIMIT
from attndsl.settings import asks_to_verify

from .autograd import ALIGNED, RecordedCall, gradients_of_saved, is_recorded, modes_on
from .batched_gradients import refuse_vectorized
from .chunked_autograd import is_transformed
from .distributed_checks import OF_TORCH
from .double_backward import wants_of
from .options import IN_KEY, NAMES, InKey
from .value_checks import is_of_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attndsl.backends.base import Backend, BoundForward, Call
    from attndsl.backends.dense.vjp import Tensors
    from attndsl.ir import Program
    from attndsl.pipeline import Lowered

    from .sub_calls import Terms

_MOST_BACKWARDS = 16
"""Bound backwards of one launch; others find out about each call anew."""
_NUMBERS = frozenset((bool, int, float))
_FIXED = frozenset((bool, torch.dtype, type(None)))
"""Types of the options that a launch is bound with: equal ones are one object."""
_OFFSETS = ("q_offset", "kv_offset")
_BY_VALUE = frozenset(("scale", *_OFFSETS))
"""Options that a launch is bound with by their values; offsets may be tensors of entries too."""
_OF_ENTRIES = frozenset(("kv_lengths", "q_offset"))
"""Options with a number for each batch entry, which kernels of parts of calls look at."""
_is_deterministic = torch._C._get_deterministic_algorithms
_is_grad_enabled = torch.is_grad_enabled


class _Guard:
    """Test of tensors and of torch's state, by those of one call."""

    __slots__ = ("_check", "_deterministic", "_grad_mode", "_precision")

    def __init__(self, tensors: Tensors, any_keys: bool = False) -> None:
        """Pass what is like ``tensors``; ``any_keys`` for any number of keys and their strides."""
        sizes: Any = [[*x.shape] for x in tensors]
        strides: Any = [[*x.stride()] for x in tensors]
        if any_keys:
            for place in (1, 2):
                sizes[place][2], strides[place][:3] = None, [None] * 3
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


class Differences(NamedTuple):
    """Differences that calls may have from a bound one, besides elements and addresses."""

    steps: bool = False
    """True for offsets: nothing that was found out about the call depends on them."""
    any_keys: bool = False
    """True for the number of keys as well."""
    of_options: tuple[tuple[str, str], ...] = ()
    """Captures that only the program of a part has, and the options that give them."""


class _StepForward(NamedTuple):
    """A bound forward, its guard, and the options that it is bound with by value."""

    guard: _Guard
    values: list[Any]
    forward: BoundForward


class _StepBinder:
    """Binds calls that differ in their offsets, and maybe in their number of keys: see M68."""

    __slots__ = ("_backend", "_guard", "_lowered", "_scale", "_template")

    def __init__(
        self, backend: Backend, lowered: Lowered, call: Call, scale: object, any_keys: bool
    ) -> None:
        self._backend, self._lowered, self._template = backend, lowered, call.emptied()
        self._scale = number_key(scale)
        self._guard = _Guard(call.flatten()[1], any_keys)

    def bound(self, operands: Tensors, given: Mapping[str, Any]) -> BoundForward | None:
        """The forward of this step; None for what no step may have."""
        q, k, v = operands[:3]
        template, offsets = self._template, [given.get(name, 0) for name in _OFFSETS]
        if not self._guard.passes(operands) or k.shape[2] != v.shape[2]:
            return None
        for offset, rows in zip(offsets, (q.shape[2], k.shape[2]), strict=True):
            if type(offset) is not int or abs(offset) + rows >= POSITION_LIMIT:
                return None
        if number_key(given.get("scale")) != self._scale:
            return None
        sizes = {**template.sizes, "kv_len": k.shape[2]}
        call = template.of(operands)._replace(sizes=sizes, signature=None)
        call = call._replace(q_offset=offsets[0], kv_offset=offsets[1])
        return self._backend.bound_forward(self._lowered, call)


class GuardedLaunch:
    """Launches of calls that differ in elements and addresses alone, bound once.

    A look-up of the launch and of its arguments takes most of the host's time of a call: see M54 in
    docs/dev/measured.md. What they have in common is found out once. For the guard see M65.
    """

    __slots__ = (
        "_backwards", "_bound", "_captures", "_is_recorded", "_keywords", "_numbers", "_options",
        "_params", "_recorded", "_return_lse", "_steps", "_values",
    )  # fmt: skip

    def __init__(
        self, backend: Backend, lowered: Lowered, call: Call, given: Mapping[str, Any],
        captures: Mapping[str, Any], how: Differences,
    ) -> None:  # fmt: skip
        """Bind calls like ``call``.

        Args:
            backend: The backend that runs it.
            lowered: The program.
            call: One call; its params are numbers, see :func:`guarded_launch`.
            given: Keywords of the call.
            captures: Captures by name.
            how: Further differences that calls may have.
        """
        form, tensors = call.flatten()
        self._params = tuple(x for x in call.params if x in captures)
        options = dict(how.of_options)
        self._captures = tuple((name in options, options.get(name, name)) for name in form.tensors)
        self._values = tuple(x for x in given if x in _BY_VALUE and x not in options.values())
        apart = (*self._values, *options.values())
        self._options = tuple(
            (name, x) for name, x in given.items() if name in NAMES and name not in apart
        )
        self._keywords = frozenset(given)
        self._numbers = self._keys_of(captures)
        self._is_recorded = is_recorded(backend, lowered, call)
        self._return_lse = bool(given.get("return_lse"))
        forward = backend.bound_forward(lowered, call)
        self._bound = _StepForward(_Guard(tensors), [given[x] for x in self._values], forward)
        self._steps = None
        if how.steps and not self._is_recorded:
            self._steps = _StepBinder(backend, lowered, call, given.get("scale"), how.any_keys)
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
            more = [given[x] if is_option else captures[x] for is_option, x in self._captures]
            operands = (*operands, *more)
        guard, values, forward = self._bound
        if (self._values and not self._are_values(given, values)) or not guard.passes(operands):
            found = None if self._steps is None else self._steps.bound(operands, given)
            if found is None:
                return None
            forward, values = found, [given[x] for x in self._values]
            self._bound = _StepForward(_Guard(operands), values, forward)
        if self._is_recorded:
            return _apply(self, *operands)
        out, lse = forward(operands)
        return (out, public_lse(lse)) if self._return_lse else out

    def _are_values(self, given: Mapping[str, Any], values: list[Any]) -> bool:
        for name, value in zip(self._values, values, strict=True):
            x = given[name]
            if x is not value and number_key(x) != number_key(value):
                return False
        return True

    def forward(self, ctx: Any, tensors: Tensors) -> Any:
        """The forward of an autograd node."""
        out, lse = self._bound.forward(tensors)
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
    captures: Mapping[str, Any], how: Differences,
) -> GuardedLaunch | None:  # fmt: skip
    """Bind calls like ``call``; None where more is to be done for each of them.

    That is so where torch listens to it, where an address is unusual, where a param is a tensor,
    and where an option is no constant. The arguments are those of :class:`GuardedLaunch`.
    """
    form, tensors = call.flatten()
    options = dict(how.of_options).values()
    own = [(name, x) for name, x in given.items() if name in NAMES and name not in options]
    numbers = all(type(x) in _NUMBERS for x in call.params.values())
    numbers = numbers and len(tensors) == len(form.tensors) + 3
    if not numbers or not _is_plain(tensors) or not all(_is_constant(*each) for each in own):
        return None
    return GuardedLaunch(backend, lowered, call, given, captures, how)


def _is_constant(name: str, value: object) -> bool:
    if name in _OFFSETS:
        return type(value) is int
    return type(value) in _FIXED or (name == "scale" and type(value) in _NUMBERS)


def differences_of(
    program: Program, terms: Terms | None, options: Mapping[str, Any], warns: bool
) -> Differences:
    """The way in which calls like one with these ``options`` are bound.

    Args:
        program: The program as it is written.
        terms: Terms of a part of a call.
        options: The call's keywords.
        warns: True to warn of lengths that do not fit the mask.
    """
    if terms is not None:
        return Differences(of_options=terms.captures)
    steps = not program.by_token
    placed = any(options.get(name) is not None for name in _OFFSETS)
    any_keys = steps and (placed or not warns) and not (_has_keys(program) or asks_to_verify())
    return Differences(steps, any_keys)


def _has_keys(program: Program) -> bool:
    """Return True if the number of keys decides about a tensor's shape."""
    items = toposort(*[dim for decl in program.tensors for dim in decl.dims])
    return any(item.op is Op.SIZE and item.value == "kv_len" for item in items)


def is_bindable(options: Mapping[str, Any], terms: Terms | None, marks: bool) -> bool:
    """Return True if bound calls may have ``options`` whose values their signatures do not have.

    Args:
        options: The call's keywords.
        terms: Terms of a part of a call.
        marks: True if kernels check the numbers of batch entries.
    """
    kinds = [name for name in options if IN_KEY.get(name) is InKey.KIND]
    if terms is None:
        return all(name in _BY_VALUE or options[name] is None for name in kinds)
    if not marks or terms.narrowed or terms.draws is not None:
        return False
    given = [option for _, option in terms.captures]
    return all(name in _OF_ENTRIES and is_of_entries(options.get(name)) for name in given) and all(
        name in _BY_VALUE or name in given or options[name] is None for name in kinds
    )


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
