"""Conversions between types, and constants made in a value's likeness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attndsl.ir import DType, const

from . import arithmetic as ar
from .places import refusal
from .symbols import Symbol, View

if TYPE_CHECKING:
    from attndsl.ir import Node

    from .tracer import Tracer

_METHODS = {
    "float": torch.float32, "double": torch.float64, "half": torch.float16,
    "bfloat16": torch.bfloat16, "int": torch.int32, "long": torch.int64, "bool": torch.bool,
    "short": torch.int16, "char": torch.int8, "byte": torch.uint8,
}  # fmt: skip
_NARROW = (torch.int8, torch.uint8, torch.int16)
_FILLS = {
    "new_zeros": 0, "new_ones": 1, "zeros_like": 0, "ones_like": 1, "new_full": None,
    "full_like": None, "new_tensor": None, "new_empty": 0, "empty_like": 0,
}  # fmt: skip
_UNCHANGED = frozenset({"detach", "cpu", "cuda", "requires_grad_"})


def dtype_of(dtype: torch.dtype) -> DType:
    """The language's type of ``dtype``."""
    if dtype is torch.bool:
        return DType.BOOL
    if dtype.is_floating_point:
        return DType.FLOAT
    if dtype.is_complex:
        raise refusal("a complex tensor", "the language has bools, ints and floats")
    return DType.INT


def convert(
    tracer: Tracer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Symbol | View | None:
    """``args[0]`` in another type, or a constant of its kind; None where ``name`` does neither."""
    value = args[0] if args else None
    if name in _METHODS:
        return _cast(tracer, value, _METHODS[name])
    if name in ("to", "type", "type_as"):
        wanted = kwargs.get("dtype") or next((d for d in map(_dtype, args[1:]) if d), None)
        return _cast(tracer, value, wanted)
    if name in _FILLS:
        return Symbol(tracer, _filled(tracer, name, args, kwargs))
    if name == "scalar_tensor" or (name == "tensor" and isinstance(value, Symbol)):
        return Symbol(tracer, tracer.node(value))
    if name in _UNCHANGED and isinstance(value, Symbol | View):
        if name == "detach":
            raise refusal("detach would hide a gradient", "detach captured tensors before the call")
        return value
    return None


def _dtype(value: Any) -> torch.dtype | None:
    if isinstance(value, torch.dtype):
        return value
    if isinstance(value, Symbol | View | torch.Tensor):
        return value.dtype
    return None


def _cast(tracer: Tracer, value: Any, wanted: torch.dtype | None) -> Symbol | View:
    if isinstance(value, View):
        extra = () if wanted is None else (_target(wanted),)
        return View(tracer, value.tensor, value.indices, (*value.casts, *extra))
    node = tracer.node(value)
    return Symbol(tracer, node if wanted is None else ar.to(node, _target(wanted)))


def _target(wanted: torch.dtype) -> DType:
    if wanted in _NARROW:
        raise refusal(
            f"a conversion to {wanted} would wrap round, and the language's ints do not",
            "use torch.int32 or torch.int64",
        )
    return dtype_of(wanted)


def _filled(tracer: Tracer, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
    """A constant in the likeness of ``args[0]``."""
    like = tracer.node(args[0])
    fill: Any = _FILLS[name]
    rest = list(args[1:])
    if name in ("new_zeros", "new_ones", "new_full", "new_empty"):
        sizes = kwargs["size"] if "size" in kwargs else rest.pop(0) if rest else ()
        # Positions have shape (1,) in graphs.
        empty = (
            (),
            [],
            torch.Size(()),
            *(((1,), [1], torch.Size((1,))) if tracer.in_graph else ()),
        )
        if sizes not in empty:
            raise refusal(f"'{name}' makes a tensor of size {sizes}", "write () for the size")
    if fill is None:
        given = kwargs.get("fill_value", kwargs.get("data"))
        fill = tracer.node(rest[0] if given is None else given)
    wanted = kwargs.get("dtype")
    node = const(fill) if isinstance(fill, int) else fill
    if name == "new_tensor" and wanted is None:
        return node
    return ar.to(node, like.dtype if wanted is None else _target(wanted))
