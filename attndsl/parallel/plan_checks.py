"""Checks of arguments of plans and shards; a rank with a wrong one tells all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from attndsl.errors import ArgumentError, ShapeError, UnsupportedError
from attndsl.foundation.scalars import as_int

from .cp_call import Sharded
from .plan_costs import Shape

if TYPE_CHECKING:
    from .cp_attention import ShardedProgram


def programs_of(given: object) -> list[ShardedProgram]:
    """The programs of a model's layers, from compiled ones and those of sharded calls.

    Raises:
        ArgumentError: Something else is among them.
    """
    some = list(given) if isinstance(given, list | tuple) else [given]
    return [program_of(x) for x in some]


def program_of(given: Any) -> ShardedProgram:
    """A compiled program, from one or from that of sharded calls.

    Raises:
        ArgumentError: Something else.
        UnsupportedError: A program with lists of keys.
    """
    found: Any = given.attention if isinstance(given, Sharded) else given
    kind = type(found)
    if not all(hasattr(kind, name) for name in ("made_of", "lowered", "reach", "variant")):
        raise ArgumentError(
            f"a {type(given).__name__} is given for a program: {given!r:.60}",
            hint="pass compiled programs: attndsl.compile(...), or one of cp(attn)",
        )
    program: ShardedProgram = found
    if lists := program.lowered.program.lists:
        raise UnsupportedError(
            f"{program.name} looks for keys in a list, which context parallelism does not read",
            lists[0].span,
            "call the program itself, on the whole sequence",
        )
    return program


def length_of(given: object, ranks: int) -> int:
    """Rows of a sequence.

    Raises:
        ArgumentError: Not a whole number, or fewer rows than ranks.
    """
    length = as_int(given)
    if length is None or length < ranks:
        raise ArgumentError(
            f"the sequence has {given!r} rows for {ranks} ranks", hint="each rank holds one or more"
        )
    return length


def shape_of(given: object) -> Shape:
    """Sizes of calls.

    Raises:
        ArgumentError: No :class:`Shape` of whole positive numbers.
    """
    if given is None:
        return Shape()
    sizes = [as_int(x) for x in given] if isinstance(given, Shape) else [None]
    if any(x is None or x < 1 for x in sizes):
        raise ArgumentError(
            f"shape is {given!r}",
            hint="pass Shape(batch, heads, kv_heads, head_dim, value_dim), whole numbers",
        )
    return Shape(*(x for x in sizes if x is not None))


def seed_of(given: object) -> int | None:
    """A batch's seed, if it has one.

    Raises:
        ArgumentError: No whole number.
    """
    seed = as_int(given)
    if given is not None and seed is None:
        raise ArgumentError(
            f"seed is a {type(given).__name__}", hint="pass a whole number, the same on all ranks"
        )
    return seed


def length_along(values: object, dims: object) -> int:
    """The common length of ``values``, tensors by name, along ``dims`` by name.

    Raises:
        ArgumentError: No tensors by name, or dims that they do not have.
        ShapeError: Tensors of different lengths.
    """
    if not isinstance(values, Mapping) or not isinstance(dims, Mapping) or not dims:
        raise ArgumentError(
            f"values are a {type(values).__name__}, and their dims {dims!r:.60}",
            hint="pass a tensor and the dim of its rows, or tensors by name and such a dim for "
            "each that has rows",
        )
    lengths: dict[Any, int] = {}
    for name, dim in dims.items():
        value, place = values.get(name), as_int(dim)
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"dims name {name!r}, and the value of that name is a {type(value).__name__}",
                hint="name tensors of the batch; values without rows need no dim",
            )
        if place is None or not -value.dim() <= place < value.dim():
            raise ArgumentError(
                f"rows of {name!r} lie along dim {dim!r} of shape {tuple(value.shape)}",
                hint="pass the dim that has the length of the sequence",
            )
        lengths[name] = value.shape[place]
    if len(set(lengths.values())) != 1:
        raise ShapeError(
            f"values to shard have lengths {lengths}", hint="shard tensors of one sequence"
        )
    return next(iter(lengths.values()))
