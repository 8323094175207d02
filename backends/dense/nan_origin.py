"""Search for the operation of a program that makes a non-finite value at one pair of a call.

An operation makes one if its own operands are finite, or if it makes NaN of infinities. Constants
of infinity are as they are written, and are never blamed by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attndsl.ir import DType, Op, sides, toposort
from attndsl.passes.print_ir import print_expression

from .interpret import RULES, evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attndsl.ir import Node

    from .interpret import LeafValues

_INFIX = {Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.FLOORDIV, Op.MOD, Op.POW}
_ZERO = "a divisor of 0: mask such pairs out, or divide by where(d == 0, 1.0, d)"
_LARGE = "mask such pairs out, or limit what grows with clamp(x, low, high)"
_HINTS = {
    Op.LOG: "the operand of log must be above 0: mask other pairs out, or write log(max(x, 1e-6))",
    Op.LOG2: "the operand of log2 must be above 0: mask other pairs out, or write "
    "log2(max(x, 1e-6))",
    Op.LOG1P: "the operand of log1p must be above -1: mask other pairs out, or limit it with max",
    Op.SQRT: "the operand of sqrt must be 0 or more: mask other pairs out, or write "
    "sqrt(max(x, 0.0))",
    Op.RSQRT: "the operand of rsqrt must be above 0: mask other pairs out, or write "
    "rsqrt(max(x, 1e-6))",
    Op.DIV: _ZERO,
    Op.FLOORDIV: _ZERO,
    Op.MOD: _ZERO,
    Op.POW: "0 has no negative power, and a negative number only whole ones: mask such pairs out",
}
_SLOPES = {
    Op.SQRT: "sqrt is infinitely steep at 0: write sqrt(x + 1e-6), or mask such pairs out",
    Op.POW: "a power below 1 is infinitely steep at 0: write (x + 1e-6) ** p, or mask such pairs "
    "out",
}


@dataclass(frozen=True, slots=True)
class PairPlace:
    """A pair of a call, or a row of it, by the rows of its tensors."""

    b: int
    h: int
    row: int
    key: int | None = None

    def __str__(self) -> str:
        key = "" if self.key is None else f", key row {self.key}"
        return f"batch {self.b}, head {self.h}, query row {self.row}{key}"


@dataclass(frozen=True, slots=True)
class Origin:
    """Operation or leaf that made a value that is not finite."""

    item: Node
    """The operation, or the leaf that has such a value."""
    told: str
    """Sentence that names it, its value and what that was computed from."""
    hint: str


def scope_at(scope: LeafValues, place: PairPlace) -> LeafValues:
    """``scope`` for one pair; the first key where a place has none."""
    key = 0 if place.key is None else place.key
    at = (place.b, place.h, place.row, key)
    variables = dict(scope.variables)
    for name, dim in (("b", 0), ("h", 1), ("hkv", 1), ("q", 2), ("kv", 3)):
        one = variables[name]
        variables[name] = one.narrow(dim, at[dim], 1) if one.shape[dim] > 1 else one
    score = scope.score
    for dim, index in enumerate(at):
        score = score.narrow(dim, index, 1) if score.shape[dim] > 1 else score
    return replace(scope, variables=variables, score=score)


Values = dict["Node", torch.Tensor]


def values_at(root: Node, scope: LeafValues) -> Values:
    """The value of each node below ``root`` in a scope of one pair."""
    nodes = toposort(root)
    return dict(zip(nodes, evaluate(tuple(nodes), scope), strict=True))


def origin_of(root: Node, scope: LeafValues) -> Origin:
    """Operation or leaf that made the value of ``root``, not finite at the pair of ``scope``."""
    values = values_at(root, scope)
    item = root
    while True:
        wrong = [arg for arg in _operands(item, values) if not _is_finite(values[arg])]
        if values[item].isnan():
            # NaN of infinities arises here, wherever these are from.
            below = next((arg for arg in wrong if values[arg].isnan()), None)
        else:
            below = next(iter(wrong), None)
        if below is None:
            return _origin(item, values, wrong, scope)
        item = below


def slope_origin(root: Node, scope: LeafValues, seed: torch.Tensor) -> Origin | None:
    """The operation below ``root`` whose derivative is not finite where its value's gradient is.

    Args:
        root: An expression with finite values.
        scope: Of one pair.
        seed: The gradient of its value there.

    Returns:
        None where all derivatives are finite.
    """
    values = values_at(root, scope)
    found: Values = {root: seed.reshape(1, 1, 1, 1)}
    for item in reversed(toposort(root)):
        grad = found.get(item)
        if grad is None or not item.args or not grad.isfinite().all() or not grad.any():
            continue
        for arg, part in _pulled(item, values, grad, scope):
            if not _is_finite(part):
                of, by = print_expression(item), print_expression(arg)
                told = (
                    f"the derivative of {of} by {by} is {number(part)}: "
                    f"{_computation(item, values)}, where the gradient is {number(grad)}"
                )
                return Origin(item, told, _SLOPES.get(item.op, _HINTS.get(item.op, _LARGE)))
            found[arg] = found[arg] + part if arg in found else part
    return None


def number(value: torch.Tensor | float) -> str:
    """A value of one element, short; floats look like floats."""
    found = value.item() if isinstance(value, torch.Tensor) else value
    return str(float(f"{found:.6g}")) if isinstance(found, float) else str(found)


def first_wrong(x: torch.Tensor) -> tuple[int, ...] | None:
    """Indices of the first element that is not finite, if there is one."""
    wrong = ~x.isfinite()
    return tuple(int(i) for i in wrong.nonzero()[0]) if bool(wrong.any()) else None


def _operands(item: Node, values: Mapping[Node, torch.Tensor]) -> list[Node]:
    """Operands that may be to blame: floats that are no constants, of the branch that is taken."""
    args = item.args
    if item.op is Op.WHERE:
        args = args[1:2] if bool(values[args[0]]) else args[2:]
    return [arg for arg in args if arg.dtype is DType.FLOAT and arg.op is not Op.CONST]


def _is_finite(value: torch.Tensor) -> bool:
    return bool(value.isfinite().all())


def _origin(item: Node, values: Values, wrong: list[Node], scope: LeafValues) -> Origin:
    value = number(values[item])
    if item.op is Op.PARAM:
        return Origin(item, f"param '{item.value}' is {value}", "pass a finite number")
    if item.op is Op.LOAD:
        tensor = scope.tensors[str(item.value)]
        places = [int(values[arg]) for arg in item.args]
        at = [min(max(0, i), size - 1) for i, size in zip(places, tensor.shape, strict=True)]
        return Origin(
            item,
            f"tensor '{item.value}' is {value} at {at}",
            f"it was {value} before the call: look at what made it",
        )
    if item.op is Op.DOT:
        return _origin_of_rows(item, values, scope)
    told = f"{print_expression(item)} is {value}: {_computation(item, values)}"
    for arg in wrong:
        below = origin_of(arg, scope)
        if below.item.op is not Op.SCORE:
            told += f", and {below.told}"
    return Origin(item, told, _HINTS.get(item.op, _LARGE))


def _origin_of_rows(item: Node, values: Values, scope: LeafValues) -> Origin:
    for side in sides(item):
        tensor = scope.tensors[side.name]
        at = tuple(
            min(max(0, int(values[arg])), size - 1)
            for arg, size in zip(side.indices, tensor.shape, strict=False)
        )
        place = first_wrong(tensor[at])
        if place is not None:
            value = number(tensor[at][place])
            return Origin(
                item,
                f"tensor '{side.name}' is {value} at {[*at, *place]}",
                f"it was {value} before the call: look at what made it",
            )
    told = f"{print_expression(item)} is {number(values[item])}: its sum overflows"
    return Origin(item, told, _LARGE)


def _pulled(
    item: Node, values: Values, grad: torch.Tensor, scope: LeafValues
) -> list[tuple[Node, torch.Tensor]]:
    """The gradients of an operation's float operands, from that of its value."""
    with torch.enable_grad():
        args = [values[arg].detach().requires_grad_(arg.dtype is DType.FLOAT) for arg in item.args]
        floats = [(arg, x) for arg, x in zip(item.args, args, strict=True) if x.requires_grad]
        result = RULES[item.op](item, tuple(args), scope)
        if not floats or not result.requires_grad:
            return []
        parts = torch.autograd.grad(result, [x for _, x in floats], grad, allow_unused=True)
    return [(arg, part) for (arg, _), part in zip(floats, parts, strict=True) if part is not None]


def _computation(item: Node, values: Values) -> str:
    shown = [number(values[arg]) for arg in item.args]
    if item.op in _INFIX:
        return f"{shown[0]} {item.op.value} {shown[1]}"
    if item.op is Op.WHERE:
        return f"the branch that it takes is {number(values[item])}"
    if not shown:
        return "it is written so"
    return f"{item.op.value} of {' and '.join(shown)}"
