"""Programs that have the tangents of what they capture as further tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attndsl.ir import DType, Program, TensorDecl

if TYPE_CHECKING:
    from collections.abc import Collection


def moved_name(program: Program, name: str) -> str:
    """Name of the tangent of the tensor or param ``name``; no other has that name."""
    taken = {decl.name for decl in program.tensors} | {decl.name for decl in program.params}
    found = f"moved_{name}"
    while found in taken:
        found += "_"
    return found


def with_tangents(program: Program, names: Collection[str]) -> Program:
    """``program`` with a tensor for the tangent of each of the tensors and params ``names``."""
    found = [
        TensorDecl(moved_name(program, decl.name), DType.FLOAT, decl.dims)
        for decl in program.tensors
        if decl.name in names
    ]
    found += [
        TensorDecl(moved_name(program, decl.name), DType.FLOAT, ())
        for decl in program.params
        if decl.name in names
    ]
    return replace(program, tensors=(*program.tensors, *found))
