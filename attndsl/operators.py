"""The calls as torch operators: ``attndsl::forward``, ``backward`` and ``row_maxima``.

What torch knows of them: arguments, shapes, derivatives, operations. ``torch.compile`` and
``torch.export`` see one operator whose program is a string argument (a spec, see
:mod:`attndsl.runtime.programs`), so that a graph can be saved and run in another process. What runs
them is imported at the first run (:mod:`attndsl.runtime.operator`); this module comes with torch
(:mod:`attndsl.after_torch`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attndsl.errors import UnsupportedError

_COMMON = (
    "str spec, str backend, bool checked, Tensor q, Tensor k, Tensor v, Tensor[]? tensors, "
    "Tensor[]? given, bool[] is_given, SymInt[]? ints, float[] floats, Tensor? varying, "
    "SymInt q_offset, SymInt kv_offset, Tensor? q_origin, Tensor? kv_origin, SymInt seed, "
    "bool deterministic, Tensor? drawn, bool wide, SymInt[]? whole, Tensor? kv_lengths"
)
"""``given`` are the params that are tensors, as ``is_given`` says of each; ``ints`` are the others
that are ints or bools, ``floats`` the scale and the others. ``varying`` replaces ``floats`` where
one of them is another number in each run of a graph: (n,), fp64, on the CPU. An origin is an index
vector or a 0-d offset; it replaces the offset. ``drawn`` is a 0-d seed; it replaces ``seed``, which
would be one number for all runs of a graph. ``whole`` says of which larger call this is a part: its
q_len, kv_len (-1 where not given), heads, kv_heads and batch, h_offset, b_offset, and whether each
origin is an offset for each batch entry (0 or 1); None for calls that are no parts. ``wide`` says
that the output is in fp32. (Saved graphs hold lists of one type only. Packages of AOTInductor give
None for empty lists of tensors and of ints, so these are optional.)"""

_TENSORS = (3, 4, 5, 11, 14, 15, 18, 21)
"""Places of single tensors among the arguments; 6 and 7 are lists of them."""
_RUNS = "attndsl.runtime.operator"
_ORDERS = "attndsl.backends.memory_order"
_COUNTER = "torch.utils.flop_counter"
_LIBRARY: Any = torch.library.Library("attndsl", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"forward({_COMMON}) -> (Tensor, Tensor)")
_LIBRARY.define(f"row_maxima({_COMMON}) -> Tensor")
_LIBRARY.define(
    "backward(Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse, bool[] wants, "
    f"bool wide_gradients, bool partial, {_COMMON}) -> Tensor[]"
)


def _forward(*args: Any) -> Any:
    return import_module(_RUNS).run_forward(*args)


def _row_maxima(*args: Any) -> Any:
    return import_module(_RUNS).run_row_maxima(*args)


def _backward(*args: Any) -> Any:
    return import_module(_RUNS).run_backward(*args)


def _fake_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, v = args[3], args[5]
    shape = (q.shape[0], q.shape[1], q.shape[2])
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    return _empty_like(q, v.shape[3], args[19]), q.new_empty(shape, dtype=kind)


def _fake_row_maxima(*args: Any) -> torch.Tensor:
    q = args[3]
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    found: torch.Tensor = q.new_empty((q.shape[0], q.shape[1], q.shape[2]), dtype=kind)
    return found


def _fake_backward(
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    wants: list[bool],
    wide: bool,
    partial: bool,
    *args: Any,
) -> list[torch.Tensor]:
    inputs = [args[3], args[4], args[5], *(args[6] or ()), *(args[7] or ())]
    empty = args[3].new_empty
    found = []
    for place, (x, want) in enumerate(zip(inputs, wants, strict=True)):
        if not want:
            found.append(empty(0, dtype=torch.float32))
        else:
            own = place < 3
            found.append(_empty_like(x, x.shape[3], wide) if own else empty(x.shape, dtype=x.dtype))
    return found


def _empty_like(like: torch.Tensor, width: int, wide: bool) -> torch.Tensor:
    """What backends return for ``like``, of its memory order; in fp32 if it is ``wide``."""
    order = import_module(_ORDERS).memory_order(like, width, _less)
    found: torch.Tensor = order.empty(like, torch.float32 if wide else None)
    return found


def _less(a: int, b: int) -> bool:
    """Whether ``a < b``; False where a graph is for sizes that depend on data."""
    if type(a) is int and type(b) is int:
        return a < b
    symbolic = import_module("torch.fx.experimental.symbolic_shapes")
    return bool(symbolic.guard_or_false(a < b))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    tensors, given = (x or [] for x in inputs[6:8])
    ctx.set_materialize_grads(False)
    # Tensors are kept by save_for_backward alone, which hooks and checkpointing look into.
    single = [inputs[place] for place in _TENSORS]
    ctx.save_for_backward(*single, *tensors, *given, *output)
    ctx.plain = [None if place in (*_TENSORS, 6, 7) else x for place, x in enumerate(inputs)]
    ctx.counts = len(tensors), len(given)
    ctx.capture_wants = [x.is_floating_point() and x.requires_grad for x in (*tensors, *given)]


def _autograd(ctx: Any, grad_out: Any, grad_lse: Any) -> tuple[Any, ...]:
    tensor_count, given_count = ctx.counts
    # Lists of other things than tensors have one None for a gradient, unless they are empty.
    grads: list[Any] = [[] if isinstance(x, list) and not x else None for x in ctx.plain]
    grads[6], grads[7] = [None] * tensor_count, [None] * given_count
    if grad_out is None and grad_lse is None:
        return tuple(grads)
    saved = ctx.saved_tensors
    *captures, out, lse = saved[len(_TENSORS) :]
    args = list(ctx.plain)
    for place, tensor in zip(_TENSORS, saved, strict=False):
        args[place] = tensor
    args[6], args[7] = captures[:tensor_count], captures[tensor_count:]
    wants = [*ctx.needs_input_grad[3:6], *ctx.capture_wants]
    found = torch.ops.attndsl.backward(
        out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse, wants, False,
        False, *args,
    )  # fmt: skip
    kept = [g if want else None for g, want in zip(found, wants, strict=True)]
    grads[3:6] = kept[:3]
    grads[6], grads[7] = kept[3 : 3 + tensor_count], kept[3 + tensor_count :]
    return tuple(grads)


def _no_second(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise UnsupportedError(
        "graphs of torch.compile have no second derivatives of a call",
        hint="call the program outside of torch.compile where create_graph=True is used",
    )


def _forward_flops(*args: Any, **rest: Any) -> int:
    """Two products over all pairs, as torch counts its own attention: masks take nothing off."""
    q, k, v = args[3:6]
    return _flops_of_products(q, k, q[3] + v[3])


def _backward_flops(*args: Any, **rest: Any) -> int:
    """Five products, of which three are along q and k's head dim: scores, dQ and dK."""
    q, k, v = args[10:13]
    return _flops_of_products(q, k, 3 * q[3] + 2 * v[3])


