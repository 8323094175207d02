"""Calls of lengths and captures alone, without q, k and v in memory, to inspect a program.

An inspection of a part of a program needs the captures of that part alone. The numbers of batch
entries and heads are those of the captures by default.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from attndsl.errors import ArgumentError, ShapeError
from attndsl.foundation.scalars import as_number
from attndsl.ir import DType, Op, leaf_names, toposort
from attndsl.passes.evaluate import Environment, evaluate

from .bind import bind
from .call_slice import CallSizes, plain_int, with_ints
from .options import WHOLE, CallOptions
from .value_checks import check_values

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.backends.base import Call, Scalar
    from attndsl.ir import Node, Program, TensorDecl
    from attndsl.pipeline import Lowered

    from .options import Location

    Captures = Mapping[str, torch.Tensor | Scalar]

_DTYPES = {DType.FLOAT: torch.float32, DType.INT: torch.int32, DType.BOOL: torch.bool}
_ZEROS: dict[DType, Scalar] = {DType.FLOAT: 0.0, DType.INT: 0, DType.BOOL: False}
_BY_ENTRY = ("q_offset", "kv_offset", "kv_lengths")
_INFERRED = ("batch", "heads", "kv_heads")
_GIVEN = (*_INFERRED, "q_len", "kv_len", "head_dim")


@dataclass(frozen=True, slots=True)
class AskedSizes:
    """Sizes of a call; None stands for the size that captures have, or else for 1."""

    q_len: int
    kv_len: int
    batch: int | None = None
    heads: int | None = None
    """Query heads."""
    kv_heads: int | None = None
    """Key heads; where captures tell none, as many as query heads."""
    head_dim: int = 64

    def with_ints(self) -> AskedSizes:
        """The same, whose whole numbers of other types are ints."""
        return AskedSizes(*(plain_int(getattr(self, field.name)) for field in fields(self)))

    def known(self) -> dict[str, int | None]:
        """The sizes by name, where they are ints; None stands for what captures tell."""
        given = self.with_ints()
        sizes = {field.name: getattr(given, field.name) for field in fields(self)}
        sizes["kv_heads"] = given.heads if given.kv_heads is None else given.kv_heads
        return {name: n if isinstance(n, int) else None for name, n in sizes.items()}


def call_of_lengths(
    lowered: Lowered,
    sizes: CallSizes,
    captures: Captures,
    location: Location,
    device: str | torch.device | None,
) -> Call:
    """A call with these sizes and captures whose q, k and v take no memory.

    It is on ``device``; by default on the device of the tensors.

    Raises:
        ArgumentError: A size that is none.
    """
    device = _device_of(captures, location) if device is None else device
    sizes = sizes.with_ints()
    kv_heads = sizes.heads if sizes.kv_heads is None else sizes.kv_heads
    sizes = replace(sizes, kv_heads=kv_heads)
    for name in _GIVEN:
        size = getattr(sizes, name)
        if isinstance(size, int) and size.bit_length() > 62:
            bits = size.bit_length()
            raise ArgumentError(f"{name} has {bits} bits", hint="pass the length of a sequence")
        if not isinstance(size, int) or size < 0:
            raise ArgumentError(f"{name} is {size!r}", hint="pass a whole number, 0 or more")
    # A last stride of 0 would have it copied.
    row = torch.empty(sizes.head_dim, device=device)
    q = row.expand(sizes.batch, sizes.heads, sizes.q_len, -1)
    k = row.expand(sizes.batch, kv_heads, sizes.kv_len, -1)
    call = bind(lowered.program, (q, k, k), captures, location, CallOptions(scale=1.0))
    check_values(lowered.program, call)
    return call


def completed(
    program: Program,
    roots: tuple[Node | None, ...],
    captures: Captures,
    asked: AskedSizes,
    location: Location = WHOLE,
    device: str | torch.device | None = None,
) -> tuple[dict[str, Any], CallSizes]:
    """Captures, as :func:`filled` gives them, and sizes of a call that looks at ``roots`` alone.

    Args:
        program: The program.
        roots: Its expressions that are looked at.
        captures: Those that are given.
        asked: Sizes of the call.
        location: Where the call lies in a larger one. Captures may then be those of the larger
            one, so that they tell no size that it names.
        device: Of the call; by default that of the tensors.

    Raises:
        ShapeError: A capture that contradicts a size, and the argument that would fit it.
    """
    location = with_ints(location)
    sizes = _inferred(_fitting(program, captures), asked.with_ints(), location)
    if not all(isinstance(getattr(sizes, name), int) for name in _GIVEN):
        return dict(captures), sizes  # The call refuses them, and says why.
    device = _device_of(captures, location) if device is None else device
    return filled(program, roots, captures, sizes, location, device), sizes


def filled(
    program: Program,
    roots: tuple[Node | None, ...],
    captures: Captures,
    sizes: CallSizes,
    location: Location,
    device: str | torch.device,
) -> dict[str, Any]:
    """``captures``, and values without memory for others that ``roots`` do not read.

    A capture that ``roots`` read and that was not given stays missing.
    """
    found: dict[str, Any] = dict(captures)
    given = _fitting(program, captures)
    needed = _needed(program, roots, frozenset(decl.name for decl in given))
    for param in program.params:
        if param.name not in needed and param.name not in found and param.default is None:
            found[param.name] = _ZEROS[param.dtype]
    known = Environment(_numbers(program, found, given, sizes, location))
    for decl in program.tensors:
        if decl.name not in needed and decl.name not in found:
            shape = [max(0, int(evaluate(dim, known))) for dim in decl.dims]
            if prod(shape) >= 1 << 62:
                raise ArgumentError(
                    f"'{decl.name}' of {' x '.join(map(str, shape))} elements has no memory",
                    hint="give shorter lengths",
                )
            element = torch.zeros((), dtype=_DTYPES[decl.dtype], device=device)
            found[decl.name] = element.expand(shape)
    return found


def _fitting(program: Program, captures: Captures) -> dict[TensorDecl, torch.Tensor]:
    """The tensors that are given with as many dims as they are declared with."""
    return {
        decl: value
        for decl in program.tensors
        if isinstance(value := captures.get(decl.name), torch.Tensor)
        and value.dim() == len(decl.dims)
    }


def _numbers(
    program: Program,
    captures: Mapping[str, Any],
    given: Mapping[TensorDecl, torch.Tensor],
    sizes: CallSizes,
    location: Location,
) -> dict[str, Scalar]:
    """Values of the names in dims: the whole's sizes, and params; 1 for unknown names."""
    found: dict[str, Scalar] = dict.fromkeys(program.dim_names(), 1)
    for decl, value in given.items():
        named = zip(decl.dims, value.shape, strict=True)
        found |= {str(dim.value): size for dim, size in named if dim.op is Op.SIZE}
    found |= {name: getattr(sizes, name) for name in _GIVEN}
    found |= {name: n for name in _GIVEN if (n := getattr(location, name, None)) is not None}
    for param in program.params:
        value = captures.get(param.name, param.default)
        found[param.name] = as_number(value) or 0
    return found


