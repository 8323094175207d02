"""Implementation of the operators of :mod:`.torch_ops`, and calls as their arguments."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import profiler

from attndsl.backends.base import Backward, Call, CallGradients, Signature, Wants, matmul_precision
from attndsl.backends.dense.reference import ReferenceBackend
from attndsl.backends.memory_order import MemoryOrder, arranged_like, memory_order, rows_contiguous
from attndsl.foundation.caches import BoundedCache, Reason, memoised
from attndsl.foundation.logs import LOG
from attndsl.foundation.scalars import number_key
from attndsl.ir import DType
from attndsl.runtime.program_store import lowered_program, source_of_spec

from .autograd import ALIGNED, settled
from .bind import call_of
from .call_slice import is_by_entry
from .dispatch import backend_of, tell_choice
from .distributed_checks import refuse_context_parallel
from .dropout_checks import check_probability
from .dropout_seed import seed_argument
from .op_encoding import (
    AskedGradients,
    EncodedCall,
    asked_of,
    heading,
    of_gradients,
    packed,
    unpacked,
)
from .options import WHOLE, CallOptions, Location
from .profiling import BACKWARD, event_of_operator, name_of
from .row_max import row_maxima
from .sub_calls import localised
from .torch_ops import tell_counters
from .value_checks import check_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attndsl.backends.base import BoundBackward, BoundForward, Part
    from attndsl.ir import Program
    from attndsl.pipeline import Lowered

_FLOAT = (float, torch.SymFloat)
_CALLS: BoundedCache[Known | KnownBackward] = BoundedCache(
    "prepared calls of operators by tensors, string, numbers", 8192, Reason.BACKENDS, Reason.KERNELS
)


class OperatorCall(NamedTuple):
    """A program, its backend and its mode."""

    spec: str
    backend: str
    """The backend asked for."""
    checked: bool
    """True to run in checked mode."""


def operands(
    request: OperatorCall,
    call: Call,
    scale: float | None,
    varying: Callable[[list[float]], torch.Tensor | None] | None = None,
) -> EncodedCall:
    """The operators' arguments that stand for a call.

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
    return EncodedCall(
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
        whole=() if call.part is None else _whole(call, call.part),
        kv_lengths=positions.get("kv_lengths"),
    )


def _whole(call: Call, part: Part) -> list[int]:
    """The operators' ``whole`` of a part: sizes of the whole call, offsets, kinds of positions."""
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


def location_of(given: EncodedCall) -> Location:
    """Location of the call, with lengths only where it is a part."""
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


def params_of(program: Program, given: EncodedCall, floats: Iterator[float]) -> dict[str, Any]:
    """Params by name; takes float ones from ``floats``."""
    tensors, ints = iter(given.given), iter(given.ints)
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
    """Program, call template, backend and bound forward that calls of one key share."""

    lowered: Lowered
    call: Call
    """The call as a template, without tensors."""
    backend: Any
    order: MemoryOrder
    """Memory order of the output."""
    bound: BoundForward | None = None
    """Forward for calls with aligned tensors; None until one was made."""


class KnownBackward(NamedTuple):
    """Wanted gradients and bound backward that backwards of one key share."""

    asked: _WantedOfOperator
    bound: BoundBackward
    """Backward for calls with aligned tensors. Results are as the forward leaves them."""


def _key_of(tensors: Any, what: str, ints: Any, floats: Any) -> tuple[object, ...]:
    """Key that alike calls share: ``what``, device, numbers, and shapes and dtypes of tensors."""
    key = [what, tensors[0].device, *ints]
    for x in tensors:
        key += (x.shape, x.stride(), x.dtype)
    if floats:
        key += map(number_key, floats)
    if tensors[0].dtype is torch.float32:
        key.append(matmul_precision())
    return tuple(key)


def _is_usual(tensors: Any) -> bool:
    """Return True if no profile, log or gradient needs the call, and addresses are aligned."""
    if profiler._is_profiler_enabled or torch.is_grad_enabled() or LOG.isEnabledFor(logging.INFO):
        return False
    bits = 0
    for x in tensors:
        bits |= x.data_ptr()
    return not bits % ALIGNED


