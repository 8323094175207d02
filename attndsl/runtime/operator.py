"""The calls as torch operators, for graphs: ``attndsl::forward`` and ``attndsl::backward``.

``torch.compile`` and ``torch.export`` see one operator whose program is a string argument (a spec,
see :mod:`attndsl.runtime.programs`), so that a graph can be saved and run in another process once
this module is imported. Eager calls do not come this way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Call, Wants
from attndsl.errors import UnsupportedError
from attndsl.ir import DType

from .arguments import bind_dims
from .dispatch import backend_of
from .programs import lowered_program
from .seed import seed_argument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attndsl.pipeline import Lowered

_COMMON = (
    "str spec, str backend, bool checked, Tensor q, Tensor k, Tensor v, Tensor[] tensors, "
    "Tensor[] given, bool[] is_given, Scalar[] numbers, float scale, SymInt q_offset, "
    "SymInt kv_offset, Tensor? q_origin, Tensor? kv_origin, int seed, bool deterministic, "
    "Tensor? drawn"
)
"""``given`` are the params that are tensors, as ``is_given`` says of each; ``numbers`` the others.
An origin is an index vector or a 0-d offset; it replaces the offset. ``drawn`` is a 0-d seed; it
replaces ``seed``, which would be one number for all runs of a graph."""

_LIBRARY: Any = torch.library.Library("attndsl", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"forward({_COMMON}) -> (Tensor, Tensor)")
_LIBRARY.define(
    f"backward(Tensor out, Tensor lse, Tensor grad_out, Tensor? grad_lse, bool[] wants, {_COMMON})"
    " -> Tensor[]"
)


def attend_in_graph(
    spec: str, backend: str, checked: bool, call: Call, drawn: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(out, lse)`` through the operator; ``drawn`` is a seed that replaces the call's."""
    params = list(call.params.values())
    is_given = [isinstance(p, torch.Tensor) for p in params]
    q_is_tensor = isinstance(call.q_offset, torch.Tensor)
    kv_is_tensor = isinstance(call.kv_offset, torch.Tensor)
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.attndsl.forward(
        spec,
        backend,
        checked,
        call.q,
        call.k,
        call.v,
        list(call.tensors.values()),
        [p for p in params if isinstance(p, torch.Tensor)],
        is_given,
        [p for p in params if not isinstance(p, torch.Tensor)],
        call.scale,
        0 if q_is_tensor else call.q_offset,
        0 if kv_is_tensor else call.kv_offset,
        call.q_offset if call.q_index is None and q_is_tensor else call.q_index,
        call.kv_offset if call.kv_index is None and kv_is_tensor else call.kv_index,
        0 if drawn is not None else call.seed,
        call.deterministic,
        drawn,
    )
    return found


def _call(args: Sequence[Any]) -> tuple[Lowered, Call, Any]:
    (spec, backend, checked, q, k, v, tensors, given, is_given, numbers, scale, q_offset,
     kv_offset, q_origin, kv_origin, seed, deterministic, drawn) = args  # fmt: skip
    lowered = lowered_program(spec)
    program = lowered.program
    params: dict[str, Any] = {}
    given, numbers = iter(given), iter(numbers)
    for decl, is_tensor in zip(program.params, is_given, strict=True):
        cast = {DType.FLOAT: float, DType.INT: int, DType.BOOL: bool}[decl.dtype]
        params[decl.name] = next(given) if is_tensor else cast(next(numbers))
    sizes = {
        "batch": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "q_len": q.shape[2],
        "kv_len": k.shape[2],
        "head_dim": q.shape[3],
    }
    captures = dict(zip((d.name for d in program.tensors), tensors, strict=True))
    bind_dims(program, captures, params, sizes)
    call = Call(
        q=q,
        k=k,
        v=v,
        scale=scale,
        sizes=sizes,
        tensors=captures,
        params=params,
        q_offset=q_origin if q_origin is not None and q_origin.dim() == 0 else q_offset,
        kv_offset=kv_origin if kv_origin is not None and kv_origin.dim() == 0 else kv_offset,
        q_index=q_origin if q_origin is not None and q_origin.dim() == 1 else None,
        kv_index=kv_origin if kv_origin is not None and kv_origin.dim() == 1 else None,
        seed=seed if drawn is None else seed_argument(drawn),
        deterministic=deterministic,
    )
    chosen, _ = backend_of(lowered, backend, q.device, checked)
    chosen.check(lowered, call)
    return lowered, call, chosen


