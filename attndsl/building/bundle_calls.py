"""Example calls of a bundle, each made as the first call of a process would be.

A kernel depends on more than the program: on dtypes, head dims, alignment, kinds of positions,
gradients, and where families differ on lengths. So a bundle is made by calls, each of which gets
the kernels that such a call gets on the GPU. Two calls that differ in nothing that kernels depend
on add nothing.

Non-goals: captures of size 1 in place of a declared size, results in fp32, forward mode, layouts
whose rows are more than 2**31 elements apart.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from attndsl.backends.kernels.config import HOPPER_PROCESSORS
from attndsl.call.optional_captures import optional_names
from attndsl.errors import ArgumentError
from attndsl.inspection.example_captures import make_captures
from attndsl.ir import DType
from attndsl.passes.fold_dots import contracted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attndsl.attention import Attention
    from attndsl.ir import Program

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
"""dtypes of q, k and v, by name."""
CAPTURE_DTYPES = {
    **DTYPES, "int8": torch.int8, "uint8": torch.uint8, "int16": torch.int16,
    "int32": torch.int32, "int64": torch.int64, "bool": torch.bool,
}  # fmt: skip
"""dtypes of captured tensors, by name."""
POSITIONS = ("whole", "chunk", "entries")
"""Positions of rows: at the beginning; behind others, by a number; at the end of each entry's keys,
by tensors (``q_offset`` and ``kv_lengths``)."""
HEADS = ((8, 8), (8, 2))
"""Heads and key heads by default: each with its own keys, and shared ones."""
LENGTHS = ((1024, 1024), (1007, 1007))
"""Rows and keys by default: captured rows lie at aligned addresses, and do not."""
_NUMBERS: dict[DType, bool | int | float] = {DType.BOOL: True, DType.INT: 16, DType.FLOAT: 1.0}
"""Run-time params; kernels depend on their types."""
_BATCH = 2
_FEW_ROWS = 128
"""Rows up to which keys alone decide between kernels, if anything does."""
_ALIGNED = {64: (336, 1024, 6144), 96: (640, 6144), 128: (512, 6144)}
"""Lengths for which Hopper's kernels have tiles of different sizes, by most columns."""
_UNALIGNED = {64: (333, 1007, 6143), 96: (637, 6143), 128: (509, 6143)}
_FEW_KEYS = {True: 208, False: 205}
"""Rows and keys of few tiles, which nothing lists: aligned, or not."""
_LARGEST_OF_FEW = 256
_HALF_TILE = 64
"""Rows up to which a head's rows are half of a tile or less."""
_MORE_KEYS = 16
"""Keys more than rows, where these are few and are not as many."""
_SEED = 7


@dataclass(frozen=True, slots=True)
class CallGrid:
    """Calls that a bundle is to cover: every combination of these values."""

    dtypes: tuple[str, ...] = ("bf16",)
    head_dims: tuple[int, ...] = (64,)
    value_dim: int | None = None
    """``head_dims`` where it is None."""
    heads: tuple[tuple[int, int], ...] = HEADS
    lengths: tuple[tuple[int, int], ...] = LENGTHS
    positions: tuple[str, ...] = ("whole",)
    backward: bool = False
    learned: tuple[str, ...] | None = None
    """Captures that require grad. None for two kinds of calls: all float captures, and none."""
    deterministic: bool = False
    dims: Mapping[str, int] = field(default_factory=dict)
    """Sizes of dims that programs introduce; others are those of
    :mod:`attndsl.inspection.example_captures`."""
    captures: Mapping[str, torch.dtype] = field(default_factory=dict)
    """dtypes of captures; fp32, int32 and bool for others, and q's for rows of contractions."""


class _Shape(NamedTuple):
    """Sizes of a call's operands, but for head dims."""

    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int


