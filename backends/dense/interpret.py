"""Dense interpretation of the IR with torch: each node becomes one tensor over all pairs.

A node's tensor has four dims (batch, query head, query row, key row), each of full size or 1: what
does not depend on ``kv`` is never computed along it. Bools are ``torch.bool``, ints
``torch.int64``, floats the scope's dtype.

Derivatives of any order are torch's own, with one rule more: *a zero gradient stays zero*. IEEE
gives 0 * inf = NaN, so a plain chain of torch operations turns the zero gradient of a pair that is
masked out, or of the branch that ``where`` did not take, into NaN as soon as it meets ``log`` at 0
or ``sqrt`` of a negative. Every operation with a singular or unbounded derivative is therefore
wrapped in :class:`_ZeroStaysZero`, elementwise and before any sum over a broadcast dim. What is
guaranteed: where the gradient that reaches an operation's result is 0 at a pair, its operands get
exactly 0 from that pair, whatever the operands are there. A NaN or inf gradient at a live pair,
through the branch that was taken, is not hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attndsl.errors import ArgumentError
from attndsl.ir import FLOAT_UNARY, DType, Op, sides, toposort

from .row_lookups import elements_at, product_of_rows, rows_at
from .vjp import pulled

if TYPE_CHECKING:
    from attndsl.ir import Node

    from ..base import Call

Rule = Callable[["Node", tuple[torch.Tensor, ...], "LeafValues"], torch.Tensor]


@dataclass(frozen=True, slots=True)
class LeafValues:
    """Values of the IR's leaves, each a tensor of four dims but for captured tensors."""

    variables: Mapping[str, torch.Tensor]
    sizes: Mapping[str, int]
    params: Mapping[str, torch.Tensor]
    tensors: Mapping[str, torch.Tensor]
    score: torch.Tensor
    """Value of ``SCORE``: the raw score, or the final one for a program's weights."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of floats."""
        return self.score.dtype

    @property
    def device(self) -> torch.device:
        """Device of all computations."""
        return self.score.device


def scope_of(call: Call, score: torch.Tensor) -> LeafValues:
    """The scope of ``call``; floats get the dtype of ``score`` (batch, heads, q_len, kv_len)."""
    batch, heads, q_len, _ = call.q.shape
    kv_heads, kv_len = call.k.shape[1:3]
    device = call.q.device

    def steps(count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int64, device=device)

    def positions(
        count: int, offset: int | torch.Tensor, index: torch.Tensor | None
    ) -> torch.Tensor:
        if index is not None:
            return index.to(torch.int64)
        if type(offset) is int:
            return torch.arange(offset, offset + count, dtype=torch.int64, device=device)
        return steps(count) + offset

    h = steps(heads).reshape(1, heads, 1, 1)
    q = positions(q_len, call.q_offset, call.q_index)
    kv = positions(kv_len, call.kv_offset, call.kv_index)
    return LeafValues(
        variables={
            "b": steps(batch).reshape(batch, 1, 1, 1),
            "h": h,
            "hkv": h // max(1, heads // max(1, kv_heads)),
            "q": q.reshape(1, 1, q_len, 1),
            "kv": kv.reshape(1, 1, 1, kv_len),
        },
        sizes=call.sizes,
        params={
            name: value.reshape(1, 1, 1, 1)
            if isinstance(value, torch.Tensor)
            # A copy from the CPU could not stand in a CUDA graph.
            else torch.full((1, 1, 1, 1), value, device=device, dtype=_param_dtype(value))
            for name, value in call.params.items()
        },
        tensors=call.tensors,
        score=score,
    )


def evaluate(roots: tuple[Node, ...], scope: LeafValues) -> tuple[torch.Tensor, ...]:
    """The values of ``roots``; nodes that they share are computed once.

    Raises:
        NotImplementedError: An operation has no rule here (a defect of this module).
    """
    values: dict[Node, torch.Tensor] = {}
    order = toposort(*roots)
    left = Counter(arg for item in order for arg in item.args) + Counter(roots)
    for item in order:
        rule = RULES.get(item.op)
        if rule is None:
            raise NotImplementedError(f"no dense rule for {item.op.name}")
        values[item] = rule(item, tuple(values[arg] for arg in item.args), scope)
        # A long program has more values of all pairs than fit in memory at a time.
        for arg in item.args:
            left[arg] -= 1
            if not left[arg]:
                del values[arg]
    return tuple(values[root] for root in roots)


