"""Made-up values for a program's tensors and params, so that it can be run without its model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attndsl.errors import ArgumentError
from attndsl.ir import SIZES, DType, Op, sides
from attndsl.passes.evaluate import Environment, evaluate

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from attndsl.ir import Program, TensorDecl

_DTYPES = {DType.FLOAT: torch.float32, DType.BOOL: torch.bool, DType.INT: torch.int32}
_DOCUMENT = 100
"""Mean length of made-up documents, in positions."""
_IDS = re.compile(r"doc|seg|ids", re.IGNORECASE)
_RUNS = 4
"""Documents that made-up ids of a picture have, so that small pictures show several."""
_NUMBERS: dict[DType, bool | int | float] = {DType.BOOL: True, DType.INT: 16, DType.FLOAT: 1.0}
"""Made-up params of a picture."""
_ROW = 64
"""Numbers of a row that ``dot`` takes: as many as there are keys would be too many for kernels."""


def make_captures(
    program: Program,
    sizes: Mapping[str, int],
    device: str,
    generator: torch.Generator,
    read: Collection[str] | None = None,
) -> dict[str, torch.Tensor]:
    """Random tensors of the declared shapes.

    Floats are normal; bools are fair coins. Ints that run along positions are document numbers,
    which never fall (documents of about 100 positions); other ints are lengths or positions, from
    1 to ``kv_len``.

    Args:
        program: Whose tensors to make.
        sizes: Every size of :data:`attndsl.ir.SIZES`, and those of other dims that are to differ
            from ``kv_len``, or from 64 where they are the length of rows that ``dot`` takes.
        device: Where to put them.
        generator: Of the CPU.
        read: Names of those whose values matter, all by default; the others take no memory.

    Raises:
        ArgumentError: A dim is negative for these sizes, or depends on a param without a value; a
            tensor does not fit in memory.
    """
    params = {p.name: p.default for p in program.params if p.default is not None}
    return _tensors(program, sizes, params, generator, device, read)


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Captures made up for a picture, in place of those that were not given."""

    tensors: Mapping[str, torch.Tensor]
    params: Mapping[str, bool | int | float]
    what: str
    """All of that in words; empty where there is none."""


def make_for_picture(
    program: Program,
    sizes: Mapping[str, int],
    seed: int = 0,
    given: Mapping[str, object] | None = None,
) -> MadeUp:
    """Make up the captures that ``given`` lacks for a picture of ``program``.

    Tensors are those of :func:`make_captures`, except ids, which are a few sorted runs.

    Args:
        program: The program.
        sizes: As of :func:`make_captures`.
        seed: Of all that is random.
        given: Captures that there are.

    Raises:
        ArgumentError: As of :func:`make_captures`.
    """
    given = {} if given is None else given
    lacking = [p for p in program.params if p.default is None and p.name not in given]
    params = {p.name: _NUMBERS[p.dtype] for p in lacking}
    known = {p.name: p.default for p in program.params if p.default is not None} | params
    known |= {name: x for name, x in given.items() if isinstance(x, bool | int | float)}
    generator = torch.Generator().manual_seed(seed)
    tensors = _tensors(program, sizes, known, generator, "cpu", None)
    said = [f"{name} = {value!r}" for name, value in params.items()]
    for decl in program.tensors:
        value = tensors[decl.name]
        if decl.name in given:
            del tensors[decl.name]
        elif _are_ids(decl):
            drawn = torch.randint(
                0, _RUNS, value.shape, generator=generator, dtype=torch.int32, device="cpu"
            )
            tensors[decl.name] = drawn.sort(-1).values
            said.append(f"{decl.name} (sorted ids)")
        elif decl.dtype is DType.FLOAT:
            said.append(f"{decl.name} (normal numbers)")
        elif decl.dtype is DType.BOOL:
            said.append(f"{decl.name} (fair coins)")
        elif value.numel():
            said.append(f"{decl.name} (ints from {int(value.min())} to {int(value.max())})")
    return MadeUp(tensors, params, ", ".join(said))


def _tensors(
    program: Program, sizes: Mapping[str, int], params: Mapping[str, bool | int | float],
    generator: torch.Generator, device: str, read: Collection[str] | None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    own = dict.fromkeys(program.dim_names(), sizes["kv_len"]) | _rows_of_dots(program)
    known = {**own, **sizes}
    found = {}
    for decl in program.tensors:
        shape = [_extent(decl, dim, known, params) for dim in range(len(decl.dims))]
        if read is not None and decl.name not in read:
            one = torch.zeros((), dtype=_DTYPES[decl.dtype], device=device)
            found[decl.name] = one.expand(shape)
            continue
        try:
            value = _random(decl, shape, known["kv_len"], generator)
        except RuntimeError:  # Torch has no other for the memory of a CPU.
            raise ArgumentError(
                f"'{decl.name}' of {' x '.join(map(str, shape))} elements does not fit in memory",
                hint="give shorter lengths",
            ) from None
        found[decl.name] = value.to(device)
    return found


def _rows_of_dots(program: Program) -> dict[str, int]:
    """The dims whose elements ``dot`` multiplies and adds up, each with its size."""
    taken = {side.name for item in program.products for side in sides(item)}
    last = (decl.dims[-1] for decl in program.tensors if decl.name in taken)
    return {str(dim.value): _ROW for dim in last if dim.op is Op.SIZE and dim.value not in SIZES}


def _random(
    decl: TensorDecl, shape: list[int], kv_len: int, generator: torch.Generator
) -> torch.Tensor:
    if decl.dtype is DType.FLOAT:
        return torch.randn(shape, generator=generator, device="cpu")
    if decl.dtype is DType.BOOL:
        return torch.rand(shape, generator=generator, device="cpu") < 0.5
    if _by_position(decl):
        return (
            (torch.rand(shape, generator=generator, device="cpu") < 1 / _DOCUMENT).cumsum(-1).int()
        )
    high = max(2, kv_len + 1)
    return torch.randint(1, high, shape, generator=generator, dtype=torch.int32, device="cpu")


def _extent(
    decl: TensorDecl, dim: int, sizes: Mapping[str, int], params: Mapping[str, bool | int | float]
) -> int:
    try:
        extent = evaluate(decl.dims[dim], Environment({**params, **sizes}))
    except KeyError as error:
        raise ArgumentError(
            f"dim {dim + 1} of '{decl.name}' depends on {error}, which has no value",
            hint="bind it: -p name=value",
        ) from None
    if extent < 0:
        raise ArgumentError(
            f"dim {dim + 1} of '{decl.name}' would be {extent} for these sizes",
            hint="give other lengths or params",
        )
    return int(extent)


def _by_position(decl: TensorDecl) -> bool:
    last = decl.dims[-1] if decl.dims else None
    return last is not None and last.op is Op.SIZE and last.value in ("q_len", "kv_len")


def _are_ids(decl: TensorDecl) -> bool:
    """Return True if ``decl`` numbers documents, by its name or by running along positions."""
    if decl.dtype is not DType.INT or not decl.dims:
        return False
    return _by_position(decl) or _IDS.search(decl.name) is not None
