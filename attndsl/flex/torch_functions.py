"""Torch's functions and methods in the language, by their names in torch.

A name stands for a function, a method and an operator alike: ``torch.add``, ``x.add`` and
``x.__add__`` are all ``add``. Where the language has no function of its own, torch's documented
formula is written out.
"""

from __future__ import annotations

import math
from functools import partial, reduce
from typing import TYPE_CHECKING

from attndsl.ir import DType, Op

from . import arithmetic as ar

if TYPE_CHECKING:
    from collections.abc import Callable

    from attndsl.ir import Node

    from .arithmetic import Value

REDUCTIONS = frozenset(
    {
        "sum", "mean", "cumsum", "cumprod", "prod", "amax", "amin", "argmax", "argmin", "any",
        "all", "norm", "std", "var", "logsumexp", "softmax", "log_softmax", "sort", "argsort",
        "median", "topk", "cummax", "cummin", "aminmax", "count_nonzero", "unique", "matmul", "dot",
        "bmm", "mm", "mv", "einsum", "nonzero", "masked_select", "histc", "bincount", "nansum",
        "rmatmul",
    }
)  # fmt: skip
VALUES = frozenset(
    {"item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__bool__", "__int__",
     "__float__", "__index__", "__complex__", "__array__", "__contains__", "__repr__", "__format__",
     "__str__"}
)  # fmt: skip
"""Names, with their underscores, that give Python something to decide on or to show."""
_CHOICE = "write torch.where(condition, a, b) for a choice between values"
_BUCKETS = "compute the buckets of all values before the call and index them: bucket[kv_idx]"
INSTEAD = {
    "stack": _CHOICE, "cat": _CHOICE, "concat": _CHOICE, "bucketize": _BUCKETS,
    "searchsorted": _BUCKETS, "isin": "pass a captured tensor of one dim to search in",
}  # fmt: skip
"""Advice on functions that the language has no counterpart of: the code to write instead."""
RANDOM = frozenset(
    {"rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "bernoulli", "normal",
     "dropout", "uniform", "multinomial", "randperm", "poisson", "exponential"}
)  # fmt: skip


def _scaled(function: Callable[[Value, Value], Node]) -> Callable[..., Node]:
    def apply(a: Value, b: Value, *, alpha: Value = 1) -> Node:
        return function(a, b if alpha == 1 else ar.mul(b, alpha))

    return apply


def _unary(op: Op) -> Callable[..., Node]:
    return partial(ar.unary, op)


def _round(a: Value, *, decimals: int = 0) -> Node:
    if decimals:
        raise ValueError("rounding to decimals")
    return ar.rounded(Op.ROUND, a)


def _gelu(a: Value, approximate: str = "none") -> Node:
    if approximate == "none":
        return ar.unary(Op.GELU, a)
    inner = ar.mul(math.sqrt(2 / math.pi), ar.add(a, ar.mul(0.044715, ar.power(ar.floating(a), 3))))
    return ar.mul(ar.mul(0.5, a), ar.add(1.0, ar.unary(Op.TANH, inner)))


def _softplus(a: Value, beta: Value = 1.0, threshold: Value = 20.0) -> Node:
    if beta == 1:
        # Beyond torch's threshold of 20 both are the same float.
        return ar.unary(Op.SOFTPLUS, a)
    scaled = ar.mul(a, beta)
    return ar.div(ar.unary(Op.SOFTPLUS, scaled), beta)


def _leaky_relu(a: Value, negative_slope: Value = 0.01) -> Node:
    return ar.where(ar.compare(">", a, 0.0), a, ar.mul(a, negative_slope))


def _elu(a: Value, alpha: Value = 1.0) -> Node:
    grown = ar.mul(alpha, ar.unary(Op.EXPM1, ar.minimum(ar.floating(a), 0.0)))
    return ar.where(ar.compare(">", a, 0.0), a, grown)


def _selu(a: Value) -> Node:
    return ar.mul(1.0507009873554805, _elu(a, 1.6732632423543772))


def _celu(a: Value, alpha: Value = 1.0) -> Node:
    low = ar.minimum(ar.floating(a), 0.0)
    grown = ar.mul(alpha, ar.unary(Op.EXPM1, ar.div(low, alpha)))
    return ar.where(ar.compare(">", a, 0.0), a, grown)


def _relu(a: Value) -> Node:
    x = ar.number(a)
    return ar.maximum(x, 0) if x.dtype is DType.INT else ar.unary(Op.RELU, x)


def _silu(a: Value) -> Node:
    return ar.unary(Op.SILU, a)


def _hardtanh(a: Value, min_val: Value = -1.0, max_val: Value = 1.0) -> Node:
    if ar.is_extremum(ar.number(a), ar.number(min_val)):
        return ar.clamp(a, min_val, max_val)
    # Its gradient is 0 at both ends, where that of a clamp is 1.
    below = ar.where(ar.compare(">=", a, max_val), max_val, a)
    return ar.where(ar.compare("<=", a, min_val), min_val, below)


