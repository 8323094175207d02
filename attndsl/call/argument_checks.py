"""A call's arguments, each checked against the program's declarations."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from contextlib import nullcontext
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError, counted
from attndsl.foundation.scalars import as_number
from attndsl.frontend.declare import COMPILE_ARGUMENTS
from attndsl.ir import DType, Op, sides
from attndsl.passes.evaluate import Environment, evaluate
from attndsl.passes.print_ir import print_expression

from .call_slice import INTS
from .options import CALL_ARGUMENTS
from .value_checks import check_int, no_value, plain_number

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from attndsl.backends.base import Scalar
    from attndsl.ir import Node, ParamDecl, Program, TensorDecl

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALVES = FLOATS[:2]
_CAST = FLOATS[:-1]
"""dtypes that autocast converts."""
_LARGEST = float(torch.finfo(torch.float32).max)
_KINDS = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "ipu", "privateuseone")
_AUTOCASTS = frozenset(kind for kind in _KINDS if torch.amp.is_autocast_available(kind))
"""Kinds of devices with autocast; asked once, since graphs of torch 2.11 cannot trace that."""
_DTYPES = {DType.FLOAT: FLOATS, DType.INT: INTS, DType.BOOL: (torch.bool,)}
_PYTHON: dict[DType, tuple[type, ...]] = {
    DType.FLOAT: (int, float, torch.SymInt, torch.SymFloat),
    DType.INT: (int, torch.SymInt),
    DType.BOOL: (bool, torch.SymBool),
}
"""Types of a param given as a number; those of torch stand for sizes in graphs."""


def is_wide(name: str, dtype: object, own: torch.dtype) -> bool:
    """Return True if the argument ``name`` asks for fp32 results of operands of a half type.

    Raises:
        DTypeError: It asks for another dtype than that and the operands' ``own``.
    """
    if dtype is None or dtype is own:
        return False
    if dtype is torch.float32 and own in _HALVES:
        return True
    raise DTypeError(
        f"{name} is {dtype} and q is {own}",
        hint="pass None for q's dtype, or torch.float32 where q is of a half type",
    )


def as_float(number: Any) -> float:
    """``number`` as a float; one that a graph leaves open stays open."""
    found: float = torch.sym_float(number)  # type: ignore[no-untyped-call]
    return found


def autocast(value: Any) -> Any:
    """``value``, in the dtype that autocast asks for where it is a tensor that this is about."""
    if not isinstance(value, torch.Tensor):
        return value
    dtype = autocast_dtype(value.dtype, value.device.type)
    return value if value.dtype is dtype else value.to(dtype)


def autocast_dtype(dtype: torch.dtype, kind: str) -> torch.dtype:
    """The dtype that autocast asks for where a tensor on a ``kind`` of device has ``dtype``."""
    if dtype not in _CAST or kind not in _AUTOCASTS or not torch.is_autocast_enabled(kind):
        return dtype
    return torch.get_autocast_dtype(kind)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Context in which operations on ``device`` are in the dtypes of their operands."""
    known = device.type in _AUTOCASTS  # Not so ``meta``.
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


def scale_of(scale: Any) -> float:
    """The factor of scores as a float; one that a graph leaves open stays open.

    Raises:
        ArgumentError: It is no number, or larger than numbers of fp32. Products with such a factor
            are made differently everywhere.
    """
    try:
        found = scale if type(scale) is float else as_float(scale)
    except OverflowError:
        found = math.inf
    # In a graph all are floats by type, and one that is left open cannot be compared.
    is_open = type(found) is not float or torch.compiler.is_dynamo_compiling()
    if not is_open and not abs(found) <= _LARGEST:
        raise ArgumentError(
            f"scale is {found}",
            hint="pass a number of at most 3.4e38 in size, or None for 1 / sqrt(head dim)",
        )
    return found


def check_scale(scale: object) -> None:
    """Refuse a scale that is not a number."""
    fits = scale is None or isinstance(scale, Real | torch.SymInt | torch.SymFloat)
    if not fits and (isinstance(scale, torch.Tensor) or as_number(scale) is None):
        raise ArgumentError(
            f"scale is a {type(scale).__name__}",
            hint="pass a number, or None for 1 / sqrt(head dim)",
        )


def check_is_float(name: str, x: torch.Tensor) -> None:
    """Refuse an operand of a dtype that kernels do not have."""
    if x.dtype not in FLOATS:
        raise DTypeError(
            f"{name} is of dtype {x.dtype}", hint="use float16, bfloat16, float32 or float64"
        )