class ExampleCall(NamedTuple):
    """One call."""

    attention: Attention
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    arguments: dict[str, Any]
    learned: tuple[torch.Tensor, ...]
    """Tensors that require a gradient; empty for a call without gradients."""
    return_lse: bool

    def __str__(self) -> str:
        """The call's sizes, for people."""
        q, k, _ = self.operands
        heads = f"{q.shape[1]}/{k.shape[1]} heads"
        return f"{heads}, {q.shape[2]} rows, {k.shape[2]} keys, head dim {q.shape[3]}"


def examples(attention: Attention, asked: CallGrid) -> Iterator[ExampleCall]:
    """The calls of one program that ``asked`` means.

    Raises:
        ArgumentError: No captures can be made for the lengths.
    """
    listed = attention.lowered.sparsity.not_affine is not None
    for dtype in asked.dtypes:
        for dim in asked.head_dims:
            shapes = _shapes(asked, max(dim, asked.value_dim or dim), listed)
            for (shape, is_requested), position in product(shapes.items(), asked.positions):
                operands = _operands(asked, DTYPES[dtype], dim, shape)
                # A program's dims may have no such heads or lengths.
                with nullcontext() if is_requested else suppress(ArgumentError):
                    yield from _of_operands(attention, asked, operands, position)


def _shapes(asked: CallGrid, dim: int, listed: bool) -> dict[_Shape, bool]:
    """Requested shapes, and others for which there are other kernels; True for requested ones.

    Args:
        asked: The requested calls.
        dim: The larger head dim.
        listed: True if kernels list tiles of the program.
    """
    lengths = _lengths(asked, dim)
    requested = [_Shape(_BATCH, *heads, *own) for heads in asked.heads for own in lengths]
    others = [shape for own in lengths for shape in _other_shapes(asked, *own, listed)]
    return {shape: shape in requested for shape in (*requested, *others)}