def sides_of(
    product: Node, scope: LeafValues
) -> tuple[tuple[str, tuple[torch.Tensor, ...]], tuple[str, tuple[torch.Tensor, ...]]]:
    """The tensor's name and the indices of each side of a DOT."""
    left, right = sides(product)
    found = evaluate((*left.indices, *right.indices), scope)
    first = len(left.indices)
    return (left.name, found[:first]), (right.name, found[first:])


def check_lookups(roots: tuple[Node, ...], scope: LeafValues, live: torch.Tensor) -> None:
    """Refuse lookups that leave their tensor at a pair that takes part.

    Args:
        roots: Expressions whose lookups are checked. A lookup inside the branch of a ``where``
            that is not taken counts too.
        scope: Values of the leaves.
        live: Bool, of all pairs: which take part.

    Raises:
        ArgumentError: Names the tensor, the dim, the first offending index, and the size.
    """
    for item in toposort(*roots):
        if item.op is Op.LOAD and item.args:
            _check_places(item, str(item.value), evaluate(item.args, scope), scope, live)
        elif item.op is Op.IN:
            _check_places(item, str(item.value), evaluate(item.args[1:], scope), scope, live)
        elif item.op is Op.DOT:
            for name, indices in sides_of(item, scope):
                _check_places(item, name, indices, scope, live)


def _check_places(
    item: Node, name: str, indices: tuple[torch.Tensor, ...], scope: LeafValues, live: torch.Tensor
) -> None:
    tensor = scope.tensors[name]
    for dim, index in enumerate(indices):
        size = tensor.shape[dim]
        outside = ((index < 0) | (index >= size)) & live
        if not bool(outside.any()):
            continue
        place = tuple(int(i) for i in outside.nonzero()[0])
        found = int(index.expand(live.shape)[place])
        b, h, q, kv = place
        raise ArgumentError(
            f"tensor {name!r} is looked up at {found} in dim {dim}, of size {size} "
            f"(batch {b}, head {h}, query row {q}, key row {kv})",
            item.span,
            f"mask such pairs out, or write clamp(index, 0, {max(0, size - 1)})",
        )


