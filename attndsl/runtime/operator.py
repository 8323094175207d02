"""What runs the operators of :mod:`attndsl.operators`, and calls as their arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attndsl.backends.base import Call, Wants
from attndsl.ir import DType
from attndsl.operators import tell_counters

from .arguments import bind_dims, sizes_and_part
from .backward import settled
from .dispatch import backend_of
from .location import WHOLE, Location, is_by_entry
from .maxima import row_maxima
from .parts import localised
from .probability import check_probability
from .programs import lowered_program
from .seed import seed_argument
from .values import check_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attndsl.backends.base import Part
    from attndsl.pipeline import Lowered

_FLOAT = (float, torch.SymFloat)


def operands(
    spec: str,
    backend: str,
    checked: bool,
    call: Call,
    scale: float | None,
    drawn: torch.Tensor | None,
    varying: Callable[[list[float]], torch.Tensor | None] | None = None,
) -> tuple[Any, ...]:
    """What stands for a call in the operators' arguments.

    Args:
        spec: The program.
        backend: The backend asked for.
        checked: Whether to run in checked mode.
        call: The checked call; its own scale is not used.
        scale: Factor of q . k, or None for the default.
        drawn: A seed that replaces the call's.
        varying: Gives those numbers that are no constants as tensors; None where all are.
    """
    params = list(call.params.values())
    floats: list[Any] = [p for p in params if isinstance(p, _FLOAT)]
    floats += [] if scale is None else [scale]
    q_is_tensor = isinstance(call.q_offset, torch.Tensor)
    kv_is_tensor = isinstance(call.kv_offset, torch.Tensor)
    part = call.part
    varied = None if varying is None else varying(floats)
    return (
        spec,
        backend,
        checked,
        call.q,
        call.k,
        call.v,
        list(call.tensors.values()),
        [p for p in params if isinstance(p, torch.Tensor)],
        [isinstance(p, torch.Tensor) for p in params],
        [
            int(p) if isinstance(p, bool | torch.SymBool) else p
            for p in params
            if not isinstance(p, (torch.Tensor, *_FLOAT))
        ],
        [] if varied is not None else floats,
        varied,
        0 if q_is_tensor else call.q_offset,
        0 if kv_is_tensor else call.kv_offset,
        call.q_offset if call.q_index is None and q_is_tensor else call.q_index,
        call.kv_offset if call.kv_index is None and kv_is_tensor else call.kv_index,
        0 if drawn is not None else call.seed,
        call.deterministic,
        drawn,
        call.wide,
        None if part is None else _whole(call, part),
        None if part is None else part.kv_lengths,
    )


def _whole(call: Call, part: Part) -> list[int]:
    """What the operators' ``whole`` says of a part."""
    sizes = call.sizes
    return [
        sizes["q_len"] if "q" in part.counted else -1,
        sizes["kv_len"] if "kv" in part.counted else -1,
        sizes["heads"],
        sizes["kv_heads"],
        sizes["batch"],
        part.h_offset,
        part.b_offset,
        int(call.q_index is None and is_by_entry(call.q_offset)),
        int(call.kv_index is None and is_by_entry(call.kv_offset)),
    ]


def _location(args: Sequence[Any]) -> Location:
    """Where a call lies, by ``q_offset, kv_offset, q_origin, kv_origin, whole, kv_lengths``."""
    q_offset, kv_offset, q_origin, kv_origin, whole, kv_lengths = args
    if not whole:
        numbers, by_entry = WHOLE, (False, False)
    else:
        q_len, kv_len, heads, kv_heads, batch, h_offset, b_offset, *entries = whole
        by_entry = entries[0] == 1, entries[1] == 1
        numbers = Location(
            q_len=None if q_len == -1 else q_len,
            kv_len=None if kv_len == -1 else kv_len,
            heads=heads,
            kv_heads=kv_heads,
            batch=batch,
            h_offset=h_offset,
            b_offset=b_offset,
            kv_lengths=kv_lengths,
        )
    fields: dict[str, Any] = {}
    for name, offset, origin, entries in (
        ("q", q_offset, q_origin, by_entry[0]), ("kv", kv_offset, kv_origin, by_entry[1])
    ):  # fmt: skip
        starts = origin is not None and (origin.dim() == 0 or entries)
        fields[f"{name}_offset"] = origin if starts else offset
        fields[f"{name}_index"] = None if starts else origin
    return replace(numbers, **fields)


