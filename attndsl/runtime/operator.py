"""What runs the operators of :mod:`attndsl.operators`, and calls as their arguments."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.backends.base import Backward, Gradients, Signature, Wants
from attndsl.backends.dense.reference import ReferenceBackend
from attndsl.ir import DType
from attndsl.logs import LOG
from attndsl.operators import Operands, tell_counters

from .autograd import settled
from .bind import CallOptions, call_of
from .dispatch import backend_of, kept_of, tell_choice
from .location import WHOLE, Location, is_by_entry
from .maxima import row_maxima
from .parts import localised
from .probability import check_probability
from .profiling import BACKWARD, event_of_operator, name_of
from .programs import lowered_program, source_of_spec
from .seed import seed_argument
from .values import check_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attndsl.backends.base import Call, Part
    from attndsl.ir import Program
    from attndsl.pipeline import Lowered

_FLOAT = (float, torch.SymFloat)
_MOST_KEPT = 4096
"""Kinds of calls of a program that are known."""


class Request(NamedTuple):
    """A program, and what is asked to run it."""

    spec: str
    backend: str
    """The backend asked for."""
    checked: bool
    """Whether to run in checked mode."""


def operands(
    request: Request,
    call: Call,
    scale: float | None,
    varying: Callable[[list[float]], torch.Tensor | None] | None = None,
) -> Operands:
    """What stands for a call in the operators' arguments.

    Args:
        request: The program.
        call: The checked call; its own scale is not used.
        scale: Factor of q . k, or None for the default.
        varying: Gives those numbers that are no constants as tensors; None where all are.
    """
    form, (q, k, v, *rest) = call.flatten()
    count = len(form.captures)
    positions = dict(zip(form.positions, rest[count:], strict=True))
    numbers = [p for p in form.params.values() if p is not None]
    floats: list[Any] = [p for p in numbers if isinstance(p, _FLOAT)]
    floats += [] if scale is None else [scale]
    varied = None if varying is None else varying(floats)
    return Operands(
        *request,
        q,
        k,
        v,
        tensors=rest[: len(form.tensors)],
        given=rest[len(form.tensors) : count],
        is_given=[p is None for p in form.params.values()],
        ints=[
            int(p) if isinstance(p, bool | torch.SymBool) else p
            for p in numbers
            if not isinstance(p, _FLOAT)
        ],
        floats=[] if varied is not None else floats,
        varying=varied,
        q_offset=0 if isinstance(call.q_offset, torch.Tensor) else call.q_offset,
        kv_offset=0 if isinstance(call.kv_offset, torch.Tensor) else call.kv_offset,
        q_origin=positions.get("q_index", positions.get("q_offset")),
        kv_origin=positions.get("kv_index", positions.get("kv_offset")),
        seed=0 if isinstance(call.seed, torch.Tensor) else call.seed,
        deterministic=call.deterministic,
        drawn=positions.get("seed"),
        wide=call.wide,
        whole=None if call.part is None else _whole(call, call.part),
        kv_lengths=positions.get("kv_lengths"),
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


def location_of(given: Operands) -> Location:
    """Where the call lies, with lengths only where it is a part."""
    whole = given.whole
    nowhere = given.q_origin is None and given.kv_origin is None
    if not whole and nowhere and given.q_offset == 0 == given.kv_offset:
        return WHOLE
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
            kv_lengths=given.kv_lengths,
        )
    fields: dict[str, Any] = {}
    for name, offset, origin, each in (
        ("q", given.q_offset, given.q_origin, by_entry[0]),
        ("kv", given.kv_offset, given.kv_origin, by_entry[1]),
    ):
        starts = origin is not None and (origin.dim() == 0 or each)
        fields[f"{name}_offset"] = origin if starts else offset
        fields[f"{name}_index"] = None if starts else origin
    return replace(numbers, **fields)


def params_of(program: Program, given: Operands, floats: Iterator[float]) -> dict[str, Any]:
    """The params by name; takes those that are floats from ``floats``."""
    tensors, ints = iter(given.given or ()), iter(given.ints or ())
    params: dict[str, Any] = {}
    for decl, is_tensor in zip(program.params, given.is_given, strict=True):
        if is_tensor:
            params[decl.name] = next(tensors)
        elif decl.dtype is DType.FLOAT:
            params[decl.name] = next(floats)
        else:
            params[decl.name] = bool(next(ints)) if decl.dtype is DType.BOOL else next(ints)
    return params


class Known(NamedTuple):
    """What is known of all calls that are like one."""

    lowered: Lowered
    template: Call
    """Without tensors."""
    backend: Any


def _key_of(given: Operands) -> tuple[object, ...] | None:
    """What a call is known by; None of one whose values or positions are looked at each time."""
    origins = given.q_origin, given.kv_origin, given.drawn, given.varying, given.kv_lengths
    if (
        given.checked or given.whole or given.given or given.q_offset or given.kv_offset
        or any(origin is not None for origin in origins)
    ):  # fmt: skip
        return None
    q, k, v = given.q, given.k, given.v
    return (
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), v.shape, v.stride(),
        # 0.0 and -0.0 are equal, and not the same.
        given.deterministic, given.wide, *(given.ints or ()), *[x.hex() for x in given.floats],
        *[(x.shape, x.stride(), x.dtype) for x in given.tensors or ()],
    )  # fmt: skip


def _call(given: Operands) -> tuple[Lowered, Call, Any]:
    """The program of a call, the call, and what runs it.

    Graphs make the same calls again and again. What follows from shapes and numbers is found out
    once.
    """
    # Whoever listens is told what runs a call.
    key = None if LOG.isEnabledFor(logging.INFO) else _key_of(given)
    if key is None:
        return _found_out(given)
    kept = kept_of(given.spec, given.backend)
    known: Known | None = kept.get(key)
    if known is None:
        lowered, call, backend = _found_out(given)
        if lowered.program.dropout is not None:
            return lowered, call, backend
        call = call._replace(signature=Signature(name_of(given.spec)))
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        empty = torch.empty(0, dtype=given.q.dtype, device=given.q.device)
        template = call._replace(q=empty, k=empty, v=empty, tensors={})
        kept[key] = Known(lowered, template, backend)
        return lowered, call, backend
    names = (decl.name for decl in known.lowered.program.tensors)
    tensors = dict(zip(names, given.tensors or (), strict=True))
    call = known.template._replace(q=given.q, k=given.k, v=given.v, tensors=tensors)
    return known.lowered, call, known.backend


def _found_out(given: Operands) -> tuple[Lowered, Call, Any]:
    lowered = lowered_program(given.spec)
    program, q = lowered.program, given.q
    floats = iter(given.floats if given.varying is None else given.varying.tolist())
    params = params_of(program, given, floats)
    captures = dict(zip((d.name for d in program.tensors), given.tensors or (), strict=True))
    seed = given.seed if given.drawn is None else seed_argument(given.drawn)
    options = CallOptions(next(floats, None), seed, given.deterministic)
    call = call_of(program, (q, given.k, given.v), (captures, params), location_of(given), options)
    call = call._replace(wide=given.wide)
    check_values(program, call)
    lowered, call = localised(lowered, call)
    call = call._replace(within_graph=True)
    if lowered.program.dropout is not None:
        check_probability(lowered.program.dropout, call)
    chosen, reason = backend_of(lowered, given.backend, q.device, given.checked, q.dtype)
    if given.checked:
        chosen = ReferenceBackend(checked=True, source=source_of_spec(given.spec))
    chosen.check(lowered, call)
    if LOG.isEnabledFor(logging.INFO):
        tell_choice(name_of(given.spec), call, chosen, reason)
    return lowered, call, chosen


def through_operator(given: Operands, call: Call, backward: Backward) -> Gradients:
    """What ``attndsl::backward`` finds; it is not differentiable.

    Args:
        given: What stands for ``call``.
        call: As :func:`operands` took it.
        backward: The results, and which gradients are wanted.
    """
    *results, wanted = backward
    params = [name for name, x in call.params.items() if isinstance(x, torch.Tensor)]
    asked = [wanted.q, wanted.k, wanted.v, *(name in wanted.tensors for name in call.tensors)]
    asked += [name in wanted.params for name in params]
    parts = torch.ops.attndsl.backward(*results, asked, wanted.wide, wanted.partial, *given)
    q, k, v, *rest = (x if want else None for x, want in zip(parts, asked, strict=True))
    count = len(call.tensors)
    tensors, numbers = zip(call.tensors, rest, strict=False), zip(params, rest[count:], strict=True)
    return Gradients(
        q,
        k,
        v,
        {name: x for name, x in tensors if x is not None},
        {name: x for name, x in numbers if x is not None},
    )


def run_forward(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """``attndsl::forward``."""
    tell_counters()
    given = Operands(*args)
    lowered, call, backend = _call(given)
    with torch.no_grad(), event_of_operator(given.spec):
        out, lse = backend.forward(lowered, call)
    return out, lse.contiguous()


def run_row_maxima(*args: Any) -> torch.Tensor:
    """``attndsl::row_maxima``."""
    lowered, call, _ = _call(Operands(*args))
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
    spec = Operands(*args).spec
    lowered, call, backend = _call(Operands(*args))
    # A part's program has captures of its own behind the others, which have no gradients.
    program = lowered_program(spec).program
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
    results = settled(call, Backward(out, lse, grad_out, grad_lse, asked))
    with event_of_operator(spec, BACKWARD):
        found = backend.backward(lowered, call, results)
    captures = {**found.tensors, **found.params}
    gradients = [found.q, found.k, found.v]
    for name in names:
        of_capture = captures.get(name)
        gradients.append(None if of_capture is None else of_capture.contiguous())
    return [torch.empty(0, device=call.q.device) if g is None else g for g in gradients]
