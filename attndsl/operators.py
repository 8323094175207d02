"""The calls as torch operators: ``attndsl::forward``, ``backward`` and ``row_maxima``.

What torch knows of them: arguments, shapes, derivatives, operations. ``torch.compile`` and
``torch.export`` see one operator whose program is a string argument (a spec, see
:mod:`attndsl.runtime.programs`), so that a graph can be saved and run in another process. What runs
them is imported at the first run (:mod:`attndsl.runtime.operator`); this module comes with torch
(:mod:`attndsl.after_torch`).
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, get_type_hints

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from attndsl.errors import UnsupportedError


class Operands(NamedTuple):
    """What stands for a call in the operators' arguments, in the order that these have.

    (Saved graphs hold lists of one type only. Packages of AOTInductor give None for empty lists of
    tensors and of ints, so these are optional.)
    """

    spec: str
    """The program, see :mod:`attndsl.runtime.programs`."""
    backend: str
    """The backend asked for."""
    checked: bool
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tensors: list[torch.Tensor] | None
    given: list[torch.Tensor] | None
    """The params that are tensors."""
    is_given: list[bool]
    """Which of the params these are."""
    ints: list[int] | None
    """The other params that are ints or bools."""
    floats: list[float]
    """The others that are floats, and behind them the scale, if it is no default."""
    varying: torch.Tensor | None
    """(n,), fp64, on the CPU: replaces ``floats`` where one of them is another number in each run
    of a graph."""
    q_offset: int
    kv_offset: int
    q_origin: torch.Tensor | None
    """An index vector, or an offset; replaces ``q_offset``."""
    kv_origin: torch.Tensor | None
    seed: int
    deterministic: bool
    drawn: torch.Tensor | None
    """A 0-d seed; replaces ``seed``, which would be one number for all runs of a graph."""
    wide: bool
    """Whether the output is in fp32."""
    whole: list[int] | None
    """Of which larger call this is a part: its q_len, kv_len (-1 where not given), heads, kv_heads
    and batch, h_offset, b_offset, and whether each origin is an offset for each batch entry (0 or
    1); None for calls that are no parts."""
    kv_lengths: torch.Tensor | None


_TYPES: dict[Any, str] = {
    str: "str",
    bool: "bool",
    int: "SymInt",
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    list[torch.Tensor] | None: "Tensor[]?",
    list[bool]: "bool[]",
    list[float]: "float[]",
    list[int] | None: "SymInt[]?",
}
_KINDS = {name: _TYPES[kind] for name, kind in get_type_hints(Operands).items()}
_COMMON = ", ".join(f"{kind} {name}" for name, kind in _KINDS.items())
_TENSORS = tuple(name for name, kind in _KINDS.items() if kind in ("Tensor", "Tensor?"))
"""Names of single tensors among the operands."""
_LISTS = ("tensors", "given")
"""Names of lists of them."""
_RUNS = "attndsl.runtime.operator"
_ORDERS = "attndsl.backends.memory_order"
_COUNTER = "torch.utils.flop_counter"
_FLOPS = "attndsl.runtime.flops"
_LIBRARY: Any = torch.library.Library("attndsl", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"forward({_COMMON}) -> (Tensor, Tensor)")
_LIBRARY.define(f"row_maxima({_COMMON}) -> Tensor")
_LIBRARY.define(
    "backward(Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse, bool[] wants, "
    f"bool wide_gradients, bool partial, {_COMMON}) -> Tensor[]"
)


@cache
def _runs() -> Any:
    """What runs calls. It is looked up once, which takes 0.6 us."""
    return import_module(_RUNS)


def _forward(*args: Any) -> Any:
    return _runs().run_forward(*args)


def _row_maxima(*args: Any) -> Any:
    return _runs().run_row_maxima(*args)


def _backward(*args: Any) -> Any:
    return _runs().run_backward(*args)


def _fake_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = Operands(*args)
    return _empty_like(given.q, given.v.shape[3], given.wide), _fake_row_maxima(*args)


def _fake_row_maxima(*args: Any) -> torch.Tensor:
    q = Operands(*args).q
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
    given = Operands(*args)
    inputs = [given.q, given.k, given.v, *(given.tensors or ()), *(given.given or ())]
    empty = given.q.new_empty
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
    operands = Operands(*inputs)
    tensors, given = operands.tensors or [], operands.given or []
    ctx.set_materialize_grads(False)
    # Tensors are kept by save_for_backward alone, which hooks and checkpointing look into.
    single = [getattr(operands, name) for name in _TENSORS]
    ctx.save_for_backward(*single, *tensors, *given, *output)
    ctx.plain = operands._asdict() | dict.fromkeys((*_TENSORS, *_LISTS))
    ctx.counts = len(tensors), len(given)
    ctx.capture_wants = [x.is_floating_point() and x.requires_grad for x in (*tensors, *given)]


def _autograd(ctx: Any, grad_out: Any, grad_lse: Any) -> tuple[Any, ...]:
    tensor_count, given_count = ctx.counts
    # Lists of other things than tensors have one None for a gradient, unless they are empty.
    grads: dict[str, Any] = {
        name: [] if isinstance(x, list) and not x else None for name, x in ctx.plain.items()
    }
    grads |= {"tensors": [None] * tensor_count, "given": [None] * given_count}
    if grad_out is None and grad_lse is None:
        return tuple(grads.values())
    saved = ctx.saved_tensors
    *captures, out, lse = saved[len(_TENSORS) :]
    operands = ctx.plain | dict(zip(_TENSORS, saved, strict=False))
    operands |= {"tensors": captures[:tensor_count], "given": captures[tensor_count:]}
    needs = Operands(*ctx.needs_input_grad[: len(Operands._fields)])
    wants = [needs.q, needs.k, needs.v, *ctx.capture_wants]
    found = torch.ops.attndsl.backward(
        out, lse, torch.zeros_like(out) if grad_out is None else grad_out, grad_lse, wants, False,
        False, *operands.values(),
    )  # fmt: skip
    kept = [g if want else None for g, want in zip(found, wants, strict=True)]
    q, k, v, *rest = kept
    tensors, given = rest[:tensor_count], rest[tensor_count:]
    grads |= {"q": q, "k": k, "v": v, "tensors": tensors, "given": given}
    return tuple(grads.values())


def _no_second(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise UnsupportedError(
        "graphs of torch.compile have no second derivatives of a call",
        hint="call the program outside of torch.compile where create_graph=True is used",
    )


def _forward_flops(*args: Any, **rest: Any) -> int:
    """Two products over all pairs, as torch counts its own attention, less what is left out."""
    given = _operands_among(args)
    return _flops_of_products(given, given.q.shape[3] + given.v.shape[3])


def _backward_flops(*args: Any, **rest: Any) -> int:
    """Five products, of which three are along q and k's head dim: scores, dQ and dK."""
    given = _operands_among(args)
    return _flops_of_products(given, 3 * given.q.shape[3] + 2 * given.v.shape[3])


def _operands_among(args: tuple[Any, ...]) -> Operands:
    """The last of an operator's arguments, which are those of every operator."""
    return Operands(*args[-len(Operands._fields) :])


def _flops_of_products(given: Operands, width: int) -> int:
    """A multiplication and an addition for each pair and each element of rows of ``width``."""
    live, total = import_module(_FLOPS).live_share(given)
    q, k = given.q.shape, given.k.shape
    found: int = 2 * q[0] * q[1] * q[2] * k[2] * width * live // total
    return found


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
    modes = _get_current_dispatch_mode_stack()
    for operator, formula in formulas.items():
        if operator not in counter.flop_registry:
            counter.register_flop_formula(operator, get_raw=True)(formula)
        # A counter has a copy of what was registered when it was made.
        for mode in modes:
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