def _relu6(a: Value) -> Node:
    return _hardtanh(a, 0.0, 6.0)


def _hardsigmoid(a: Value) -> Node:
    return ar.div(_relu6(ar.add(a, 3.0)), 6.0)


def _hardswish(a: Value) -> Node:
    return ar.mul(a, _hardsigmoid(a))


def _mish(a: Value) -> Node:
    return ar.mul(a, ar.unary(Op.TANH, ar.unary(Op.SOFTPLUS, a)))


def _threshold(a: Value, threshold: Value, value: Value) -> Node:
    return ar.where(ar.compare(">", a, threshold), a, value)


def _hardshrink(a: Value, lambd: Value = 0.5) -> Node:
    return ar.where(ar.compare(">", ar.absolute(a), lambd), a, 0.0)


def _softshrink(a: Value, lambd: Value = 0.5) -> Node:
    shrunk = ar.mul(ar.sign(a), ar.sub(ar.absolute(a), lambd))
    return ar.where(ar.compare(">", ar.absolute(a), lambd), shrunk, 0.0)


def _logaddexp(a: Value, b: Value) -> Node:
    apart = ar.negative(ar.absolute(ar.sub(ar.floating(a), b)))
    return ar.add(ar.maximum(a, b), ar.unary(Op.LOG1P, ar.unary(Op.EXP, apart)))


def _lerp(start: Value, end: Value, weight: Value) -> Node:
    return ar.add(start, ar.mul(weight, ar.sub(end, start)))


def _addcmul(a: Value, b: Value, c: Value, *, value: Value = 1) -> Node:
    return ar.add(a, ar.mul(value, ar.mul(b, c)))


def _masked_fill(a: Value, mask: Value, value: Value) -> Node:
    x = ar.lift(a)
    return ar.where(mask, ar.to(value, x.dtype), x)


def _where(condition: Value, a: Value, b: Value) -> Node:
    if ar.lift(condition).dtype is not DType.BOOL:
        raise ValueError("torch.where of a condition that is no bool")
    return ar.where(condition, a, b)


def _sinh(a: Value) -> Node:
    x = ar.floating(a)
    return ar.mul(0.5, ar.sub(ar.unary(Op.EXP, x), ar.unary(Op.EXP, ar.negative(x))))


def _cosh(a: Value) -> Node:
    x = ar.floating(a)
    return ar.mul(0.5, ar.add(ar.unary(Op.EXP, x), ar.unary(Op.EXP, ar.negative(x))))


def _tanhshrink(a: Value) -> Node:
    return ar.sub(a, ar.unary(Op.TANH, a))


def _clone(a: Value, *, memory_format: object = None) -> Node:
    return ar.lift(a)


def _any(elements: list[Node]) -> Node:
    return reduce(ar.either, elements, ar.FALSE)


def _all(elements: list[Node]) -> Node:
    return reduce(ar.both, elements, ar.TRUE)


def _sum(elements: list[Node]) -> Node:
    return reduce(ar.add, map(ar.number, elements))


def _prod(elements: list[Node]) -> Node:
    return reduce(ar.mul, map(ar.number, elements))


def _mean(elements: list[Node]) -> Node:
    return ar.div(_sum([ar.floating(x) for x in elements]), len(elements))