def _device_of(captures: Captures, location: Location) -> str | torch.device:
    given = [
        *captures.values(), location.q_offset, location.kv_offset, location.q_index,
        location.kv_index, location.kv_lengths,
    ]  # fmt: skip
    return next((x.device for x in given if isinstance(x, torch.Tensor)), "cpu")


def _needed(
    program: Program, roots: tuple[Node | None, ...], given: frozenset[str]
) -> frozenset[str]:
    """Names of the captures that ``roots`` read, and of captures that give sizes in these."""
    present = tuple(root for root in roots if root is not None)
    names = set[str]().union(*(leaf_names(root) for root in present))
    decls = {decl.name: decl for decl in program.tensors}
    while True:
        kept = [decls[name] for name in (names | given) & decls.keys()]
        dims = toposort(*(dim for decl in kept for dim in decl.dims))
        # The dims of what is given are checked, so that their params are needed too.
        more = {str(item.value) for item in dims if item.op is Op.PARAM}
        told = {dim.value for decl in kept for dim in decl.dims if dim.op is Op.SIZE}
        for item in (*toposort(*present), *dims):
            if item.op is Op.SIZE and item.value not in told and item.value not in _GIVEN:
                tells = (decl.name for decl in program.tensors if item in decl.dims)
                more.update(list(tells)[:1])
        if more <= names:
            return frozenset(names)
        names |= more


def _inferred(
    given: Mapping[TensorDecl, torch.Tensor], asked: AskedSizes, location: Location
) -> CallSizes:
    told: dict[str, int] = {}
    for name in _BY_ENTRY:
        value = getattr(location, name)
        if isinstance(value, torch.Tensor) and value.dim() == 1:
            told.setdefault("batch", value.shape[0])
    for decl, value in given.items():
        for number, (dim, size) in enumerate(zip(decl.dims, value.shape, strict=True)):
            name = str(dim.value)
            if dim.op is not Op.SIZE or name not in _GIVEN or _is_part(location, name):
                continue
            wanted = getattr(asked, name)
            if wanted is None:
                told.setdefault(name, size)
            elif wanted != size:
                raise ShapeError(
                    f"{decl.name} has shape {tuple(value.shape)}, and its dim {number} is declared "
                    f"as {name}, which is {wanted} here",
                    hint=f"pass {name}={size}, or {decl.name} with {wanted} elements along "
                    f"dim {number}",
                )
    batch = told.get("batch", 1) if asked.batch is None else asked.batch
    kv_heads = told.get("kv_heads") if asked.kv_heads is None else asked.kv_heads
    heads = asked.heads
    if heads is None:
        heads = told.get("heads", 1 if kv_heads is None else kv_heads)
    kv_heads = heads if kv_heads is None else kv_heads
    return CallSizes(asked.q_len, asked.kv_len, batch, heads, kv_heads, asked.head_dim)


def _is_part(location: Location, name: str) -> bool:
    """Return True if the whole's ``name`` is given: captures may have more than the call."""
    return getattr(location, name, None) is not None
