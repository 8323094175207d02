"""The backward of a call by itself, from results that need not be that call's own.

With ``out`` and ``lse`` of all keys, the backward of a call with some of them is what these
contribute to the gradients, exactly: weights are exp(score - lse), and the score's gradient takes
nothing else of the other keys (FlashAttention-2, arXiv 2307.08691, section 3.1; over parts in turn:
H. Liu, M. Zaharia, P. Abbeel, Ring Attention, arXiv 2310.01889).

Non-goals: derivatives of these gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from attndsl.backends.base import Backward, Wants
from attndsl.backends.log_sum import of_one_number
from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError

from .argument_checks import check_is_writable, is_wide, learned
from .autograd import settled, without_neg
from .chunked_autograd import is_transformed
from .distributed_checks import is_dtensor, refuse_context_parallel

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from attndsl.backends.base import Backend, Call
    from attndsl.ir import Program
    from attndsl.pipeline import Lowered

OPERANDS = ("q", "k", "v")


class Gradients(NamedTuple):
    """The result of :meth:`attndsl.Attention.backward`; None for gradients not asked for."""

    q: torch.Tensor | None
    """(B, Hq, Lq, D)."""
    k: torch.Tensor | None
    """(B, Hkv, Lk, D)."""
    v: torch.Tensor | None
    """(B, Hkv, Lk, Dv)."""
    captures: dict[str, torch.Tensor]
    """Captured tensors and params by name, with their shapes and dtypes."""


@dataclass(frozen=True, slots=True)
class Results:
    """A forward's results, and the gradients that come back to them."""

    out: torch.Tensor
    """(B, Hq, Lq, Dv), q's dtype or fp32."""
    lse: torch.Tensor | None
    """(B, Hq, Lq), fp32 (fp64 for fp64), natural logarithm; None for own weights."""
    grad_out: torch.Tensor
    """Gradient of ``out``, with its shape and dtype."""
    grad_lse: torch.Tensor | None = None
    """Gradient of ``lse``, with its shape and dtype; None for zeros."""


@dataclass(frozen=True, slots=True)
class WantedGradients:
    """Gradients to make, by name, and their dtype."""

    operands: Collection[str] = OPERANDS
    """Names among ``q``, ``k`` and ``v``."""
    captures: Collection[str] | None = None
    """Names of float captures; None for those that require a gradient."""
    dtype: torch.dtype | None = None
    """dtype of the gradients of q, k and v; None for that of each operand."""


def wants_for(call: Call, asked: WantedGradients) -> Wants:
    """Gradients of ``call`` that a backend is to make.

    Raises:
        ArgumentError: A name that is no operand, or no float tensor that is captured.
        DTypeError: A dtype that there is not.
    """
    for name in _names("wants", asked.operands):
        if name not in OPERANDS:
            raise ArgumentError(
                f"there is no operand {name!r} to want a gradient of",
                hint="wants holds names among 'q', 'k' and 'v'; wants_captures those of captures",
            )
    captures = {**call.tensors, **call.params}
    if asked.captures is None:
        names = learned(captures)
    else:
        names = _names("wants_captures", asked.captures)
        for name in sorted(names):
            value = captures.get(name)
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                raise ArgumentError(
                    f"{name!r} has no gradient: it is no float tensor that this call captures",
                    hint="give a float param as a 0-d tensor",
                )
    q, k, v = (name in asked.operands for name in OPERANDS)
    tensors = names.intersection(call.tensors)
    wide = is_wide("grad_dtype", asked.dtype, call.q.dtype)
    params = names.intersection(call.params)
    return Wants(q, k, v, tensors, params, wide=wide, partial=True)


def _names(argument: str, given: Collection[str]) -> frozenset[str]:
    """The names that ``argument`` has.

    Raises:
        ArgumentError: It has none, but something else.
    """
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable):
        raise ArgumentError(f"{argument} is a {type(given).__name__}", hint="pass a list of names")
    names = [*given]
    for name in names:
        if not isinstance(name, str):
            raise ArgumentError(f"{argument} has {name!r}", hint="pass a list of names")
    return frozenset(names)


def check_results(program: Program, call: Call, given: Results) -> None:
    """Refuse results that no forward of ``call`` could have made.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError: Says which, and what they are.
    """
    shape = (*call.q.shape[:3], call.v.shape[3])
    work = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    own = program.weights is not None
    for name, value in (("lse", given.lse), ("grad_lse", given.grad_lse)):
        if own and value is not None:
            raise ArgumentError(
                f"{name} is given, and the program has weights of its own",
                hint=f"pass {name}=None: only a softmax has a log-sum-exp",
            )
    _check_result("out", given.out, shape, (call.q.dtype, work), call.q.device)
    _check_result("grad_out", given.grad_out, shape, (call.q.dtype, work), call.q.device)
    if not own:
        _check_result("lse", given.lse, shape[:3], (work,), call.q.device)
    if given.grad_lse is not None:
        _check_result("grad_lse", given.grad_lse, shape[:3], (work,), call.q.device)