def check_is_like(name: str, x: torch.Tensor, query_name: str, query: torch.Tensor) -> None:
    """Refuse an operand of another dtype than the query's, or on another device."""
    if x.dtype is not query.dtype:
        raise DTypeError(
            f"{name} is {x.dtype} and {query_name} is {query.dtype}",
            hint=f"convert: {name}.to({query_name}.dtype)",
        )
    if x.device != query.device:
        raise DeviceError(
            f"{name} is on {x.device} and {query_name} is on {query.device}",
            hint=f"move it: {name}.to({query_name}.device)",
        )


def check_is_strided(name: str, x: torch.Tensor) -> None:
    """Refuse tensors whose elements do not lie in memory by strides."""
    if x.is_nested:
        raise ArgumentError(
            f"{name} is a nested tensor",
            hint="a program takes packed rows, and a tensor that says which document each row is "
            "of; attndsl.scaled_dot_product_attention takes nested q, k and v",
        )
    if x.layout is not torch.strided:
        kind = str(x.layout).removeprefix("torch.")
        raise ArgumentError(f"{name} has the layout {kind}", hint=f"pass {name}.to_dense()")


def check_is_writable(name: str, x: torch.Tensor) -> None:
    """Refuse tensors of which several elements are one, where results are to be written."""
    if any(step == 0 and n > 1 for n, step in zip(x.shape, x.stride(), strict=True)):
        raise ArgumentError(
            f"{name} is expanded: several of its elements are one", hint=f"pass {name}.contiguous()"
        )


def is_deterministic(asked: bool | None) -> bool:
    """Tell what a call asks for, or what torch does.

    Raises:
        ArgumentError: It asks for neither yes nor no.
    """
    if asked is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(asked, int):
        raise ArgumentError(f"deterministic is a {type(asked).__name__}", hint="pass a bool")
    return bool(asked)


def check_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse q, k and v that do not go together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ArgumentError(
                f"{name} is a {type(x).__name__}", hint="pass a tensor (batch, heads, length, dim)"
            )
        check_is_strided(name, x)
        if x.dim() != 4:
            raise ShapeError(
                f"{name} has {x.dim()} dims {tuple(x.shape)}",
                hint="pass (batch, heads, length, dim); unsqueeze(0) adds a batch",
            )
        check_is_float(name, x)
    for name, x in (("k", k), ("v", v)):
        check_is_like(name, x, "q", q)
        if x.shape[0] != q.shape[0]:
            raise ShapeError(
                f"{name} has batch {x.shape[0]} and q has batch {q.shape[0]}",
                hint=f"expand {name}: {name}.expand({q.shape[0]}, -1, -1, -1)",
            )
    if k.shape[1:3] != v.shape[1:3]:
        raise ShapeError(
            f"k is {tuple(k.shape)} and v is {tuple(v.shape)}",
            hint="k and v have the same heads and length",
        )
    if q.shape[3] != k.shape[3]:
        raise ShapeError(
            f"q has head dim {q.shape[3]} and k has head dim {k.shape[3]}",
            hint="q and k are multiplied along it: make them equal (v may differ)",
        )
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ShapeError(
            f"q has {q.shape[1]} heads and k has {k.shape[1]}",
            hint="the number of q heads is a multiple of that of k and v, and neither is 0",
        )
    if q.shape[3] == 0:
        raise ShapeError("q and k have head dim 0", hint="give them at least one element a row")


def joined(
    captures: Mapping[str, torch.Tensor | Scalar] | None, named: Mapping[str, torch.Tensor | Scalar]
) -> Mapping[str, torch.Tensor | Scalar]:
    """The captures of one call, given at once and by keywords.

    Raises:
        ArgumentError: ``captures`` is no mapping from names, or a name is given in both ways.
    """
    if captures is None:
        return named
    if not isinstance(captures, Mapping) or not all(isinstance(name, str) for name in captures):
        raise ArgumentError(
            f"captures is a {type(captures).__name__} that is no mapping from names",
            hint='pass {"name": tensor or number, ...}',
        )
    twice = [name for name in named if name in captures]
    if twice:
        raise ArgumentError(
            f"{', '.join(twice)} is given twice: by keyword and in captures",
            hint="keep one of the two",
        )
    return {**captures, **named}