def _call(args: Sequence[Any]) -> tuple[Lowered, Call, Any]:
    (spec, backend, checked, q, k, v, tensors, given, is_given, ints, floats, varying, q_offset,
     kv_offset, q_origin, kv_origin, seed, deterministic, drawn, wide, whole,
     kv_lengths) = args  # fmt: skip
    lowered = lowered_program(spec)
    program = lowered.program
    params: dict[str, Any] = {}
    given, ints = iter(given or ()), iter(ints or ())
    floats = iter(floats if varying is None else varying.tolist())
    for decl, is_tensor in zip(program.params, is_given, strict=True):
        if is_tensor:
            params[decl.name] = next(given)
        elif decl.dtype is DType.FLOAT:
            params[decl.name] = next(floats)
        else:
            params[decl.name] = bool(next(ints)) if decl.dtype is DType.BOOL else next(ints)
    captures = dict(zip((d.name for d in program.tensors), tensors or (), strict=True))
    location = _location((q_offset, kv_offset, q_origin, kv_origin, whole, kv_lengths))
    sizes, part = sizes_and_part(program, location, q, k, captures)
    bind_dims(program, captures, params, sizes, frozenset() if part is None else part.shares)
    call = Call(
        q=q,
        k=k,
        v=v,
        scale=next(floats, q.shape[3] ** -0.5),
        sizes=sizes,
        tensors=captures,
        params=params,
        q_offset=location.q_offset,
        kv_offset=location.kv_offset,
        q_index=location.q_index,
        kv_index=location.kv_index,
        seed=seed if drawn is None else seed_argument(drawn),
        deterministic=deterministic,
        part=part,
        wide=wide,
    )
    check_values(program, call)
    lowered, call = localised(lowered, call)
    if lowered.program.dropout is not None:
        check_probability(lowered.program.dropout, call)
    chosen, _ = backend_of(lowered, backend, q.device, checked, q.dtype)
    chosen.check(lowered, call)
    return lowered, call, chosen


def run_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``attndsl::forward``."""
    tell_counters()
    lowered, call, backend = _call(args)
    with torch.no_grad():
        out, lse = backend.forward(lowered, call)
    return out, lse.contiguous()


def run_row_maxima(*args: Any) -> torch.Tensor:
    """``attndsl::row_maxima``."""
    lowered, call, _ = _call(args)
    return row_maxima(lowered, call)


def run_backward(
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    wants: list[bool],
    wide: bool,
    partial: bool,
    *args: Any,
) -> list[torch.Tensor]:
    """``attndsl::backward``."""
    lowered, call, backend = _call(args)
    # A part's program has captures of its own behind the others, which have no gradients.
    program = lowered_program(args[0]).program
    given = [d.name for d in program.params if isinstance(call.params[d.name], torch.Tensor)]
    names = [*(decl.name for decl in program.tensors), *given]
    wanted = {name for name, want in zip(names, wants[3:], strict=True) if want}
    asked = Wants(
        q=wants[0],
        k=wants[1],
        v=wants[2],
        tensors=frozenset(wanted & set(call.tensors)),
        params=frozenset(wanted & set(call.params)),
        wide=wide,
        partial=partial,
    )
    results = settled(call, out, lse, grad_out, grad_lse)
    found = backend.backward(lowered, call, *results, asked)
    captures = {**found.tensors, **found.params}
    gradients = [found.q, found.k, found.v]
    for name in names:
        of_capture = captures.get(name)
        gradients.append(None if of_capture is None else of_capture.contiguous())
    return [torch.empty(0, device=call.q.device) if g is None else g for g in gradients]
