"""Refusals of arguments that do not go together, in the names that callers of torch's API use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attndsl.call.argument_checks import check_is_float, check_is_like
from attndsl.errors import ArgumentError, ShapeError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MIN_DIMS = 2


def check_operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse operands of the wrong type, rank, dtype, device, head dim or key length.

    Leading dims are left to :func:`broadcast_leading`. Nested tensors pass, but for their lengths.

    Raises:
        ArgumentError, ShapeError, DTypeError, DeviceError: What does not fit, and what would.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(
                f"{name} is a {type(x).__name__}", hint="pass a tensor (..., heads, length, dim)"
            )
        if x.is_nested and x.layout is not torch.jagged:
            raise ArgumentError(
                f"{name} is a nested tensor of layout {x.layout}",
                hint="make it with torch.nested.nested_tensor(..., layout=torch.jagged)",
            )
        if not x.is_nested and x.layout is not torch.strided:
            raise ArgumentError(
                f"{name} is of layout {x.layout}", hint=f"make it dense: {name}.to_dense()"
            )
        if x.dim() < _MIN_DIMS:
            raise ShapeError(
                f"{name} has {x.dim()} dims {tuple(x.shape)}",
                hint="it has at least two, (length, dim): add what is missing by unsqueeze(0)",
            )
        check_is_float(name, x)
    for name, x in (("key", key), ("value", value)):
        check_is_like(name, x, "query", query)
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(
            f"query has head dim {query.shape[-1]} and key has head dim {key.shape[-1]}",
            hint="the two are multiplied along it: make them equal (value may differ)",
        )
    if query.shape[-1] == 0:
        raise ShapeError(
            "query and key have head dim 0", hint="give them at least one element a row"
        )


def check_dropout(dropout_p: float) -> None:
    """Refuse a number that is no probability."""
    if not isinstance(dropout_p, int | float) or not 0 <= dropout_p <= 1:
        raise ArgumentError(f"dropout_p is {dropout_p!r}", hint="pass a number from 0 to 1")


def check_key_lengths(key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuse a key and a value of other lengths."""
    if key.shape[-2] != value.shape[-2]:
        raise ShapeError(
            f"key has length {key.shape[-2]} and value has length {value.shape[-2]}",
            hint="each key has one value: make them equal",
        )


def kv_heads(q_heads: int, k_heads: int, v_heads: int, enable_gqa: bool) -> int:
    """The number of heads of key and value, that of one of them being 1 where it broadcasts.

    Raises:
        ShapeError: The numbers of heads do not go together.
    """
    for name, heads in (("query", q_heads), ("key", k_heads), ("value", v_heads)):
        if heads == 0:
            raise ShapeError(f"{name} has 0 heads", hint="give it at least one")
    both = max(k_heads, v_heads)
    if min(k_heads, v_heads) not in (1, both):
        raise ShapeError(
            f"key has {k_heads} heads and value has {v_heads} heads",
            hint="make them equal, or one of them 1",
        )
    if both in (1, q_heads) or q_heads == 1:
        return both
    name = "key" if k_heads == both else "value"
    if q_heads % both:
        raise ShapeError(
            f"query has {q_heads} heads and {name} has {both} heads",
            hint="make them equal, or the former a multiple of the latter with enable_gqa=True",
        )
    if not enable_gqa:
        raise ShapeError(
            f"query has {q_heads} heads, {name} has {both} heads and enable_gqa is False",
            hint="pass enable_gqa=True to let groups of query heads share a key head",
        )
    return both


def broadcast_leading(shapes: Sequence[tuple[str, torch.Size]]) -> tuple[int, ...]:
    """The shape that the dims before the heads have together.

    Args:
        shapes: Names, and what comes before the heads.

    Raises:
        ShapeError: They do not broadcast.
    """
    longest = max(len(shape) for _, shape in shapes)
    found = [1] * longest
    owner = [shapes[0][0]] * longest
    for name, shape in shapes:
        for back in range(1, len(shape) + 1):
            size = shape[-back]
            if size == 1 or size == found[-back]:
                continue
            if found[-back] != 1:
                raise ShapeError(
                    f"{name} has batch {tuple(shape)} and {owner[-back]} has "
                    f"{found[-back]} along its dim {longest - back}",
                    hint="make them equal, or one of them 1",
                )
            found[-back], owner[-back] = size, name
    return tuple(found)