def _forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    lowered, call, backend = _call(args)
    with torch.no_grad():
        out, lse = backend.forward(lowered, call)
    return out.contiguous(), lse.contiguous()


def _backward(
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    wants: list[bool],
    *args: Any,
) -> list[torch.Tensor]:
    lowered, call, backend = _call(args)
    given = [name for name, value in call.params.items() if isinstance(value, torch.Tensor)]
    names = [*call.tensors, *given]
    wanted = {name for name, want in zip(names, wants[3:], strict=True) if want}
    asked = Wants(
        q=wants[0],
        k=wants[1],
        v=wants[2],
        tensors=frozenset(wanted & set(call.tensors)),
        params=frozenset(wanted & set(call.params)),
    )
    found = backend.backward(lowered, call, out, lse, grad_out, grad_lse, asked)
    captures = {**found.tensors, **found.params}
    gradients = [found.q, found.k, found.v, *(captures.get(name) for name in names)]
    return [
        torch.empty(0, device=call.q.device) if g is None else g.contiguous() for g in gradients
    ]


def _fake_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, v = args[3], args[5]
    shape = (q.shape[0], q.shape[1], q.shape[2])
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty((*shape, v.shape[3])), q.new_empty(shape, dtype=kind)


def _fake_backward(
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    wants: list[bool],
    *args: Any,
) -> list[torch.Tensor]:
    inputs = [args[3], args[4], args[5], *args[6], *args[7]]
    empty = args[3].new_empty
    return [
        empty(x.shape, dtype=x.dtype) if want else empty(0, dtype=torch.float32)
        for x, want in zip(inputs, wants, strict=True)
    ]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, tensors, given = inputs[3:8]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *tensors, *given, inputs[13], inputs[14], inputs[17], *output)
    ctx.counts = len(tensors), len(given)
    ctx.plain = (inputs[:3], inputs[8:13], inputs[15:17])
    ctx.capture_wants = [x.is_floating_point() and x.requires_grad for x in (*tensors, *given)]


def _autograd(ctx: Any, grad_out: Any, grad_lse: Any) -> tuple[Any, ...]:
    q, k, v, *rest = ctx.saved_tensors
    tensor_count, given_count = ctx.counts
    tensors, given = rest[:tensor_count], rest[tensor_count : tensor_count + given_count]
    q_origin, kv_origin, drawn, out, lse = rest[tensor_count + given_count :]
    head, middle, tail = ctx.plain
    # Lists of other things than tensors have one None for a gradient, unless they are empty.
    others: list[Any] = [None if plain else [] for plain in middle[:2]]
    if grad_out is None and grad_lse is None:
        return (*[None] * 6, [None] * tensor_count, [None] * given_count, *others, *[None] * 8)
    wants = [*ctx.needs_input_grad[3:6], *ctx.capture_wants]
    found = torch.ops.attndsl.backward(
        out,
        lse,
        torch.zeros_like(out) if grad_out is None else grad_out,
        grad_lse,
        wants,
        *head,
        q,
        k,
        v,
        tensors,
        given,
        *middle,
        q_origin,
        kv_origin,
        *tail,
        drawn,
    )
    kept = [g if want else None for g, want in zip(found, wants, strict=True)]
    captures = kept[3:]
    return (
        *[None] * 3,
        *kept[:3],
        captures[:tensor_count],
        captures[tensor_count:],
        *others,
        *[None] * 8,
    )


def _no_second(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    raise UnsupportedError(
        "graphs of torch.compile have no second derivatives of a call",
        hint="call the program outside of torch.compile where create_graph=True is used",
    )


for _name, _kernel, _fake in (
    ("forward", _forward, _fake_forward),
    ("backward", _backward, _fake_backward),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"attndsl::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("attndsl::forward", _autograd, setup_context=_setup, lib=_LIBRARY)
# Without it torch would take second derivatives to be zero.
torch.library.register_autograd("attndsl::backward", _no_second, lib=_LIBRARY)