_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_FLOAT_FUNCTIONS = (
    Op.SQRT, Op.RSQRT, Op.EXP, Op.EXP2, Op.LOG, Op.LOG2, Op.LOG1P, Op.EXPM1, Op.SIN, Op.COS, Op.TAN,
    Op.TANH, Op.SIGMOID, Op.ERF,
)  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Node]] = {
    "add": _scaled(ar.add),
    "sub": _scaled(ar.sub),
    "subtract": _scaled(ar.sub),
    "rsub": _scaled(lambda a, b: ar.sub(b, a)),
    "mul": ar.mul,
    "multiply": ar.mul,
    "div": ar.div,
    "divide": ar.div,
    "true_divide": ar.div,
    "truediv": ar.div,
    "floor_divide": ar.floordiv,
    "floordiv": ar.floordiv,
    "remainder": ar.mod,
    "mod": ar.mod,
    "fmod": ar.fmod,
    "pow": ar.power,
    "float_power": lambda a, b: ar.power(ar.floating(a), b),
    "neg": ar.negative,
    "negative": ar.negative,
    "pos": ar.lift,
    "positive": ar.lift,
    "abs": ar.absolute,
    "absolute": ar.absolute,
    "sign": ar.sign,
    "sgn": ar.sign,
    "square": lambda a: ar.power(a, 2),
    "reciprocal": lambda a: ar.div(1.0, a),
    "floor": partial(ar.rounded, Op.FLOOR),
    "ceil": partial(ar.rounded, Op.CEIL),
    "round": _round,
    "trunc": ar.trunc,
    "fix": ar.trunc,
    "frac": lambda a: ar.sub(a, ar.trunc(a)),
    "where": _where,
    "clamp": lambda a, min=None, max=None: ar.clamp(a, min, max),  # noqa: A006
    "clamp_min": lambda a, min: ar.clamp(a, low=min),  # noqa: A006
    "clamp_max": lambda a, max: ar.clamp(a, high=max),  # noqa: A006
    "minimum": ar.minimum,
    "maximum": ar.maximum,
    "min": ar.minimum,
    "max": ar.maximum,
    "fmin": ar.minimum,
    "fmax": ar.maximum,
    "masked_fill": _masked_fill,
    "lerp": _lerp,
    "addcmul": _addcmul,
    "logaddexp": _logaddexp,
    "logical_and": ar.both,
    "logical_or": ar.either,
    "logical_not": ar.negation,
    "logical_xor": lambda a, b: ar.bitwise(Op.BITXOR, ar.boolean(a), ar.boolean(b)),
    "and": partial(ar.bitwise, Op.BITAND),
    "or": partial(ar.bitwise, Op.BITOR),
    "xor": partial(ar.bitwise, Op.BITXOR),
    "bitwise_and": partial(ar.bitwise, Op.BITAND),
    "bitwise_or": partial(ar.bitwise, Op.BITOR),
    "bitwise_xor": partial(ar.bitwise, Op.BITXOR),
    "bitwise_not": ar.invert,
    "invert": ar.invert,
    "bitwise_left_shift": partial(ar.shift, Op.SHL),
    "bitwise_right_shift": partial(ar.shift, Op.SHR),
    "lshift": partial(ar.shift, Op.SHL),
    "rshift": partial(ar.shift, Op.SHR),
    "isneginf": lambda a: ar.compare("==", a, -math.inf),
    "isposinf": lambda a: ar.compare("==", a, math.inf),
    "isinf": lambda a: ar.compare("==", ar.absolute(a), math.inf),
    "expit": _unary(Op.SIGMOID),
    "log10": lambda a: ar.div(ar.unary(Op.LOG, a), math.log(10.0)),
    "logit": lambda a: ar.unary(Op.LOG, ar.div(a, ar.sub(1.0, a))),
    "sinh": _sinh,
    "cosh": _cosh,
    "deg2rad": lambda a: ar.mul(a, math.pi / 180),
    "rad2deg": lambda a: ar.mul(a, 180 / math.pi),
    "relu": _relu,
    "relu6": _relu6,
    "silu": _silu,
    "gelu": _gelu,
    "softplus": _softplus,
    "logsigmoid": lambda a: ar.negative(ar.unary(Op.SOFTPLUS, ar.negative(a))),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "selu": _selu,
    "celu": _celu,
    "hardtanh": _hardtanh,
    "hardsigmoid": _hardsigmoid,
    "hardswish": _hardswish,
    "mish": _mish,
    "threshold": _threshold,
    "hardshrink": _hardshrink,
    "softshrink": _softshrink,
    "softsign": lambda a: ar.div(a, ar.add(1.0, ar.absolute(a))),
    "tanhshrink": _tanhshrink,
    "clone": _clone,
    "contiguous": _clone,
    "isfinite": lambda a: ar.compare("<", ar.absolute(a), math.inf),
    **{op.value: _unary(op) for op in _FLOAT_FUNCTIONS},
    **{name: partial(ar.compare, op) for name, op in _COMPARISONS.items()},
}
"""Functions of nodes and Python numbers; keywords are torch's."""
FOLDS: dict[str, Callable[[list[Node]], Node]] = {
    "any": _any,
    "all": _all,
    "sum": _sum,
    "prod": _prod,
    "mean": _mean,
    "amax": lambda elements: reduce(ar.maximum, elements),
    "amin": lambda elements: reduce(ar.minimum, elements),
}
"""Reductions of a row by its elements, of which there is one or more."""
ALIASES = {
    "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "clip": "clamp", "log_sigmoid": "logsigmoid",
}  # fmt: skip
"""Other names of functions."""
TURNED_ROUND = {
    "radd": "add", "rsub": "sub", "rmul": "mul", "rpow": "pow", "rtruediv": "div",
    "rfloordiv": "floordiv", "rmod": "mod", "rand": "and", "ror": "or", "rxor": "xor",
    "rlshift": "lshift", "rrshift": "rshift",
}  # fmt: skip
"""Operators whose operands come in the other order, without underscores."""
IN_PLACE = {
    "iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div",
    "ifloordiv": "floordiv", "imod": "mod", "ipow": "pow", "iand": "and", "ior": "or",
    "ixor": "xor", "ilshift": "lshift", "irshift": "rshift",
}  # fmt: skip
"""Operators that change their left operand, without underscores."""
