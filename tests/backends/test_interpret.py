"""The dense rules, one operation at a time, against independent formulas."""

from __future__ import annotations

import math

import pytest
import torch

from attndsl.backends.dense.interpret import RULES, LeafValues, check_lookups, evaluate
from attndsl.errors import ArgumentError
from attndsl.ir import DType, Op, cast, const, load, node, param, size, var

INT, FLOAT, BOOL = DType.INT, DType.FLOAT, DType.BOOL
LEAST = -(2**63)


def scope(params=None, tensors=None, sizes=None, score=None, dtype=torch.float64):
    """Params are rows of values along the keys."""
    values = {
        name: value.reshape(1, 1, 1, -1) if isinstance(value, torch.Tensor) else value
        for name, value in (params or {}).items()
    }
    score = torch.zeros((1, 1, 1, 1), dtype=dtype) if score is None else score
    kv = torch.arange(8).reshape(1, 1, 1, 8)
    return LeafValues({"q": kv.mT, "kv": kv}, sizes or {}, values, tensors or {}, score)


def ints(op, *rows):
    """The operation on int rows, as a list."""
    names = "xy"[: len(rows)]
    args = [param(name, INT) for name in names]
    values = {
        name: torch.tensor(row, dtype=torch.int64) for name, row in zip(names, rows, strict=True)
    }
    (result,) = evaluate((node(op, *args),), scope(values))
    assert result.dtype is torch.int64
    return result.flatten().tolist()


def floats(op, *rows):
    """The operation on fp64 rows, and the gradients of the rows for a gradient of ones."""
    names = "xy"[: len(rows)]
    args = [param(name, FLOAT) for name in names]
    leaves = [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in rows]
    (result,) = evaluate((node(op, *args),), scope(dict(zip(names, leaves, strict=True))))
    if result.requires_grad:
        result.sum().backward()
    grads = [
        [0.0] * len(row) if x.grad is None else x.grad.tolist()
        for x, row in zip(leaves, rows, strict=True)
    ]
    return result.flatten().tolist(), grads


def test_every_operation_has_a_rule():
    assert set(RULES) == set(Op)


def test_a_missing_rule_is_an_error(monkeypatch):
    monkeypatch.delitem(RULES, Op.ADD)
    with pytest.raises(NotImplementedError, match="ADD"):
        evaluate((node(Op.ADD, const(1), const(1)),), scope())