def check_names(program: Program, captures: Mapping[str, object]) -> None:
    """Refuse missing and unknown captures."""
    check_known(program, captures)
    missing = [d.name for d in program.tensors if d.name not in captures]
    missing += [p.name for p in program.params if p.name not in captures and p.default is None]
    if missing:
        given = [f"{name}=..." for name in missing if name not in CALL_ARGUMENTS]
        others = ", ".join(f'"{name}": ...' for name in missing if name in CALL_ARGUMENTS)
        given += [f"captures={{{others}}}"] if others else []
        raise ArgumentError(
            f"the call lacks {', '.join(map(repr, missing))}",
            hint=f"add {', '.join(given)} to the call"
            + ("; as a keyword, such a name is an argument" if others else " or to compile()"),
        )


def some_captures(
    program: Program, captures: Mapping[str, torch.Tensor | Scalar], head_dim: int
) -> dict[str, torch.Tensor | Scalar]:
    """``captures`` as a call takes them, where others are missing and no lengths are known.

    Raises:
        ShapeError, DTypeError, ArgumentError: What no call could take, or not together.
    """
    check_known(program, captures)
    tensors = {
        decl.name: checked_tensor(decl, captures[decl.name], None)
        for decl in program.tensors
        if decl.name in captures
    }
    params = {
        decl.name: checked_param(decl, captures, None)
        for decl in program.params
        if decl.name in captures
    }
    bind_dims(program, tensors, params, {"head_dim": head_dim}, some=True)
    return {**tensors, **params}


def check_known(program: Program, captures: Mapping[str, object]) -> None:
    """Refuse unknown captures."""
    needed = [d.name for d in program.tensors] + [d.name for d in program.params]
    for name in captures:
        if name not in needed:
            raise ArgumentError(
                f"the program has no tensor or run-time param '{name}'",
                hint=_instead_of(name, needed),
            )


def _instead_of(name: str, needed: list[str]) -> str:
    """The hint for a name that is none of ``needed``."""
    if name in ("params", "tensors"):
        return f"'{name}' is an argument of compile(); a call takes captures={{...}}"
    if name in COMPILE_ARGUMENTS:
        return f"'{name}' is an argument of compile(): attndsl.compile(text, {name}=...)"
    if name in _OF_SDPA:
        return f"{_OF_SDPA[name]}; attndsl.scaled_dot_product_attention has torch's arguments"
    close = difflib.get_close_matches(name, needed, n=1)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"it takes {', '.join(map(repr, needed)) or 'none'}"


def learned(captures: Mapping[str, object]) -> frozenset[str]:
    """Names of the captures that require a gradient."""
    return frozenset(
        n for n, x in captures.items() if isinstance(x, torch.Tensor) and x.requires_grad
    )


def sizes_of(q: torch.Tensor, k: torch.Tensor) -> dict[str, int]:
    """The sizes that every call has, by their names in programs."""
    return {
        "batch": q.shape[0],
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "q_len": q.shape[2],
        "kv_len": k.shape[2],
        "head_dim": q.shape[3],
    }


def bind_dims(
    program: Program,
    tensors: Mapping[str, torch.Tensor],
    params: Mapping[str, Scalar | torch.Tensor],
    sizes: dict[str, int],
    shares: frozenset[tuple[str, int]] = frozenset(),
    some: bool = False,
) -> None:
    """Give dim names that ``sizes`` lacks their sizes, and check every declared dim but ``shares``.

    Where there are only ``some`` of the tensors, params and sizes, dims that need others are left.
    """
    given = [decl for decl in program.tensors if decl.name in tensors]
    for decl in given:
        for dim, size in zip(decl.dims, tensors[decl.name].shape, strict=True):
            if dim.op is Op.SIZE:
                sizes.setdefault(str(dim.value), size)
    numbers = {n: p for n, p in params.items() if not isinstance(p, torch.Tensor)}
    known = Environment({**numbers, **sizes})
    for decl in given:
        shape = tensors[decl.name].shape
        for number, (dim, size) in enumerate(zip(decl.dims, shape, strict=True)):
            try:
                wanted = sizes[str(dim.value)] if dim.op is Op.SIZE else evaluate(dim, known)
            except KeyError as missing:
                if some:
                    continue
                raise ArgumentError(
                    f"dim {number} of {decl.name} depends on {missing}, which has no value here",
                    hint="give that param as a Python number",
                ) from None
            if wanted != size and (decl.name, number) not in shares:
                raise ShapeError(
                    f"{decl.name} has shape {tuple(shape)}, and its dim {number} is declared as "
                    f"{_dim_text(dim)}, which is {wanted} in this call",
                    hint=f"pass {decl.name} with {wanted} elements along dim {number}"
                    + _swapped(str(dim.value), size, sizes),
                )


