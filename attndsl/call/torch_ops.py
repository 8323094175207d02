"""The calls as torch operators: ``attndsl::forward``, ``backward`` and ``row_maxima``.

What torch knows of them: arguments, shapes, derivatives, operations. ``torch.compile`` and
``torch.export`` see one operator whose program is a string argument (a spec, see
:mod:`attndsl.runtime.program_store`), so that a graph can be saved and run in another process. What
runs them is imported at the first run (:mod:`.torch_ops_impl`); this module comes with torch
(:mod:`attndsl.foundation.torch_import_hook`).
"""

from __future__ import annotations

import sys
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_map

from attndsl.errors import UnsupportedError
from attndsl.foundation.caches import memoised

from .batched_gradients import refuse
from .op_encoding import (
    SCHEMA,
    AskedGradients,
    OpArguments,
    heading,
    of_gradients,
    parts_of_gradients,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .op_encoding import EncodedCall


_RUNS = "attndsl.call.torch_ops_impl"
_ORDERS = "attndsl.backends.memory_order"
_COUNTER = "torch.utils.flop_counter"
_FLOPS = "attndsl.inspection.flops"
_LIBRARY: Any = torch.library.Library("attndsl", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"forward({SCHEMA}) -> (Tensor, Tensor)")
_LIBRARY.define(f"row_maxima({SCHEMA}) -> Tensor")
_LIBRARY.define(f"backward({SCHEMA}) -> Tensor[]")


@memoised("modules that run operators", None)
def _runs() -> Any:
    """Module that runs calls. It is looked up once, which takes 0.6 us."""
    return import_module(_RUNS)


def _forward(tensors: Any, what: str, ints: Any, floats: Any) -> Any:
    return _runs().run_forward(tensors, what, ints, floats)


def _row_maxima(tensors: Any, what: str, ints: Any, floats: Any) -> Any:
    return _runs().run_row_maxima(tensors, what, ints, floats)


def _backward(tensors: Any, what: str, ints: Any, floats: Any) -> Any:
    return _runs().run_backward(tensors, what, ints, floats)


def _fake_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = unpacked(*args)
    out = _empty_like(given.q, given.v.shape[3], given.wide)
    return out, _rows_of(given.q, 2)


def _fake_row_maxima(tensors: Any, *rest: Any) -> torch.Tensor:
    q = tensors[0]
    return _rows_of(q)


def _rows_of(q: torch.Tensor, *before: int) -> torch.Tensor:
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    found: torch.Tensor = q.new_empty((*before, q.shape[0], q.shape[1], q.shape[2]), dtype=kind)
    return found


def _fake_backward(tensors: Any, what: str, ints: Any, floats: Any) -> list[torch.Tensor]:
    _, asked, inputs, _ = parts_of_gradients(tensors, what)
    empty = inputs[0].new_empty
    found = []
    # Behind what has gradients may be tensors that tell positions.
    for place, (x, want) in enumerate(zip(inputs, asked.wants, strict=False)):
        if not want:
            found.append(empty(0, dtype=torch.float32))
        else:
            own = place < 3
            found.append(
                _empty_like(x, x.shape[3], asked.wide) if own else empty(x.shape, dtype=x.dtype)
            )
    return found


def _empty_like(like: torch.Tensor, width: int, wide: bool) -> torch.Tensor:
    """Empty tensor like a backend's result for ``like``, of its memory order; fp32 if ``wide``."""
    order = import_module(_ORDERS).memory_order(like, width, _less)
    found: torch.Tensor = order.empty(like, torch.float32 if wide else None)
    return found


def _less(a: int, b: int) -> bool:
    """Return True if ``a < b``; False where a graph is for sizes that depend on data."""
    if type(a) is int and type(b) is int:
        return a < b
    symbolic = import_module("torch.fx.experimental.symbolic_shapes")
    return bool(symbolic.guard_or_false(a < b))


class AttnDSLForward(torch.autograd.Function):
    """``attndsl::forward`` with its derivative."""

    @staticmethod
    def forward(
        ctx: Any, below: Any, what: str, ints: Any, floats: Any, *tensors: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tensors come one by one, as torch asks of what has gradients."""
        ctx.set_materialize_grads(False)
        with _BELOW():
            found: Any = _OPERATORS["forward"].redispatch(below, [*tensors], what, ints, floats)
        out, lse = found
        ctx.save_for_backward(*tensors, out, lse)
        ctx.rest = what, ints, floats
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Any, grad_lse: Any) -> tuple[Any, ...]:
        """Gradient of each argument, or None."""
        plain = (None,) * 4
        *tensors, out, lse = ctx.saved_tensors
        if grad_out is None and grad_lse is None:
            return (*plain, *[None] * len(tensors))
        wants = ctx.needs_input_grad[len(plain) :][: heading(ctx.rest[0]).inputs]
        results = [out, lse, torch.zeros_like(out) if grad_out is None else grad_out]
        if grad_lse is not None:
            # Users get the sum of the two parts, so that both have the same gradient.
            results.append(grad_lse[0])
        asked = AskedGradients(wants, has_lse=grad_lse is not None)
        found = torch.ops.attndsl.backward(
            *of_gradients(OpArguments(tensors, *ctx.rest), results, asked)
        )
        grads = [g if want else None for g, want in zip(found, wants, strict=True)]
        return (*plain, *grads, *[None] * (len(tensors) - len(wants)))


class AttnDSLBackward(torch.autograd.Function):
    """``attndsl::backward``, which has no derivative. Without this torch would take it to be 0."""

    @staticmethod
    def forward(
        ctx: Any, below: Any, what: str, ints: Any, floats: Any, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        """Run ``attndsl::backward`` below autograd; see :class:`AttnDSLForward`."""
        with _BELOW():
            return tuple(_OPERATORS["backward"].redispatch(below, [*tensors], what, ints, floats))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Refuse."""
        raise UnsupportedError(
            "graphs of torch.compile have no second derivatives of a call",
            hint="call the program outside of torch.compile where create_graph=True is used",
        )


_BELOW = torch._C._AutoDispatchBelowAutograd
_AFTER = torch._C._after_autograd_keyset
_HARDWARE = frozenset(
    getattr(torch._C.DispatchKey, name) for name in ("CPU", "CUDA", "BackendSelect")
)
"""Dispatch keys with nothing between autograd and the kernels of a call."""


@memoised("sets of dispatch keys", None)
def _is_above_hardware(keys: int) -> bool:
    """Return True if a call runs right after autograd: sets of keys take long to look at."""
    below = torch._C.DispatchKeySet.from_raw_repr(keys) & _AFTER
    return below.highestPriorityTypeId() in _HARDWARE


def _refuse_tangents(tensors: Any) -> None:
    """Refuse tensors with tangents, which the kernels of operators drop without a word."""
    unpack: Any = forward_ad.unpack_dual
    if any(unpack(x).tangent is not None for x in tensors):
        raise UnsupportedError(
            "operators, as graphs and exported programs call them, have no tangents",
            hint="call the program itself, outside of graphs, where tangents are wanted",
        )


def _one_by_one(operator: Any, info: Any, in_dims: Any, *args: Any) -> tuple[Any, Any]:
    """An operator under ``torch.vmap``: an entry after the other. Programs themselves have more."""
    tensors, *rest = args
    if info.batch_size == 0:
        raise UnsupportedError(
            "torch.vmap has no entries to call an operator for",
            hint="leave the call out where a batch is empty",
        )
    found = [
        operator(
            [x if dim is None else x.select(dim, entry)
             for x, dim in zip(tensors, in_dims[0], strict=True)], *rest,
        )
        for entry in range(info.batch_size)
    ]  # fmt: skip
    stacked = tree_map(lambda *each: torch.stack(each), *found)
    return stacked, tree_map(lambda _: 0, stacked)


def _differentiable(name: str, kernel: Callable[..., Any], function: Any) -> Callable[..., Any]:
    """Make the kernel that runs an operator where torch differentiates.

    ``torch.library.register_autograd`` does the same and takes 20 us more, for arguments of any
    kind and for calls that need no gradient: see M53 in docs/dev/measured.md.
    """

    def run(keys: Any, tensors: Any, what: str, ints: Any, floats: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(tensors)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return function.apply(keys & _AFTER, what, ints, floats, *tensors)
        if _is_above_hardware(keys.raw_repr()):
            return kernel(tensors, what, ints, floats)
        with _BELOW():
            return _OPERATORS[name].redispatch(keys & _AFTER, tensors, what, ints, floats)

    return run


def _forward_flops(*args: Any, **rest: Any) -> int:
    """FLOPs of two products over the live tiles, counted as torch counts its own attention."""
    given = unpacked(*args)
    return _flops_of_products(given, given.q.shape[3] + given.v.shape[3])


def _backward_flops(tensors: Any, what: str, ints: Any, floats: Any, **rest: Any) -> int:
    """Five products, of which three are along q and k's head dim: scores, dQ and dK."""
    _, _, inputs, of_call = parts_of_gradients(tensors, what)
    given = unpacked(inputs, of_call, ints, floats)
    return _flops_of_products(given, 3 * given.q.shape[3] + 2 * given.v.shape[3])


def _flops_of_products(given: EncodedCall, width: int) -> int:
    """A multiplication and an addition for each pair and each element of rows of ``width``."""
    live, total = import_module(_FLOPS).live_share(given)
    q, k = given.q.shape, given.k.shape
    found: int = 2 * q[0] * q[1] * q[2] * k[2] * width * live // total
    return found


def tell_counters() -> None:
    """Make the numbers of operations known to ``FlopCounterMode``.

    To those that are on as well, where torch has not put them aside to run an operator.

    Torch's module of it takes long to import, so that this waits until somebody else has done so.
    """
    counter = sys.modules.get(_COUNTER)
    if counter is None:
        return
    for operator, formula in _FORMULAS.items():
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator, get_raw=True)(formula)
    if not torch._C._len_torch_dispatch_stack():
        return
    # A counter has a copy of what was registered when it was made.
    for mode in _get_current_dispatch_mode_stack():
        registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
        if isinstance(registry, dict):
            for operator in _FORMULAS:
                registry.setdefault(operator, counter.flop_registry[operator])


for _name, _kernel, _fake in (
    ("forward", _forward, _fake_forward),
    ("backward", _backward, _fake_backward),
    ("row_maxima", _row_maxima, _fake_row_maxima),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, refuse, "Batched")
    torch.library.register_fake(f"attndsl::{_name}", _fake, lib=_LIBRARY)
    _operator = getattr(torch.ops.attndsl, _name).default
    torch.library.register_vmap(_operator, partial(_one_by_one, _operator), lib=_LIBRARY)
_OPERATORS = {name: getattr(torch.ops.attndsl, name).default for name in ("forward", "backward")}
for _name, _kernel, _function in (
    ("forward", _forward, AttnDSLForward), ("backward", _backward, AttnDSLBackward),
):  # fmt: skip
    _LIBRARY.impl(_name, _differentiable(_name, _kernel, _function), "Autograd", with_keyset=True)
_FORMULAS: dict[Any, Callable[..., int]] = {
    torch.ops.attndsl.forward: _forward_flops,
    torch.ops.attndsl.backward: _backward_flops,
}
tell_counters()