@pytest.mark.parametrize("a", [7, -7, 6, 0, LEAST, 2**63 - 1])
@pytest.mark.parametrize("b", [3, -3, 1, -1, 2**40])
def test_int_division_is_pythons(a, b):
    def wrap(x):
        return (x + 2**63) % 2**64 - 2**63

    assert ints(Op.FLOORDIV, [a], [b]) == [wrap(a // b)]
    assert ints(Op.MOD, [a], [b]) == [a % b]


def test_int_division_by_zero_gives_zero():
    assert ints(Op.FLOORDIV, [5, -5, 0], [0, 0, 0]) == [0, 0, 0]
    assert ints(Op.MOD, [5, -5, 0], [0, 0, 0]) == [0, 0, 0]


def test_ints_wrap_at_64_bits():
    assert ints(Op.ADD, [2**63 - 1], [1]) == [LEAST]
    assert ints(Op.MUL, [2**62], [4]) == [0]
    assert ints(Op.NEG, [LEAST]) == [LEAST]


def test_shifts_clamp_their_amount():
    assert ints(Op.SHL, [1, 1, 1, 3], [-5, 4, 63, 64]) == [1, 16, LEAST, LEAST]
    assert ints(Op.SHR, [-8, -8, -8, 9], [1, 64, -3, 63]) == [-4, -1, -8, 0]


def test_bit_operations_are_pythons():
    a, b = [12, -12, 0], [10, 7, -1]
    assert ints(Op.BITAND, a, b) == [x & y for x, y in zip(a, b, strict=True)]
    assert ints(Op.BITOR, a, b) == [x | y for x, y in zip(a, b, strict=True)]
    assert ints(Op.BITXOR, a, b) == [x ^ y for x, y in zip(a, b, strict=True)]
    assert ints(Op.BITNOT, a) == [~x for x in a]


def test_int_power_sign_and_extremes():
    (result,) = evaluate(
        (node(Op.POW, param("x", INT), const(3)),), scope({"x": torch.tensor([-2, 0, 5])})
    )
    assert result.flatten().tolist() == [-8, 0, 125]
    (result,) = evaluate(
        (node(Op.POW, param("x", INT), const(0)),), scope({"x": torch.tensor([0, 9])})
    )
    assert result.flatten().tolist() == [1, 1]
    assert ints(Op.SIGN, [-9, 0, 4]) == [-1, 0, 1]
    assert ints(Op.MIN, [-9, 0], [3, -1]) == [-9, -1]
    assert ints(Op.MAX, [-9, 0], [3, -1]) == [3, 0]


@pytest.mark.parametrize(
    ("op", "formula", "slope"),
    [
        (Op.SQRT, math.sqrt, lambda x: 0.5 / math.sqrt(x)),
        (Op.RSQRT, lambda x: x**-0.5, lambda x: -0.5 * x**-1.5),
        (Op.EXP, math.exp, math.exp),
        (Op.EXP2, lambda x: 2.0**x, lambda x: 2.0**x * math.log(2)),
        (Op.LOG, math.log, lambda x: 1 / x),
        (Op.LOG2, math.log2, lambda x: 1 / (x * math.log(2))),
        (Op.LOG1P, math.log1p, lambda x: 1 / (1 + x)),
        (Op.EXPM1, math.expm1, math.exp),
        (Op.SIN, math.sin, math.cos),
        (Op.COS, math.cos, lambda x: -math.sin(x)),
        (Op.TAN, math.tan, lambda x: 1 + math.tan(x) ** 2),
        (Op.TANH, math.tanh, lambda x: 1 - math.tanh(x) ** 2),
        (
            Op.SIGMOID,
            lambda x: 1 / (1 + math.exp(-x)),
            lambda x: math.exp(-x) / (1 + math.exp(-x)) ** 2,
        ),
        (
            Op.SILU,
            lambda x: x / (1 + math.exp(-x)),
            lambda x: (1 + math.exp(-x) + x * math.exp(-x)) / (1 + math.exp(-x)) ** 2,
        ),
        (
            Op.GELU,
            lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2,
            lambda x: (
                (1 + math.erf(x / math.sqrt(2))) / 2
                + x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
            ),
        ),
        (Op.ERF, math.erf, lambda x: 2 / math.sqrt(math.pi) * math.exp(-x * x)),
        (Op.SOFTPLUS, lambda x: math.log1p(math.exp(x)), lambda x: 1 / (1 + math.exp(-x))),
    ],
    ids=lambda item: item.value if isinstance(item, Op) else "",
)
def test_float_functions_and_their_derivatives(op, formula, slope):
    row = [0.1, 0.75, 1.0, 2.5, 25.0]
    values, (grads,) = floats(op, row)
    assert values == pytest.approx([formula(x) for x in row], rel=1e-13)
    assert grads == pytest.approx([slope(x) for x in row], rel=1e-11, abs=1e-15)


def test_softplus_is_stable():
    values, (grads,) = floats(Op.SOFTPLUS, [-1000.0, -40.0, 0.0, 40.0, 1000.0])
    assert values == pytest.approx([0.0, math.exp(-40), math.log(2), 40.0, 1000.0], rel=1e-15)
    assert grads == pytest.approx([0.0, math.exp(-40), 0.5, 1.0, 1.0], rel=1e-15)


@pytest.mark.parametrize(
    ("op", "row", "expected"),
    [
        (Op.ROUND, [0.5, 1.5, 2.5, -0.5, -1.5, 2.4], [0.0, 2.0, 2.0, 0.0, -2.0, 2.0]),
        (Op.FLOOR, [1.5, -1.5, 2.0], [1.0, -2.0, 2.0]),
        (Op.CEIL, [1.5, -1.5, 2.0], [2.0, -1.0, 2.0]),
        (Op.SIGN, [1.5, -1.5, 0.0], [1.0, -1.0, 0.0]),
    ],
)
def test_steps_have_gradient_zero(op, row, expected):
    values, (grads,) = floats(op, row)
    assert values == expected
    assert grads == [0.0] * len(row)


def test_gradients_at_kinks():
    assert floats(Op.ABS, [-2.0, 0.0, 3.0]) == ([2.0, 0.0, 3.0], [[-1.0, 0.0, 1.0]])
    assert floats(Op.RELU, [-2.0, 0.0, 3.0]) == ([0.0, 0.0, 3.0], [[0.0, 0.0, 1.0]])
    tie = [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]
    assert floats(Op.MIN, *tie) == ([1.0, 2.0, 2.0], [[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]])
    assert floats(Op.MAX, *tie) == ([2.0, 2.0, 3.0], [[0.0, 0.5, 1.0], [1.0, 0.5, 0.0]])


def test_float_floor_division_is_pythons_and_flat_and_its_rest_is_not():
    a, b = [7.5, -7.5, 7.5, -7.5], [2.0, 2.0, -2.0, -2.0]
    quotients = [x // y for x, y in zip(a, b, strict=True)]
    assert floats(Op.FLOORDIV, a, b) == (quotients, [[0.0] * 4, [0.0] * 4])
    values, grads = floats(Op.MOD, a, b)
    assert values == [x % y for x, y in zip(a, b, strict=True)]
    assert grads == [[1.0] * 4, [-x for x in quotients]]


def test_division_and_power_differentiate_both_operands():
    values, grads = floats(Op.DIV, [3.0, -1.0], [2.0, 4.0])
    assert values == [1.5, -0.25]
    assert grads == [[0.5, 0.25], [-0.75, 1 / 16]]
    values, grads = floats(Op.POW, [3.0, 2.0], [2.0, -1.0])
    assert values == [9.0, 0.5]
    assert grads[0] == pytest.approx([6.0, -0.25])
    assert grads[1] == pytest.approx([9 * math.log(3), 0.5 * math.log(2)])


def test_casts():
    row = {"x": torch.tensor([1.9, -1.9, 0.0, -0.5], dtype=torch.float64)}
    x = param("x", FLOAT)
    whole, truth = evaluate((cast(x, INT), cast(x, BOOL)), scope(row))
    assert whole.flatten().tolist() == [1, -1, 0, 0]
    assert truth.flatten().tolist() == [True, True, False, True]
    (back,) = evaluate((cast(cast(x, BOOL), FLOAT),), scope(row))
    assert back.flatten().tolist() == [1.0, 1.0, 0.0, 1.0]
    assert back.dtype is torch.float64


def test_values_stay_at_the_rank_they_need():
    expression = node(Op.MUL, cast(var("q"), FLOAT), const(2.0))
    (result,) = evaluate((expression,), scope())
    assert result.shape == (1, 1, 8, 1)
    (result,) = evaluate((size("pages"),), scope(sizes={"pages": 5}))
    assert result.flatten().tolist() == [5]
    assert result.shape == (1, 1, 1, 1)


def table(values, *indices, dtype=FLOAT):
    """Look ``values`` up at rows of ints."""
    names = [f"i{n}" for n in range(len(indices))]
    rows = {name: torch.tensor(row) for name, row in zip(names, indices, strict=True)}
    item = load("t", dtype, *(param(name, INT) for name in names))
    return evaluate((item,), scope(rows, {"t": values}))[0]


def test_lookups_clamp_and_do_not_wrap_around():
    values = torch.tensor([10.0, 20.0, 30.0])
    assert table(values, [-1, 0, 2, 3, LEAST]).flatten().tolist() == [10.0, 10.0, 30.0, 30.0, 10.0]
    grid = torch.arange(6).reshape(2, 3)
    assert table(grid, [0, 5, -7], [2, 9, 1], dtype=INT).flatten().tolist() == [2, 5, 1]


def test_lookups_in_nothing_read_zero():
    assert table(torch.zeros(0), [0, 3]).flatten().tolist() == [0.0, 0.0]
    assert table(torch.zeros(0, 3, dtype=torch.bool), [0], [1], dtype=BOOL).flatten().tolist() == [
        False
    ]


def test_lookups_of_every_dtype():
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64):
        result = table(torch.tensor([3, 5], dtype=dtype), [1], dtype=INT)
        assert (result.dtype, result.item()) == (torch.int64, 5)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        result = table(torch.tensor([3, 0.5], dtype=dtype), [1])
        assert (result.dtype, result.item()) == (torch.float64, 0.5)
    assert table(torch.tensor([False, True]), [1], dtype=BOOL).item() is True
    whole = load("t", FLOAT)
    (result,) = evaluate((whole,), scope(tensors={"t": torch.tensor(2.5)}))
    assert (result.shape, result.item()) == ((1, 1, 1, 1), 2.5)


def test_gradients_of_lookups_add_up():
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    (table(values, [0, 0, 2, 7]) * torch.tensor([1.0, 10.0, 100.0, 1000.0])).sum().backward()
    assert values.grad.tolist() == [11.0, 0.0, 1100.0]


def test_checked_lookups_name_what_is_wrong():
    values = torch.zeros(4, 3)
    item = load("bias", FLOAT, var("q"), var("kv"))
    live = torch.zeros((1, 1, 8, 8), dtype=torch.bool)
    live[..., :4, :3] = True
    check_lookups((item,), scope(tensors={"bias": values}), live)
    live[..., 2, 6] = True
    with pytest.raises(ArgumentError) as caught:
        check_lookups((item,), scope(tensors={"bias": values}), live)
    text = str(caught.value)
    assert "'bias'" in text
    assert "at 6 in dim 1, of size 3" in text
    assert "query row 2, key row 6" in text
    assert "clamp" in text


def test_checked_lookups_refuse_negative_indices():
    item = load("t", FLOAT, node(Op.SUB, var("kv"), const(1)))
    live = torch.ones((1, 1, 1, 8), dtype=torch.bool)
    with pytest.raises(ArgumentError, match="looked up at -1"):
        check_lookups((item,), scope(tensors={"t": torch.zeros(8)}), live)


def masked_gradient(root, row):
    """Gradient of x where only the first element of ``root`` is used."""
    x = torch.tensor(row, dtype=torch.float64, requires_grad=True)
    (result,) = evaluate((root,), scope({"x": x}))
    live = torch.tensor([True] + [False] * (len(row) - 1))
    torch.where(live, result, 0.0).sum().backward()
    return x.grad.tolist()


@pytest.mark.parametrize(
    ("op", "bad", "slope"),
    [
        (Op.LOG, [0.0, -1.0, math.nan, math.inf], 1 / 4),
        (Op.SQRT, [0.0, -1.0, math.nan, math.inf], 1 / 4),
        (Op.RSQRT, [0.0, -1.0, math.nan], -1 / 16),
        (Op.EXP, [1e4, math.inf, math.nan], math.exp(4)),
        (Op.LOG1P, [-1.0, -2.0], 1 / 5),
        (Op.GELU, [-math.inf, math.nan], None),
        (Op.SILU, [-math.inf, math.nan], None),
        (Op.ABS, [math.nan], 1.0),
    ],
    ids=lambda item: item.value if isinstance(item, Op) else "",
)
def test_dead_pairs_never_poison_gradients(op, bad, slope):
    root = node(op, param("x", FLOAT))
    first, *others = masked_gradient(root, [4.0, *bad])
    assert math.isfinite(first)
    assert slope is None or first == pytest.approx(slope)
    assert others == [0.0] * len(bad)


def test_dead_pairs_never_poison_what_they_share():
    """A scalar that dead pairs divide by zero with: the sum over pairs must not see them."""
    s = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    root = node(Op.DIV, param("s", FLOAT), cast(var("kv"), FLOAT))
    (result,) = evaluate((root,), scope({"s": s.reshape(1)}))
    live = torch.arange(8) > 3
    torch.where(live, result, 0.0).sum().backward()
    assert s.grad.item() == pytest.approx(1 / 4 + 1 / 5 + 1 / 6 + 1 / 7)


def test_branches_not_taken_never_poison_gradients():
    x = param("x", FLOAT)
    positive = node(Op.LT, const(0.0), x)
    root = node(Op.WHERE, positive, node(Op.LOG, x), node(Op.MUL, const(2.0), x))
    leaf = torch.tensor([4.0, 0.0, -3.0], dtype=torch.float64, requires_grad=True)
    (result,) = evaluate((root,), scope({"x": leaf}))
    result.sum().backward()
    assert leaf.grad.tolist() == [0.25, 2.0, 2.0]


def test_infinite_gradients_of_live_pairs_are_kept():
    assert masked_gradient(node(Op.SQRT, param("x", FLOAT)), [0.0, 1.0]) == [math.inf, 0.0]