_OF_SDPA = {
    "is_causal": "write causal() in the program",
    "attn_mask": "write the mask in the program, or declare a tensor for it",
    "dropout_p": "write 'weights = dropout(softmax(score), p)' in the program",
    "enable_gqa": "leave it out: k and v may have fewer heads",
}
_SWAPPED = {"q_len": "heads", "kv_len": "kv_heads", "heads": "q_len", "kv_heads": "kv_len"}


def _swapped(dim: str, size: int, sizes: Mapping[str, int]) -> str:
    """The end of a hint where ``size`` fits once heads and lengths change places."""
    other = _SWAPPED.get(dim)
    if other is None or sizes.get(other) != size:
        return ""
    return "; if q, k and v are (batch, length, heads, dim), pass each one's transpose(1, 2)"


def check_rows(program: Program, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse contractions of rows of different lengths."""
    for item in program.products:
        left, right = sides(item)
        widths = tensors[left.name].shape[-1], tensors[right.name].shape[-1]
        if widths[0] != widths[1]:
            raise ShapeError(
                f"dot multiplies rows of {left.name} and {right.name}, which have {widths[0]} and "
                f"{widths[1]} elements here",
                item.span,
                hint=f"pass {left.name} and {right.name} with last dims of one size",
            )


def _dim_text(dim: Node) -> str:
    return str(dim.value) if not dim.args else "an expression of sizes"


def checked_tensor(decl: TensorDecl, value: object, device: torch.device | None) -> torch.Tensor:
    """``value`` as the captured tensor that is declared; on ``device``, if one is known.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: What does not fit, and what would.
    """
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(
            f"{decl.name} is a {type(value).__name__}", hint=_tensor_of(decl, value)
        )
    check_is_strided(decl.name, value)
    if value.dim() != len(decl.dims):
        dims = ", ".join(map(print_expression, decl.dims))
        raise ShapeError(
            f"{decl.name} has shape {tuple(value.shape)}",
            hint=f"the program declares {decl.name}[{dims}], with {counted(len(decl.dims), 'dim')}",
        )
    _check_dtype(decl.name, decl.dtype, value, device)
    return value


def _tensor_of(decl: TensorDecl, value: object) -> str:
    """The hint for a ``value`` that is no tensor."""
    if value is None:
        return _none_hint(decl)
    if isinstance(value, list | tuple) or hasattr(value, "__array__"):
        return f"pass torch.as_tensor({decl.name})"
    return "the program declares it as a tensor"


def _none_hint(decl: TensorDecl | ParamDecl) -> str:
    return f"pass a value, or declare {decl.name} with '= none', so that calls may leave it out"


def _check_dtype(name: str, dtype: DType, value: torch.Tensor, device: torch.device | None) -> None:
    if value.dtype not in _DTYPES[dtype]:
        raise DTypeError(
            f"{name} is of dtype {value.dtype}",
            hint=f"the program declares it as {dtype.value}: convert it, or change the declaration",
        )
    if device is not None and value.device != device:
        raise DeviceError(
            f"{name} is on {value.device} and q is on {device}", hint=f"{name}.to(q.device)"
        )


def checked_param(
    decl: ParamDecl, captures: Mapping[str, object], device: torch.device | None
) -> Scalar | torch.Tensor:
    """The value of the param that is declared; a tensor is on ``device``, if one is known.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: What does not fit, and what would.
    """
    value = captures.get(decl.name, decl.default)
    if isinstance(value, torch.Tensor):
        if value.dim() != 0:
            raise ShapeError(
                f"{decl.name} has shape {tuple(value.shape)}",
                hint="a param is one number: pass a 0-d tensor, or declare a tensor",
            )
        _check_dtype(decl.name, decl.dtype, value, device)
        return value
    fits = isinstance(value, _PYTHON[decl.dtype])
    if not fits or (isinstance(value, bool) and decl.dtype is not DType.BOOL):
        number = plain_number(decl.dtype, value)
        if value is None:
            raise ArgumentError(f"{decl.name} is None", hint=_none_hint(decl))
        if number is None:
            raise no_value(decl.name, decl.dtype, value)
        value = number
    if decl.dtype is DType.FLOAT:
        try:
            return as_float(value)
        except OverflowError:
            raise no_value(decl.name, decl.dtype, value) from None
    check_int(decl.name, value)
    return value  # type: ignore[return-value]