def _readable(tensors: Any) -> Any:
    """The ``tensors`` of a call with q, k and v as kernels read them.

    They were so where the graph was made. Where torch resolves signs for an operator, it lays its
    copies out anew.
    """
    own = [rows_contiguous(x) for x in tensors[:3]]
    same = all(a is b for a, b in zip(own, tensors, strict=False))
    return tensors if same else [*own, *tensors[3:]]


def _called(
    key: tuple[object, ...], tensors: Any, what: str, ints: Any, floats: Any
) -> tuple[Known, Call]:
    """The :class:`Known` of this key, and the call; it has a signature if that is kept.

    Graphs make the same calls again and again. What follows from shapes and numbers is found out
    once.
    """
    head = heading(what)
    # Whoever listens is told what runs a call.
    is_plain = head.plain and not (ints[0] or ints[1]) and not LOG.isEnabledFor(logging.INFO)
    # Maps of lists are made of their elements at each call.
    is_plain = is_plain and not lowered_program(head.spec).program.lists
    if not is_plain:
        found = _found_out(unpacked(tensors, what, ints, floats))
        return found, found.call
    known: Any = _CALLS.recent.get(key) or _CALLS.get(key)
    if known is not None:
        return known, known.call.of(tensors)
    found = _found_out(unpacked(tensors, what, ints, floats))
    call = found.call
    if found.lowered.program.dropout is None:
        call = call._replace(signature=Signature(name_of(head.spec)))
        found = found._replace(call=call.emptied())
        _CALLS.put(key, found)
    return found, call


def _found_out(given: EncodedCall) -> Known:
    lowered = lowered_program(given.spec)
    program, q = lowered.program, given.q
    floats = iter(given.floats if given.varying is None else given.varying.tolist())
    params = params_of(program, given, floats)
    captures = dict(zip((d.name for d in program.tensors), given.tensors, strict=True))
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
    return Known(lowered, call, chosen, memory_order(call.q, call.v.shape[3]))


def through_operator(given: EncodedCall, call: Call, backward: Backward) -> CallGradients:
    """Gradients that ``attndsl::backward`` returns; they are not differentiable.

    Args:
        given: What stands for ``call``.
        call: As :func:`operands` took it.
        backward: The results, and which gradients are wanted.
    """
    *results, wanted = backward
    params = [name for name, x in call.params.items() if isinstance(x, torch.Tensor)]
    asked = [wanted.q, wanted.k, wanted.v, *(name in wanted.tensors for name in call.tensors)]
    asked += [name in wanted.params for name in params]
    made = [x for x in results if x is not None]
    how = AskedGradients(asked, wanted.wide, wanted.partial, has_lse=results[3] is not None)
    parts = torch.ops.attndsl.backward(*of_gradients(packed(given), made, how))
    q, k, v, *rest = (x if want else None for x, want in zip(parts, asked, strict=True))
    count = len(call.tensors)
    tensors, numbers = zip(call.tensors, rest, strict=False), zip(params, rest[count:], strict=True)
    return CallGradients(
        q,
        k,
        v,
        {name: x for name, x in tensors if x is not None},
        {name: x for name, x in numbers if x is not None},
    )


