"""A call's checked arguments, put together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attndsl.backends.base import Call
from attndsl.backends.memory_order import rows_contiguous
from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from attndsl.ir import TOKENS

from .argument_checks import (
    bind_dims,
    check_names,
    check_operands,
    check_rows,
    check_scale,
    checked_param,
    checked_tensor,
    is_deterministic,
    is_wide,
    scale_of,
    sizes_of,
)
from .call_slice import INTS, check_lengths, is_plain, part_of, plain_int, with_ints
from .distributed_checks import is_dtensor
from .options import WHOLE, CallOptions
from .sub_calls import narrowed, with_shares
from .value_checks import check_offset

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Part, Scalar
    from attndsl.ir import Program

    from .options import Location

    Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


DEFAULTS = CallOptions()


def bind(
    program: Program,
    operands: Operands,
    captures: Mapping[str, torch.Tensor | Scalar],
    location: Location = WHOLE,
    options: CallOptions = DEFAULTS,
) -> Call:
    """The checked call; see :meth:`attndsl.api.Attention.__call__` for what each argument is.

    Backends get what :func:`.sub_calls.localised` makes of it.

    Args:
        program: What is called.
        operands: q, k and v.
        captures: The program's tensors and params.
        location: Where the call lies in a larger one.
        options: The rest.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: What does not fit, and what would.
    """
    q, k, v = operands
    location = with_ints(location)
    if options.seed is not None and type(options.seed) is not int:
        options = replace(options, seed=plain_int(options.seed))
    _check_plain({"q": q, "k": k, "v": v, **captures})
    check_operands(q, k, v)
    check_names(program, captures)  # Before options, which may be meant as captures.
    check_scale(options.scale)
    params = {decl.name: checked_param(decl, captures, q.device) for decl in program.params}
    tensors = {
        decl.name: checked_tensor(decl, captures[decl.name], q.device) for decl in program.tensors
    }
    for name, offset, rows in (("q_offset", location.q_offset, q),
                               ("kv_offset", location.kv_offset, k)):  # fmt: skip
        _check_offset(name, offset, rows)
    operands = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    call = call_of(program, operands, (tensors, params), location, options)
    check_rows(program, tensors)
    if options.seed is not None:
        _check_seed(options.seed, q.device)
    _check_index("q_index", location.q_index, q.shape[2], q.device)
    _check_index("kv_index", location.kv_index, k.shape[2], q.device)
    call = narrowed(program, call)
    return call._replace(wide=True) if is_wide("out_dtype", options.out_dtype, q.dtype) else call


def call_of(
    program: Program,
    operands: Operands,
    captures: tuple[Mapping[str, torch.Tensor], Mapping[str, Scalar | torch.Tensor]],
    location: Location,
    options: CallOptions,
) -> Call:
    """The call with its sizes, whose tensors' dims fit each other; the rest is not checked.

    Args:
        program: What is called.
        operands: q, k and v.
        captures: The program's tensors, and its params, in the order of their declarations.
        location: Where the call lies in a larger one.
        options: The rest. Its dtype of the output is not used.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: What does not fit, and what would.
    """
    q, k, v = operands
    tensors, params = captures
    sizes, part = _sizes_and_part(program, location, q, k, tensors)
    bind_dims(program, tensors, params, sizes, frozenset() if part is None else part.shares)
    return Call(
        q=q,
        k=k,
        v=v,
        scale=q.shape[3] ** -0.5 if options.scale is None else scale_of(options.scale),
        sizes=sizes,
        tensors=tensors,
        params=params,
        q_offset=location.q_offset,
        kv_offset=location.kv_offset,
        q_index=location.q_index,
        kv_index=location.kv_index,
        seed=0 if options.seed is None else options.seed,
        deterministic=is_deterministic(options.deterministic),
        part=part,
    )


def _sizes_and_part(
    program: Program,
    location: Location,
    q: torch.Tensor,
    k: torch.Tensor,
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, int], Part | None]:
    """The sizes that a program speaks of, and which part of the whole a call is, if it says so.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: What does not fit, and what would.
    """
    own = sizes_of(q, k)
    if is_plain(location) and not (program.by_token and _rows_are_moved(location)):
        return own, None
    if location.kv_lengths is not None:
        check_lengths(location.kv_lengths, q.shape[0], q.device)
    sizes, part = part_of(program, location, own)
    if location.packed is not None:
        more = {"q_len": location.packed.room, "kv_len": location.packed.room}
        sizes |= {**more, TOKENS: location.packed.tokens}
        # Rows, keys and requests of a call are nobody's share of a tensor.
        own |= {**more, "batch": sizes["batch"]}
    return sizes, with_shares(program, part, tensors, sizes, own)


def _rows_are_moved(location: Location) -> bool:
    """Return True if logical positions of queries may differ from the numbers of their rows."""
    offset = location.q_offset
    return location.q_index is not None or isinstance(offset, torch.Tensor) or offset != 0


def _check_plain(given: Mapping[str, object]) -> None:
    """Refuse DTensors: calls whose q is one do not come here, and nothing else takes them."""
    if is_dtensor(given["q"]):
        raise ArgumentError(
            "q is a DTensor, which only calls take",
            hint="pass each process's q.to_local(), and say which part of the whole it is: "
            "heads=..., h_offset=..., batch=..., b_offset=...",
        )
    for name, value in given.items():
        if is_dtensor(value):
            raise ArgumentError(
                f"{name} is a DTensor, and q is a plain tensor",
                hint=f"make q a DTensor of the same mesh, or pass {name}.full_tensor()",
            )


def _check_offset(name: str, offset: object, rows: torch.Tensor) -> None:
    if isinstance(offset, torch.Tensor):
        fits = offset.dim() == 0 or tuple(offset.shape) == (rows.shape[0],)
        if not fits or offset.dtype not in INTS:
            raise ArgumentError(
                f"{name} is a tensor of shape {tuple(offset.shape)} and dtype {offset.dtype}",
                hint=f"pass an int, a 0-d int tensor, or ({rows.shape[0]},) ints, one for each "
                f"batch entry",
            )
        if offset.device != rows.device:
            raise DeviceError(f"{name} is on {offset.device}", hint=f"{name}.to(q.device)")
    elif not isinstance(offset, int | torch.SymInt) or isinstance(offset, bool):
        raise ArgumentError(
            f"{name} is {offset!r}",
            hint=f"pass an int, a 0-d int tensor, or ({rows.shape[0]},) ints, one for each batch "
            f"entry",
        )
    elif isinstance(offset, int) and isinstance(length := rows.shape[2], int):
        check_offset(name, offset, length)


def _check_seed(seed: object, device: torch.device) -> None:
    if isinstance(seed, torch.Tensor):
        if seed.dim() != 0 or seed.dtype is not torch.int64:
            raise ArgumentError(
                f"seed is a tensor of shape {tuple(seed.shape)} and dtype {seed.dtype}",
                hint="pass an int or a 0-d int64 tensor",
            )
        if seed.device != device:
            raise DeviceError(f"seed is on {seed.device}", hint="seed.to(q.device)")
    elif not isinstance(seed, int | torch.SymInt) or isinstance(seed, bool):
        raise ArgumentError(f"seed is {seed!r}", hint="pass an int or a 0-d int64 tensor")


def _check_index(name: str, index: torch.Tensor | None, length: int, device: torch.device) -> None:
    if index is None:
        return
    if not isinstance(index, torch.Tensor) or index.dtype not in INTS:
        raise DTypeError(f"{name} is no int tensor", hint=f"pass ({length},) ints")
    if tuple(index.shape) != (length,):
        raise ShapeError(
            f"{name} has shape {tuple(index.shape)}", hint=f"it has one position a row: ({length},)"
        )
    if index.device != device:
        raise DeviceError(f"{name} is on {index.device}", hint=f"{name}.to(q.device)")
