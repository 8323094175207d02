"""Tensors of a case, by expressions of Python that its reproduction prints as they stand."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .program import Apply, Given, Kind, Layout, Literal, Name

if TYPE_CHECKING:
    from .program import Case, Expr, Values

_GUARD = 3


@dataclass(frozen=True, slots=True)
class Call:
    """What a call is given, as expressions of Python."""

    operands: dict[str, str]
    """q, k and v."""
    captures: dict[str, str]
    """Tensors, and params that the call gives."""
    options: dict[str, str]
    bound: dict[str, str]
    """Params that ``compile`` is given."""
    learned: tuple[str, ...]
    """Names of operands and captures that require grad."""


def dim_size(case: Case, dim: Expr) -> int:
    """The number of elements that a declared dim has."""
    known: dict[str, Any] = {**case.sizes.named(), **dict(case.dims)}
    known |= {param.name: param.value for param in case.params}
    return _number(dim, known)


def _number(item: Expr, known: dict[str, Any]) -> int:
    if isinstance(item, Literal):
        return int(item.value)
    if isinstance(item, Name):
        return int(known[item.name])
    assert isinstance(item, Apply)
    args = [torch.tensor([_number(arg, known)]) for arg in item.args]
    return int(item.operation.rule(*args))


def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Shapes of q, k, v and the captured tensors."""
    s = case.sizes
    found = {
        "q": (s.batch, s.heads, s.q_len, s.head_dim),
        "k": (s.batch, s.kv_heads, s.kv_len, s.head_dim),
        "v": (s.batch, s.kv_heads, s.kv_len, s.value_dim),
    }
    return found | {
        tensor.name: tuple(dim_size(case, dim) for dim in tensor.dims) for tensor in case.tensors
    }


def expression(values: Values, shape: tuple[int, ...], device: str, swapped: int = 0) -> str:
    """Python for a tensor of that shape; ``swapped`` is the first of two dims to swap."""
    generator = f"torch.Generator().manual_seed({values.seed})"
    drawn = shape
    if values.layout is Layout.EXPANDED and shape[0] > 1:
        drawn = (1, *shape[1:])
    found = f"torch.randint({values.low}, {values.high + 1}, {drawn}, generator={generator})"
    if values.step != 1:
        found = f"({found} / {values.step})"
    # A copy to a device would not keep a layout, so it comes before.
    found += f".to({_there(device)}torch.{values.dtype})"
    return _laid_out(found, values, shape, swapped)


def _there(device: str) -> str:
    return "" if device == "cpu" else f"{device!r}, "


def literal(value: object) -> str:
    """Python for a number, or a list of them."""
    finite = not isinstance(value, float) or math.isfinite(value)
    return repr(value) if finite else f"float('{value}')"


def _scalar(value: object, dtype: str, device: str) -> str:
    there = "" if device == "cpu" else f", device={device!r}"
    return f"torch.tensor({literal(value)}, dtype=torch.{dtype}{there})"


def _laid_out(found: str, values: Values, shape: tuple[int, ...], swapped: int) -> str:
    rank = len(shape)
    fill = "True" if values.dtype == "bool" else "77"
    if values.layout is Layout.EXPANDED and shape[0] > 1:
        return f"{found}.expand{shape}"
    if values.layout is Layout.GUARDED:
        around = (0, 0) * (rank - 1) + (_GUARD, _GUARD)
        pad = f"torch.nn.functional.pad({found}, {around}, value={fill})"
        return f"{pad}[{_GUARD}:-{_GUARD}]"
    if values.layout is Layout.PADDED:
        pad = f"torch.nn.functional.pad({found}, (0, {_GUARD}), value={fill})"
        return f"{pad}[..., :-{_GUARD}]"
    if values.layout is Layout.SWAPPED and rank > swapped + 1:
        turn = f".transpose({swapped}, {swapped + 1})"
        return f"{found}{turn}.contiguous(){turn}"
    if values.layout is Layout.COLUMNS and rank == 1:
        return f"{found}.repeat_interleave(2)[::2]"
    if values.layout is Layout.COLUMNS and rank > 1:
        return f"{found}.mT.contiguous().mT"
    return found


def python_call(case: Case, dtype: str, device: str = "cpu") -> Call:
    """The call of ``case`` with q, k and v of ``dtype`` (a name in torch)."""
    sizes = shapes(case)
    operands = {
        name: expression(replace(values, dtype=dtype), sizes[name], device, swapped=1)
        for name, values in zip("qkv", case.inputs, strict=True)
    }
    learned = [name for name, x in zip("qkv", case.inputs, strict=True) if x.learned]
    captures, bound = {}, {}
    for tensor in case.tensors:
        captures[tensor.name] = expression(tensor.values, sizes[tensor.name], device)
        learned += [tensor.name] * tensor.values.learned
    kinds = {Kind.INT: "int64", Kind.FLOAT: "float32", Kind.BOOL: "bool"}
    for param in case.params:
        if param.given is Given.BOUND:
            bound[param.name] = literal(param.value)
        elif param.given is Given.NUMBER:
            captures[param.name] = literal(param.value)
        elif param.given is not Given.DEFAULT:
            captures[param.name] = _scalar(param.value, kinds[param.kind], device)
            learned += [param.name] * (param.given is Given.LEARNED)
    return Call(operands, captures, _options(case, device), bound, tuple(learned))


def _options(case: Case, device: str) -> dict[str, str]:
    at, found = case.positions, {}
    for name in ("q_offset", "kv_offset"):
        offset = getattr(at, name)
        if offset or at.as_tensors:
            found[name] = _scalar(offset, "int64", device) if at.as_tensors else str(offset)
    for name in ("q_index", "kv_index"):
        index = getattr(at, name)
        if index is not None:
            found[name] = _scalar(list(index), "int64", device)
    for name, numbers in (("q_offset", at.q_starts), ("kv_lengths", at.kv_lengths)):
        if numbers is not None:
            found[name] = _scalar(list(numbers), "int64", device)
    if case.scale is not None:
        found["scale"] = repr(case.scale)
    if case.dropout is not None:
        found["seed"] = str(case.seed)
    if case.lse:
        found["return_lse"] = "True"
    return found


def value_of(source: str) -> Any:
    """What an expression of :class:`Call` stands for."""
    return eval(source, {"torch": torch})


def arriving(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients that flow back to the output and to the log-sum-exp, fp32."""
    s = case.sizes
    generator = torch.Generator().manual_seed(case.seed)
    out = torch.randint(-32, 33, (s.batch, s.heads, s.q_len, s.value_dim), generator=generator)
    lse = torch.randint(-32, 33, (s.batch, s.heads, s.q_len), generator=generator)
    return out / 32, lse / 32