def run_forward(
    tensors: Any, what: str, ints: Any, floats: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """``attndsl::forward``."""
    tell_counters()
    refuse_context_parallel()
    key = _key_of(tensors, what, ints, floats)
    known: Any = _CALLS.recent.get(key) or _CALLS.get(key)
    usual = _is_usual(tensors)
    if usual and known is not None and known.bound is not None:
        results: tuple[torch.Tensor, torch.Tensor] = known.bound(tensors)
        return results
    read = _readable(tensors)
    known, call = _called(key, read, what, ints, floats)
    with torch.no_grad(), event_of_operator(heading(what).spec):
        out, lse = known.backend.forward(known.lowered, call)
    if read is not tensors:
        out = arranged_like(out, tensors[0], out.dtype)
    elif usual and call.signature is not None:
        _CALLS.put(key, known._replace(bound=known.backend.bound_forward(known.lowered, call)))
    return out, lse.contiguous()


def run_row_maxima(tensors: Any, what: str, ints: Any, floats: Any) -> torch.Tensor:
    """``attndsl::row_maxima``."""
    key = _key_of(tensors, what, ints, floats)
    known, call = _called(key, tensors, what, ints, floats)
    return row_maxima(known.lowered, call)


def run_backward(tensors: Any, what: str, ints: Any, floats: Any) -> list[torch.Tensor]:
    """``attndsl::backward``."""
    key = _key_of(tensors, what, ints, floats)
    usual = _is_usual(tensors)
    known: Any = _CALLS.recent.get(key) or _CALLS.get(key) if usual else None
    if known is not None:
        asked: _WantedOfOperator = known.asked
        found = known.bound(tensors[asked.results :], asked.backward(tensors))
        return asked.listed(found, tensors[0])
    asked_gradients, of_call = asked_of(what)
    inputs = tensors[asked_gradients.results :]
    read = _readable(inputs)
    key_of_forward = _key_of(inputs, of_call, ints, floats)
    of_forward, call = _called(key_of_forward, read, of_call, ints, floats)
    lowered, _, backend, order, _ = of_forward
    asked = _asked(what, tuple(call.tensors), tuple(call.params))
    given = asked.backward(tensors)
    results = settled(call, given, order)
    with event_of_operator(heading(of_call).spec, BACKWARD):
        found = backend.backward(lowered, call, results)
    if read is not inputs:
        own = zip((found.q, found.k, found.v), inputs, strict=False)
        q, k, v = (None if x is None else arranged_like(x, given, x.dtype) for x, given in own)
        found = found._replace(q=q, k=k, v=v)
    elif (
        usual and call.signature is not None
        and all(a is b for a, b in zip(given, results, strict=True))
    ):  # fmt: skip
        bound = backend.bound_backward(lowered, call, results)
        _CALLS.put(key, KnownBackward(asked, bound))
    return asked.listed(found, call.q)


class _WantedOfOperator(NamedTuple):
    """Gradients requested of a backward, in a backend's terms."""

    results: int
    """Number of tensors before the call's."""
    names: list[str]
    """Names of captures that may have gradients, in their order."""
    wanted: Wants

    def backward(self, tensors: Any) -> Backward:
        """Results, gradients and wants that a backend gets, from the operator's tensors."""
        out, lse, grad_out, *others = tensors[: self.results]
        return Backward(out, lse, grad_out, others[0] if others else None, self.wanted)

    def listed(self, found: CallGradients, like: torch.Tensor) -> list[torch.Tensor]:
        """The operator's results: a gradient, maybe empty, for each tensor that may have one."""
        gradients = [found.q, found.k, found.v]
        for name in self.names:
            of_capture = found.tensors.get(name, found.params.get(name))
            gradients.append(None if of_capture is None else of_capture.contiguous())
        return [torch.empty(0, device=like.device) if g is None else g for g in gradients]


@memoised("gradients of operators", 1024)
def _asked(what: str, tensors: tuple[str, ...], params: tuple[str, ...]) -> _WantedOfOperator:
    """Gradients requested of a backward.

    A part's program has captures of its own behind the others, which have no gradients.

    Args:
        what: Of ``attndsl::backward``.
        tensors: Names of the captured tensors that the backend has.
        params: The same of params.
    """
    asked, of_call = asked_of(what)
    head = heading(of_call)
    program = lowered_program(head.spec).program
    given = [decl.name for decl, on in zip(program.params, head.is_given, strict=True) if on]
    names = [*(decl.name for decl in program.tensors), *given]
    wants = asked.wants
    wanted = {name for name, want in zip(names, wants[3:], strict=True) if want}
    return _WantedOfOperator(asked.results, names, Wants(
        q=wants[0],
        k=wants[1],
        v=wants[2],
        tensors=frozenset(wanted & set(tensors)),
        params=frozenset(wanted & set(params)),
        wide=asked.wide,
        partial=asked.partial,
    ))  # fmt: skip