def _flops_of_products(q: torch.Size, k: torch.Size, width: int) -> int:
    """A multiplication and an addition for each pair and each element of rows of ``width``."""
    return 2 * q[0] * q[1] * q[2] * k[2] * width


def tell_counters() -> None:
    """Make the numbers of operations known to ``FlopCounterMode``, also to those that are on.

    Torch's module of it takes long to import, so that this waits until somebody else has done so.
    """
    counter = sys.modules.get(_COUNTER)
    if counter is None:
        return
    formulas = {
        torch.ops.attndsl.forward: _forward_flops,
        torch.ops.attndsl.backward: _backward_flops,
    }
    for operator, formula in formulas.items():
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator)(formula)
        # A counter has a copy of what was registered when it was made.
        for mode in _get_current_dispatch_mode_stack():
            registry = getattr(getattr(mode, "counter", mode), "flop_registry", None)
            if isinstance(registry, dict):
                registry.setdefault(operator, counter.flop_registry[operator])


for _name, _kernel, _fake in (
    ("forward", _forward, _fake_forward),
    ("backward", _backward, _fake_backward),
    ("row_maxima", _row_maxima, _fake_row_maxima),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attndsl::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("attndsl::forward", _autograd, setup_context=_setup, lib=_LIBRARY)
# Without it torch would take second derivatives to be zero.
torch.library.register_autograd("attndsl::backward", _no_second, lib=_LIBRARY)
tell_counters()