def _other_shapes(asked: CallGrid, rows: int, keys: int, listed: bool) -> Iterator[_Shape]:
    """Shapes with other heads and batches, and some with other lengths, that have other kernels."""
    few = _FEW_KEYS[rows % 16 == 0]
    lengths = [(rows, keys)]
    if listed and max(rows, keys) > _LARGEST_OF_FEW:
        lengths.append((few, few))
    for own in lengths if asked.backward else lengths[1:]:
        # Of few work tiles each has one of the heads that share keys, if any do.
        yield _Shape(_BATCH, 8, 1, *own)
        yield _Shape(_BATCH, 1, 1, *own)
    for heads, kv_heads in (*asked.heads, (1, 1)):
        if asked.backward and keys <= _FEW_ROWS:
            yield _Shape(HOPPER_PROCESSORS // kv_heads + 1, heads, kv_heads, rows, keys)
        if listed and max(rows, keys) <= _LARGEST_OF_FEW:
            yield _Shape(5 * HOPPER_PROCESSORS // heads + 1, heads, kv_heads, rows, keys)
    if asked.backward and listed:
        # Few work tiles of keys, and many of queries: of two tiles each, at the limits of both.
        yield _Shape(HOPPER_PROCESSORS // 4, 17, 1, *lengths[-1])
    if _HALF_TILE < rows <= _FEW_ROWS and rows != keys:
        yield _Shape(_BATCH, 8, 1, _HALF_TILE, keys)


def _lengths(asked: CallGrid, dim: int) -> tuple[tuple[int, int], ...]:
    """Requested lengths, and others for which Hopper's kernels have other tiles."""
    found = dict.fromkeys(asked.lengths)
    for rows, keys in asked.lengths:
        known = _UNALIGNED if rows % 16 else _ALIGNED
        for own in next((known[columns] for columns in known if dim <= columns), ()):
            if rows > _FEW_ROWS:
                found[own, own if rows == keys else max(own, keys)] = None
            if rows != keys:
                found[(own, own + _MORE_KEYS) if rows > _FEW_ROWS else (rows, own)] = None
    return tuple(found)


def _operands(
    asked: CallGrid, dtype: torch.dtype, dim: int, shape: _Shape
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, whose elements are never read."""
    batch, heads, kv_heads, rows, keys = shape
    value = asked.value_dim or dim
    return (
        torch.empty(batch, heads, rows, dim, dtype=dtype),
        torch.empty(batch, kv_heads, keys, dim, dtype=dtype),
        torch.empty(batch, kv_heads, keys, value, dtype=dtype),
    )


def _of_operands(
    attention: Attention, asked: CallGrid, operands: tuple[torch.Tensor, ...], position: str
) -> Iterator[ExampleCall]:
    q, k, v = operands
    optional = optional_names(attention.lowered.program)
    for absent in dict.fromkeys(((), optional)):
        own, _ = attention.variant(dict.fromkeys(set(_names(attention)) - set(absent), 0))
        captures = _captures(own.lowered.program, asked, q, k)
        for seed in _seeds(own.lowered.program):
            options = _positions(position, q, k) | seed
            if asked.deterministic:
                options["deterministic"] = True
            yield ExampleCall(own, (q, k, v), options | {"captures": captures}, (), False)
            if asked.backward:
                yield from _with_gradients(own, asked, (q, k, v), options, captures)


def _with_gradients(
    attention: Attention,
    asked: CallGrid,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: dict[str, Any],
    captures: dict[str, Any],
) -> Iterator[ExampleCall]:
    program = attention.lowered.program
    names = float_names(program)
    own = names if asked.learned is None else tuple(x for x in names if x in asked.learned)
    sets = (own, ()) if asked.learned is None else (own,)
    has_lse = program.weights is None
    for wanted in dict.fromkeys(sets):
        leaves = tuple(x.detach().requires_grad_() for x in operands)
        given = {name: _leaf(captures[name]) for name in wanted}
        for return_lse in (False, True)[: 1 + has_lse]:
            arguments = options | {"captures": captures | given}
            q, k, v = leaves
            yield ExampleCall(
                attention, (q, k, v), arguments, (*leaves, *given.values()), return_lse
            )


def _leaf(value: Any) -> torch.Tensor:
    made: torch.Tensor = value if isinstance(value, torch.Tensor) else torch.tensor(float(value))
    return made.detach().requires_grad_()


def _names(attention: Attention) -> list[str]:
    program = attention.lowered.program
    return [*(x.name for x in program.tensors), *(x.name for x in program.params)]


def float_names(program: Program) -> tuple[str, ...]:
    """The captures that may have gradients."""
    kinds = {x.name: x.dtype for x in program.tensors} | {x.name: x.dtype for x in program.params}
    return tuple(name for name, kind in kinds.items() if kind is DType.FLOAT)


def _captures(
    program: Program, asked: CallGrid, q: torch.Tensor, k: torch.Tensor
) -> dict[str, Any]:
    """Values of the program's captures, in the requested dtypes."""
    sizes = {
        "batch": q.shape[0], "heads": q.shape[1], "kv_heads": k.shape[1], "q_len": q.shape[2],
        "kv_len": k.shape[2], "head_dim": q.shape[3], **asked.dims,
    }  # fmt: skip
    found: dict[str, Any] = {}
    for param in program.params:
        found[param.name] = _NUMBERS[param.dtype] if param.default is None else param.default
    rows = contracted(program)
    for name, tensor in make_captures(program, sizes, "cpu", torch.Generator()).items():
        usual = q.dtype if name in rows else tensor.dtype
        found[name] = tensor.to(asked.captures.get(name, usual))
    return found


def _positions(position: str, q: torch.Tensor, k: torch.Tensor) -> dict[str, Any]:
    """The arguments that say where the rows are."""
    if position == "whole":
        return {}
    if position == "chunk":
        return {"q_offset": max(1, k.shape[2] - q.shape[2])}
    lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32)
    return {"q_offset": lengths - q.shape[2], "kv_lengths": lengths}


def _seeds(program: Program) -> list[dict[str, Any]]:
    """Seeds of calls in eager mode, where each is a number, and in graphs, where it is a tensor."""
    if program.dropout is None:
        return [{}]
    return [{"seed": _SEED}, {"seed": torch.tensor(_SEED)}]