class _ZeroStaysZero(torch.autograd.Function):
    """``function(*args)`` with torch's derivative, except that 0 times any derivative is 0.

    Its derivative is made of the same kind again, so the rule holds for those of any order.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
        return function(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.function, *args = inputs
        ctx.save_for_backward(*args)
        ctx.save_for_forward(*args)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor | None) -> torch.Tensor:
        inputs = torch.broadcast_tensors(*ctx.saved_tensors)  # type: ignore[no-untyped-call]
        parts = [
            _ZeroStaysZero.apply(  # type: ignore[no-untyped-call]
                _Slope(ctx.function, place), tangent.expand(inputs[0].shape), *inputs
            )
            for place, tangent in enumerate(tangents)
            if tangent is not None
        ]
        # Elementwise, so that the derivative is its own transpose.
        return torch.stack(parts).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        args = ctx.saved_tensors
        grads: list[torch.Tensor | None] = [None] * len(args)
        # Expanded first: a sum over a broadcast dim would mix one pair's NaN into all the others.
        inputs = [arg.expand(grad.shape) for arg in args]
        for place, wanted in enumerate(ctx.needs_input_grad[1:]):
            if wanted:
                part: torch.Tensor = _ZeroStaysZero.apply(  # type: ignore[no-untyped-call]
                    _Slope(ctx.function, place), grad, *inputs
                )
                grads[place] = part.sum_to_size(args[place].shape)
        return (None, *grads)


@dataclass(frozen=True, slots=True)
class _Slope:
    """From (gradient, operands of ``function``) to the gradient of operand ``place``; elementwise.

    ``function`` may be a slope itself. The result is linear in the gradient, and in each gradient
    among the operands but for that at ``place``: 0 where one of them is 0.
    """

    function: Callable[..., torch.Tensor]
    place: int

    @property
    def seeds(self) -> int:
        """Number of leading operands that are gradients."""
        return 1 + (self.function.seeds if isinstance(self.function, _Slope) else 0)

    def __call__(self, grad: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
        def of_one(arg: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.function(*args[: self.place], arg, *args[self.place + 1 :]),)

        (product,) = pulled(of_one, (args[self.place],), (grad,))
        zero = grad == 0
        for number, seed in enumerate(args[: self.seeds - 1]):
            if number != self.place:
                zero = zero | (seed == 0)
        # Not all zeros: the derivative by a gradient that happens to be 0 is none of these.
        return torch.where(zero & ~product.isfinite(), torch.zeros_like(product), product)


def times(seed: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """``seed * factor`` where 0 times anything is 0, in derivatives by ``seed`` too, of any order.

    Differentiable, unlike :func:`gated`.
    """
    seed, factor = torch.broadcast_tensors(seed, factor)  # type: ignore[no-untyped-call]
    # The slope of x * factor by x, which does not depend on x.
    product: torch.Tensor = _ZeroStaysZero.apply(_Slope(torch.mul, 0), seed, factor, factor)  # type: ignore[no-untyped-call]
    return product


def gated(seed: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """``product`` of a gradient with a derivative, but 0 where the gradient ``seed`` is 0."""
    return torch.where(seed == 0, torch.zeros_like(product), product)


def _guarded(function: Callable[..., torch.Tensor]) -> Rule:
    def rule(item: Node, args: tuple[torch.Tensor, ...], scope: LeafValues) -> torch.Tensor:
        if torch.is_grad_enabled() and any(arg.requires_grad for arg in args):
            result: torch.Tensor = _ZeroStaysZero.apply(function, *args)  # type: ignore[no-untyped-call]
            return result
        return function(*args)

    return rule


def _plain(function: Callable[..., torch.Tensor]) -> Rule:
    return lambda item, args, scope: function(*args)


def _by_type(integer: Callable[..., torch.Tensor], floating: Rule) -> Rule:
    def rule(item: Node, args: tuple[torch.Tensor, ...], scope: LeafValues) -> torch.Tensor:
        if item.dtype is DType.INT:
            return integer(*args)
        return floating(item, args, scope)

    return rule


def _full(value: bool | int | float, dtype: torch.dtype, scope: LeafValues) -> torch.Tensor:
    if isinstance(value, float) and abs(value) > torch.finfo(dtype).max:
        # Torch refuses what it would round to infinity, or to the largest number.
        value = float(torch.tensor(value, dtype=torch.float64).to(dtype))
    return torch.full((1, 1, 1, 1), value, dtype=dtype, device=scope.device)


def _torch_dtype(dtype: DType, scope: LeafValues) -> torch.dtype:
    return {DType.BOOL: torch.bool, DType.INT: torch.int64, DType.FLOAT: scope.dtype}[dtype]


def _param_dtype(value: bool | int | float) -> torch.dtype:
    return {bool: torch.bool, int: torch.int64}.get(type(value), torch.float64)


def _const(item: Node, args: tuple[torch.Tensor, ...], scope: LeafValues) -> torch.Tensor:
    assert isinstance(item.value, bool | int | float)
    return _full(item.value, _torch_dtype(item.dtype, scope), scope)


def _size(item: Node, args: tuple[torch.Tensor, ...], scope: LeafValues) -> torch.Tensor:
    return _full(scope.sizes[str(item.value)], torch.int64, scope)


def _param(item: Node, args: tuple[torch.Tensor, ...], scope: LeafValues) -> torch.Tensor:
    return scope.params[str(item.value)].to(_torch_dtype(item.dtype, scope))


def _load(item: Node, args: tuple[torch.Tensor, ...], scope: LeafValues) -> torch.Tensor:
    tensor = scope.tensors[str(item.value)]
    dtype = _torch_dtype(item.dtype, scope)
    if not args:
        return tensor.reshape(1, 1, 1, 1).to(dtype)
    if tensor.numel() == 0:
        shape = torch.broadcast_tensors(*args)[0].shape  # type: ignore[no-untyped-call]
        return torch.zeros(shape, dtype=dtype, device=scope.device)
    if tensor.requires_grad:
        # What comes back is added up before it is rounded to the tensor's dtype.
        tensor = tensor.to(dtype)
    return elements_at(tensor, args).to(dtype)


def _dot(item: Node, args: tuple[torch.Tensor, ...], scope: LeafValues) -> torch.Tensor:
    left, right = sides(item)
    first = len(left.indices)
    return product_of_rows(
        rows_at(scope.tensors[left.name].to(scope.dtype), args[:first]),
        rows_at(scope.tensors[right.name].to(scope.dtype), args[first:]),
    )


def _in(item: Node, args: tuple[torch.Tensor, ...], scope: LeafValues) -> torch.Tensor:
    element, *indices = args
    rows = rows_at(scope.tensors[str(item.value)], tuple(indices))
    found = torch.zeros_like(element + rows.sum(-1), dtype=torch.bool)
    for place in range(rows.shape[-1]):
        found = found | (rows[..., place] == element)
    return found


def _cast(item: Node, args: tuple[torch.Tensor, ...], scope: LeafValues) -> torch.Tensor:
    (arg,) = args
    return arg != 0 if item.dtype is DType.BOOL else arg.to(_torch_dtype(item.dtype, scope))


def _floor_divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    # -1 apart: the machine's own division of the least int by -1 traps.
    safe = torch.where((b == 0) | (b == -1), torch.ones_like(b), b)
    quotient = torch.div(a, safe, rounding_mode="floor")
    return torch.where(b == 0, torch.zeros_like(a), torch.where(b == -1, -a, quotient))


def _remainder(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    safe = torch.where((b == 0) | (b == -1), torch.ones_like(b), b)
    return torch.where(b == 0, torch.zeros_like(a), torch.remainder(a, safe))


def _float_floor_divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.div(a.detach(), b.detach(), rounding_mode="floor")


def _integer_power(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.pow(a, b)


def _shift(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda a, b: function(a, b.clamp(0, 63))


def _softplus(x: torch.Tensor) -> torch.Tensor:
    # torch's own softplus turns linear at 20, which is visible in fp64.
    return torch.logaddexp(x, torch.zeros_like(x))


_UNARY: dict[Op, Callable[..., torch.Tensor]] = {
    Op.FLOOR: torch.floor,
    Op.CEIL: torch.ceil,
    Op.ROUND: torch.round,
    Op.SQRT: torch.sqrt,
    Op.RSQRT: torch.rsqrt,
    Op.EXP: torch.exp,
    Op.EXP2: torch.exp2,
    Op.LOG: torch.log,
    Op.LOG2: torch.log2,
    Op.LOG1P: torch.log1p,
    Op.EXPM1: torch.expm1,
    Op.SIN: torch.sin,
    Op.COS: torch.cos,
    Op.TAN: torch.tan,
    Op.TANH: torch.tanh,
    Op.SIGMOID: torch.sigmoid,
    Op.SILU: torch.nn.functional.silu,
    Op.RELU: torch.relu,
    Op.GELU: torch.nn.functional.gelu,
    Op.ERF: torch.erf,
    Op.SOFTPLUS: _softplus,
}

RULES: dict[Op, Rule] = {
    Op.CONST: _const,
    Op.VAR: lambda item, args, scope: scope.variables[str(item.value)],
    Op.SIZE: _size,
    Op.PARAM: _param,
    Op.SCORE: lambda item, args, scope: scope.score,
    Op.LOAD: _load,
    Op.DOT: _dot,
    Op.IN: _in,
    Op.ADD: _plain(torch.add),
    Op.SUB: _plain(torch.sub),
    Op.MUL: _by_type(torch.mul, _guarded(torch.mul)),
    Op.NEG: _plain(torch.neg),
    Op.DIV: _guarded(torch.div),
    Op.FLOORDIV: _by_type(_floor_divide, _plain(_float_floor_divide)),
    Op.MOD: _by_type(_remainder, _guarded(torch.remainder)),
    Op.POW: _by_type(_integer_power, _guarded(torch.pow)),
    Op.MIN: _by_type(torch.minimum, _guarded(torch.minimum)),
    Op.MAX: _by_type(torch.maximum, _guarded(torch.maximum)),
    Op.ABS: _by_type(torch.abs, _guarded(torch.abs)),
    Op.SIGN: _plain(torch.sign),
    Op.BITAND: _plain(torch.bitwise_and),
    Op.BITOR: _plain(torch.bitwise_or),
    Op.BITXOR: _plain(torch.bitwise_xor),
    Op.BITNOT: _plain(torch.bitwise_not),
    Op.SHL: _plain(_shift(torch.bitwise_left_shift)),
    Op.SHR: _plain(_shift(torch.bitwise_right_shift)),
    Op.LT: _plain(torch.lt),
    Op.LE: _plain(torch.le),
    Op.EQ: _plain(torch.eq),
    Op.NE: _plain(torch.ne),
    Op.AND: _plain(torch.logical_and),
    Op.OR: _plain(torch.logical_or),
    Op.NOT: _plain(torch.logical_not),
    Op.WHERE: _plain(torch.where),
    Op.CAST: _cast,
} | {op: _guarded(_UNARY[op]) for op in _UNARY.keys() & FLOAT_UNARY}
"""Implementation of each operation; tests check that no :class:`~attndsl.ir.Op` is missing."""
