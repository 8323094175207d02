"""Made-up values for a program's tensors and params, so that it can be run without its model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.ir import SIZES, DType, Op
from attndsl.passes.evaluate import Environment, evaluate

from .usage import UsageError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from attndsl.ir import Program, TensorDecl

_DTYPES = {DType.FLOAT: torch.float32, DType.BOOL: torch.bool, DType.INT: torch.int32}
_DOCUMENT = 100
"""Mean length of made-up documents, in positions."""


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
            from ``kv_len``.
        device: Where to put them.
        generator: Of the CPU.
        read: Names of those whose values matter, all by default; the others take no memory.

    Raises:
        UsageError: A dim is negative for these sizes, or depends on a param without a value; a
            tensor does not fit in memory.
    """
    known = {**dict.fromkeys(program.dim_names(), sizes["kv_len"]), **sizes}
    params = {p.name: p.default for p in program.params if p.default is not None}
    found = {}
    for decl in program.tensors:
        shape = [_extent(decl, dim, known, params) for dim in range(len(decl.dims))]
        if read is not None and decl.name not in read:
            found[decl.name] = torch.zeros((), dtype=_DTYPES[decl.dtype], device=device).expand(
                shape
            )
            continue
        try:
            value = _random(decl, shape, known["kv_len"], generator)
        except RuntimeError:  # Torch has no other for the memory of a CPU.
            raise UsageError(
                f"'{decl.name}' of {' x '.join(map(str, shape))} elements does not fit in memory",
                hint="give shorter lengths",
            ) from None
        found[decl.name] = value.to(device)
    return found


def _random(
    decl: TensorDecl, shape: list[int], kv_len: int, generator: torch.Generator
) -> torch.Tensor:
    if decl.dtype is DType.FLOAT:
        return torch.randn(shape, generator=generator)
    if decl.dtype is DType.BOOL:
        return torch.rand(shape, generator=generator) < 0.5
    if _by_position(decl):
        return (torch.rand(shape, generator=generator) < 1 / _DOCUMENT).cumsum(-1).int()
    high = max(2, kv_len + 1)
    return torch.randint(1, high, shape, generator=generator, dtype=torch.int32)


def check_dim_names(program: Program, given: Mapping[str, int]) -> None:
    """Refuse sizes of dims that the program does not have.

    Raises:
        UsageError: Names the dims that it has.
    """
    for name in given:
        if name not in program.dim_names():
            standard = f"; give --{name.replace('_', '-')}" if name in SIZES else ""
            names = ", ".join(program.dim_names()) or "none"
            raise UsageError(
                f"--dim gives '{name}', which no tensor of the program introduces",
                hint=f"its dims are: {names}{standard}",
            )


def _extent(
    decl: TensorDecl,
    dim: int,
    sizes: Mapping[str, int],
    params: Mapping[str, bool | int | float],
) -> int:
    try:
        extent = evaluate(decl.dims[dim], Environment({**params, **sizes}))
    except KeyError as error:
        raise UsageError(
            f"dim {dim + 1} of '{decl.name}' depends on {error}, which has no value",
            hint="bind it: -p name=value",
        ) from None
    if extent < 0:
        raise UsageError(
            f"dim {dim + 1} of '{decl.name}' would be {extent} for these sizes",
            hint="give other lengths or params",
        )
    return int(extent)


def _by_position(decl: TensorDecl) -> bool:
    last = decl.dims[-1] if decl.dims else None
    return last is not None and last.op is Op.SIZE and last.value in ("q_len", "kv_len")