def lse_or_zeros(call: Call, given: Results) -> torch.Tensor:
    """The log-sum-exp; of weights of a program's own what forwards give for live rows."""
    if given.lse is not None:
        return of_one_number(given.lse)
    work = torch.float64 if call.q.dtype is torch.float64 else torch.float32
    return call.q.new_zeros((2, *call.q.shape[:3]), dtype=work)


def with_out_of(call: Call, out: torch.Tensor) -> Call:
    """``call`` with an output of the dtype of ``out``."""
    wide = out.dtype is not call.q.dtype
    return call if wide is call.wide else call._replace(wide=wide, signature=None)


def check_has_seed(program: Program, seed: object) -> None:
    """Refuse a call whose dropout mask cannot be drawn again.

    Raises:
        ArgumentError: The program has dropout, and there is no seed.
    """
    if seed is None and program.dropout is not None:
        raise ArgumentError(
            "the program has dropout, and there is no seed", hint="pass the seed= of the call"
        )


def check_room(
    name: str, room: torch.Tensor | None, shape: Sequence[int], kind: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    """Refuse an argument ``name`` that a result of these properties cannot be written to.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError: Says which, and what it is.
    """
    if room is None:
        return
    hint = f"give {name} of shape {tuple(shape)}, {kind}, on {device}"
    if not isinstance(room, torch.Tensor):
        raise ArgumentError(f"{name} is a {type(room).__name__}", hint=hint)
    if is_dtensor(room):
        raise ArgumentError(
            f"{name} is a DTensor", hint=f"pass this process's part: {name}.to_local()"
        )
    if tuple(room.shape) != tuple(shape):
        raise ShapeError(f"{name} has shape {tuple(room.shape)}", hint=hint)
    if room.dtype is not kind:
        raise DTypeError(f"{name} is of dtype {room.dtype}", hint=hint)
    if room.device != device:
        raise DeviceError(f"{name} is on {room.device}", hint=hint)
    check_is_writable(name, room)
    if room.requires_grad:
        raise ArgumentError(
            f"{name} requires grad, and what is put there has none", hint=f"pass {name}.detach()"
        )


def in_room(room: torch.Tensor | None, found: torch.Tensor | None) -> torch.Tensor | None:
    """``found``, which is put into ``room`` unless the backend has written there already."""
    if room is None or found is None:
        return found
    if found is not room:
        return room.copy_(found)
    if not room.is_inference():
        torch.autograd.graph.increment_version(room)  # Kernels do not tell torch.
    return room


def gradients_of_results(
    backend: Backend, lowered: Lowered, call: Call, given: Results, wants: Wants
) -> Gradients:
    """The gradients of checked results, without a forward.

    Raises:
        UnsupportedError: Within a transform of ``torch.func``, or torch's ``context_parallel``.
    """
    refuse_context_parallel()
    if is_transformed():
        raise UnsupportedError(
            "transforms of torch.func do not see into a backward from given results",
            hint="apply the transform to calls",
        )
    call = with_out_of(without_neg(call), given.out)
    lse = lse_or_zeros(call, given)
    backward = Backward(given.out, lse, given.grad_out, given.grad_lse, wants)
    with torch.no_grad():
        own = settled(call, backward, windows=backend.reads_windows)
        found = backend.backward(lowered, call, own)
    return Gradients(found.q, found.k, found.v, _in_order(call, {**found.tensors, **found.params}))


def _in_order(call: Call, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Captures' gradients in the order of the program's declarations."""
    return {name: found[name] for name in (*call.tensors, *call.params) if name in found}


def _check_result(
    name: str,
    value: object,
    shape: tuple[int, ...],
    kinds: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Refuse a value that is no tensor of this shape, device and of a dtype among ``kinds``."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(
            f"{name} is a {type(value).__name__}", hint="pass what the forward returned"
        )
    if tuple(value.shape) != shape:
        raise ShapeError(
            f"{name} has shape {tuple(value.shape)}",
            hint=f"of this call it is {shape}: results of all keys have the rows of q",
        )
    if value.dtype not in kinds:
        names = " or ".join(dict.fromkeys(str(kind) for kind in kinds))
        raise DTypeError(f"{name} is of dtype {value.dtype}", hint=f"pass it in {names}")
    if value.device != device:
        raise DeviceError(
            f"{name} is on {value.device} and q is on {device}", hint=f"{name}.to(q.device)"
        )
