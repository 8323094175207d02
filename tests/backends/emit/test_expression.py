"""Every op as Triton source, against the reference backend; the text itself; widths of integers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

import attndsl
from attndsl import ir
from attndsl.backends.base import Backward, Call, Wants
from attndsl.backends.dense.reference import ReferenceBackend
from attndsl.backends.emit.expression import print_expressions
from attndsl.backends.emit.facts import facts_of
from attndsl.backends.emit.leaf_names import CaptureFacts, LeafNames
from attndsl.backends.engine.backend import generated_backend
from attndsl.ir import DType, Node, Op, Program, TensorDecl, const, load, node, size, var
from attndsl.pipeline import lower_program
from attndsl.runtime.disk_cache import KernelCache

if TYPE_CHECKING:
    from attndsl.backends.engine.backend import GeneratedBackend

Q, KV, B, H = var("q"), var("kv"), var("b"), var("h")
SCORE = ir.SCORE
NO_CAPTURES = LeafNames({}, {}, 16)


def _int(a: Node) -> Node:
    """Positive and negative ints of both ranks."""
    return node(Op.SUB, node(Op.MUL, a, const(3)), const(20))


def _flag(a: Node) -> Node:
    return node(Op.LT, node(Op.MOD, a, const(3)), const(1))


def _as_float(a: Node) -> Node:
    return ir.cast(a, DType.FLOAT)


def _positive(a: Node) -> Node:
    return node(Op.ADD, node(Op.MUL, a, a), const(0.25))


def _programs() -> dict[str, Node]:
    """A score for each op that depends on the score, on q and on kv."""
    found: dict[str, Node] = {}
    ints = {
        Op.ADD, Op.SUB, Op.MUL, Op.FLOORDIV, Op.MOD, Op.MIN, Op.MAX, Op.BITAND, Op.BITOR, Op.BITXOR,
    }  # fmt: skip
    for op in sorted(ints, key=str):
        found[f"int {op.name}"] = _as_float(node(op, _int(Q), _int(KV)))
    for op in (Op.NEG, Op.ABS, Op.SIGN, Op.BITNOT):
        found[f"int {op.name}"] = _as_float(node(op, node(Op.SUB, _int(Q), KV)))
    for op in (Op.SHL, Op.SHR):
        found[f"int {op.name}"] = _as_float(node(op, _int(Q), node(Op.MOD, KV, const(9))))
    found["int POW"] = _as_float(node(Op.POW, _int(Q), const(3)))
    for op in (Op.LT, Op.LE, Op.EQ, Op.NE):
        found[f"int {op.name}"] = _as_float(node(op, _int(Q), _int(KV)))
        found[f"float {op.name}"] = _as_float(node(op, SCORE, const(0.5)))
    for op in (Op.AND, Op.OR, Op.EQ, Op.NE):
        found[f"bool {op.name}"] = _as_float(node(op, _flag(Q), _flag(KV)))
    found["bool NOT"] = _as_float(node(Op.NOT, _flag(Q)))
    for op in (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.FLOORDIV, Op.MOD, Op.MIN, Op.MAX):
        found[f"float {op.name}"] = node(op, SCORE, const(0.75))
        found[f"float {op.name} reversed"] = node(op, _as_float(KV), _positive(SCORE))
    found["float POW"] = node(Op.POW, _positive(SCORE), const(1.5))
    for exponent in (-4.0, -3.0, -1.7, -1.0, 0.5, 1.0, 2.0, 3.0):
        found[f"float POW {exponent}"] = node(Op.POW, _positive(SCORE), const(exponent))
    found["float POW whole"] = node(Op.POW, SCORE, node(Op.ADD, _as_float(H), const(3.0)))
    for op in (Op.NEG, Op.ABS, Op.SIGN):
        found[f"float {op.name}"] = node(op, SCORE)
    for op in sorted(ir.FLOAT_UNARY, key=str):
        safe = _positive(SCORE) if op in (Op.SQRT, Op.RSQRT, Op.LOG, Op.LOG2, Op.LOG1P) else SCORE
        found[f"float {op.name}"] = node(op, safe)
    found["WHERE"] = node(Op.WHERE, _flag(Q), SCORE, _as_float(KV))
    found["CAST"] = _as_float(ir.cast(node(Op.MUL, SCORE, const(9.0)), DType.INT))
    found["CAST to bool"] = _as_float(ir.cast(SCORE, DType.BOOL))
    found["CONST"] = const(2.5)
    found["SIZE"] = node(Op.MUL, SCORE, _as_float(size("head_dim")))
    found["VAR"] = node(Op.ADD, SCORE, _as_float(node(Op.ADD, B, node(Op.MUL, H, var("hkv")))))
    found["large ints"] = _as_float(
        node(Op.MOD, node(Op.MUL, node(Op.MUL, Q, const(1 << 20)), KV), const(1009))
    )
    found["division by zero"] = _as_float(
        node(Op.ADD, node(Op.FLOORDIV, Q, node(Op.SUB, KV, const(3))),
             node(Op.MOD, Q, node(Op.SUB, KV, const(3))))
    )  # fmt: skip
    return found


PROGRAMS = _programs()
UNPRINTED = {Op.PARAM, Op.LOAD, Op.SCORE, Op.DOT, Op.IN}
"""Leaves that tests of captures and params cover, and what no kernel gets to see."""


def test_every_op_is_covered() -> None:
    used = {item.op for root in PROGRAMS.values() for item in ir.toposort(root)}
    assert used == set(Op) - (UNPRINTED - {Op.SCORE})


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> GeneratedBackend:
    return generated_backend(("triton",), KernelCache(tmp_path_factory.mktemp("kernels")))


def _call(lengths: tuple[int, int] = (17, 33)) -> Call:
    q, k, v = (torch.randn(2, 2, n, 16) for n in (lengths[0], lengths[1], lengths[1]))
    sizes = {"batch": 2, "heads": 2, "kv_heads": 2, "head_dim": 16}
    sizes |= {"q_len": lengths[0], "kv_len": lengths[1]}
    return Call(q, k, v, 0.25, sizes)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"
)
@pytest.mark.parametrize("name", PROGRAMS)
def test_op_matches_reference(name: str, backend: GeneratedBackend) -> None:
    # Bounded, so that the softmax neither saturates nor hides differences.
    bounded = node(Op.MUL, const(3.0), node(Op.SIN, PROGRAMS[name]))
    lowered = lower_program(Program(bounded))
    call = _call()
    out, lse = backend.forward(lowered, call)
    expected, expected_lse = ReferenceBackend().forward(lowered, call)
    # Fast hardware sines of large arguments differ in the last bits of the argument.
    torch.testing.assert_close(lse, expected_lse, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(out, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"
)
@pytest.mark.parametrize("op", sorted(ir.FLOAT_UNARY - {Op.FLOOR, Op.CEIL, Op.ROUND}, key=str))
def test_gradient_of_op_matches_reference(op: Op, backend: GeneratedBackend) -> None:
    # Small, so that neither poles nor exponentials of squares magnify roundings.
    root = node(op, _positive(node(Op.MUL, SCORE, const(0.2))))
    lowered = lower_program(Program(root))
    call = _call()
    out, lse = backend.forward(lowered, call)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse[0])
    results = Backward(out, lse, grad_out, grad_lse, Wants())
    found = backend.backward(lowered, call, results)
    expected = ReferenceBackend().backward(lowered, call, results)
    for name in ("q", "k", "v"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), atol=1e-4, rtol=1e-3
        )


def _text(*roots: Node, names: LeafNames = NO_CAPTURES) -> str:
    printed = print_expressions(roots, names)
    return "\n".join([*printed.lines, *printed.results])


def test_parentheses_only_where_needed() -> None:
    a, b = SCORE, _as_float(Q)
    assert _text(node(Op.MUL, node(Op.ADD, a, b), b)).splitlines()[-1] == "(score + x0) * x0"
    assert _text(node(Op.SUB, a, node(Op.SUB, a, const(1.0)))) == "score - (score - 1.0)"
    assert _text(node(Op.ADD, node(Op.ADD, a, const(1.0)), const(2.0))) == "score + 1.0 + 2.0"
    assert _text(node(Op.MUL, a, const(-2.0))) == "score * -2.0"
    assert _text(node(Op.NOT, node(Op.LT, Q, KV))) == "~(q < kv)"


@pytest.mark.parametrize(
    ("exponent", "function"),
    [(1.7, "fractional_power("), (-0.3, "fractional_power("), (2.0**22 + 0.5, "fractional_power("),
     (17.0, "power("), (1.0 - 2.0**-30, "power("), (2.0**30 + 0.5, "power("), (1e300, "power(")],
)  # fmt: skip
def test_exponents_that_are_fractions_in_32_bits(exponent: float, function: str) -> None:
    assert _text(node(Op.POW, SCORE, const(exponent))).startswith(function)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"
)
@pytest.mark.parametrize(
    "exponent",
    [const(1.7), const(-0.3), *(node(Op.MUL, _as_float(H), const(x)) for x in (1.5, -2.0, 3.0))],
    ids=["1.7", "-0.3", "1.5 h", "-2 h", "3 h"],
)
def test_powers_of_every_base(exponent: Node, backend: GeneratedBackend) -> None:
    bases = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, math.inf, -math.inf, math.nan, 1e-41])
    table = load("t", DType.FLOAT, KV)
    powers = node(Op.POW, table, exponent)
    is_nan = node(Op.NE, powers, powers)
    # A pair's weight says what the power is; an infinite one would hide all others.
    shown = node(Op.WHERE, is_nan, const(-3.0), node(Op.MIN, powers, const(5.0)))
    shown = node(Op.MAX, shown, const(-4.0))
    program = Program(shown, tensors=(TensorDecl("t", DType.FLOAT, (size("kv_len"),)),))
    lowered = lower_program(program)
    call = _call((2, len(bases)))._replace(tensors={"t": bases})
    torch.testing.assert_close(
        backend.forward(lowered, call), ReferenceBackend().forward(lowered, call)
    )


def test_positions_stay_in_32_bits_and_products_do_not() -> None:
    assert "int64" not in _text(node(Op.LT, node(Op.SUB, Q, KV), const(1024)))
    assert "int64" in _text(node(Op.ADD, node(Op.MUL, Q, size("kv_len")), KV))


def test_division_is_plain_only_where_signs_are_known() -> None:
    assert _text(node(Op.FLOORDIV, H, size("kv_heads"))) == "(head.h) // (sizes.kv_heads)"
    assert _text(node(Op.FLOORDIV, node(Op.SUB, Q, KV), const(5))) == "int_floordiv(q - kv, 5)"
    # Arithmetic shifts round down, and masks take the divisor's sign, for negative numbers too.
    assert _text(node(Op.FLOORDIV, node(Op.SUB, Q, KV), const(4))) == "(q - kv) >> 2"
    assert _text(node(Op.MOD, node(Op.SUB, Q, KV), const(4))) == "(q - kv) & 3"


def test_shifts_are_clamped_where_they_may_be_too_far() -> None:
    def is_clamped(amount: Node) -> bool:
        return "tl.minimum(tl.maximum(" in _text(node(Op.SHR, Q, amount))

    assert not is_clamped(node(Op.MOD, KV, const(32)))
    assert is_clamped(node(Op.MOD, KV, const(33)))
    assert is_clamped(node(Op.SUB, node(Op.MOD, KV, const(32)), const(1)))


def test_lookups_are_clamped_and_dead_pairs_masked() -> None:
    dims = ("q_len", "kv_len")
    bias = CaptureFacts("bias", DType.FLOAT, 2, 16, wide=False, unit_dims=frozenset({1}), dims=dims)
    names = LeafNames({"bias": bias}, {}, 16)
    pair = _text(load("bias", DType.FLOAT, Q, KV), names=names)
    assert pair.count("tl.maximum") == 2
    assert "mask=live" in pair
    assert "stride0_bias" in pair
    assert "stride1_bias" not in pair
    gain = CaptureFacts("gain", DType.FLOAT, 1, 32, wide=False, dims=("heads",))
    row = _text(load("gain", DType.FLOAT, H), names=LeafNames({"gain": gain}, {}, 16))
    assert "tl.maximum" not in row
    other = _text(load("gain", DType.FLOAT, B), names=LeafNames({"gain": gain}, {}, 16))
    assert "tl.maximum" in other


def test_what_only_pairs_keep_inside_is_clamped_for_rows() -> None:
    dims = ("q_len", "kv_len")
    bias = CaptureFacts("bias", DType.FLOAT, 2, 16, wide=False, dims=dims, exact=("q", "kv"))
    names = LeafNames({"bias": bias}, {}, 16)
    assert "tl.maximum" not in _text(load("bias", DType.FLOAT, Q, KV), names=names)
    assert "tl.maximum" in _text(load("bias", DType.FLOAT, Q, const(0)), names=names)


def test_wide_tensors_are_addressed_in_64_bits() -> None:
    table = CaptureFacts("table", DType.FLOAT, 2, 32, wide=True, dims=("q_len", "n"))
    text = _text(load("table", DType.FLOAT, Q, KV), names=LeafNames({"table": table}, {}, 16))
    assert text.count("to(tl.int64)") == 2


def test_deep_expressions_become_locals() -> None:
    root = SCORE
    for _ in range(50):
        root = node(Op.SIN, node(Op.ADD, root, const(1.0)))
    lines = _text(root).splitlines()
    assert len(lines) > 10
    assert max(map(len, lines)) < 120


def test_text_is_the_same_every_time() -> None:
    roots = tuple(PROGRAMS.values())
    assert _text(*roots) == _text(*roots)


def test_no_dim_of_an_empty_tensor_is_stepped_along() -> None:
    """Kernels get one zero in its place."""
    decl = TensorDecl("t", DType.FLOAT, (size("heads"), size("n")))
    program = Program(load("t", DType.FLOAT, H, KV), tensors=(decl,))
    call = _call()._replace(tensors={"t": torch.empty(2, 0)})
    (capture,) = facts_of(program, call).captures
    assert capture.unit_dims == frozenset()


def test_lookup_in_an_empty_tensor_reads_zero(backend: GeneratedBackend) -> None:
    decl = TensorDecl("table", DType.FLOAT, (size("n"),))
    root = node(Op.ADD, SCORE, load("table", DType.FLOAT, Q))
    lowered = lower_program(Program(root, tensors=(decl,)))
    call = _call()
    empty = Call(call.q, call.k, call.v, 0.25, {**call.sizes, "n": 0}, {"table": torch.empty(0)})
    if not torch.cuda.is_available():
        out, _ = backend.forward(lowered, empty)
        plain, _ = backend.forward(lower_program(Program(SCORE)), call)
        torch.testing.assert_close(out, plain)
    assert math.prod(empty.tensors["table"].shape) == 0


@pytest.mark.parametrize("as_tensor", [False, True], ids=["param", "tensor"])
@pytest.mark.parametrize("is_position", [False, True])
def test_sums_of_positions_fit_32_bits(is_position, as_tensor):
    if as_tensor:
        first = load("first", DType.INT, B)
        tensors = (TensorDecl("first", DType.INT, (size("batch"),), is_position=is_position),)
        program = Program(_as_float(node(Op.ADD, Q, first)), tensors=tensors)
    else:
        first = ir.param("first", DType.INT)
        params = (ir.ParamDecl("first", DType.INT, is_position=is_position),)
        program = Program(_as_float(node(Op.ADD, Q, first)), params=params)
    q = torch.zeros(1, 1, 4, 16)
    value = torch.zeros((1,) * as_tensor, dtype=torch.int32)
    call = Call(
        q,
        q,
        q,
        1.0,
        {},
        {"first": value} if as_tensor else {},
        {} if as_tensor else {"first": value},
    )
    facts = facts_of(program, call)
    printed = print_expressions((program.score,), facts.names())
    assert ("int64" in printed.results[0]) == (not is_position)
    field = "tensors" if as_tensor else "params"
    other = tuple(replace(d, is_position=not is_position) for d in getattr(program, field))
    changed = replace(program, **{field: other})
    assert lower_program(changed).digest != lower_program(program).digest


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float32, "tf32x3"), (torch.bfloat16, "ieee")]
)
def test_a_shown_text_multiplies_as_calls_do(dtype: torch.dtype, precision: str) -> None:
    text = attndsl.compile("score").source("forward", backend="triton", dtype=dtype)
    assert f"PRECISION = tl.constexpr('{precision}')" in text


COMPARED = ("<", "<=", ">", ">=", "==", "!=")


@pytest.mark.parametrize("symbol", COMPARED)
def test_pairs_compare_in_32_bits_with_what_has_64(symbol: str, backend: GeneratedBackend) -> None:
    """A limit of a head, beyond 32 bits on either side too, and on both sides of the symbol."""
    limits = [-(1 << 62), -(1 << 31) - 1, -5, 0, 7, (1 << 31) - 1, (1 << 33) + 3, (1 << 62)]
    t = torch.tensor(limits)
    q, k, v = (torch.randn(1, 8, 20, 16) for _ in range(3))
    for mask in (f"q - kv {symbol} t[h]", f"t[h] {symbol} kv - q"):
        text = f"tensor t[heads]: int; mask = {mask} or kv == 0"
        found = attndsl.compile(text, backend="triton")(q, k, v, t=t)
        torch.testing.assert_close(found, attndsl.compile(text, backend="reference")(q, k, v, t=t))


def test_what_is_wide_by_row_or_head_alone_is_saturated() -> None:
    captures = {"t": CaptureFacts("t", DType.INT, 1, 64, False, dims=(None,))}
    names = replace(NO_CAPTURES, captures=captures)

    def at(index: Node) -> Node:
        return load("t", DType.INT, index)

    distance, limit = node(Op.SUB, Q, KV), at(H)

    def text(root: Node) -> str:
        printed = print_expressions((root,), names)
        return "\n".join([*printed.lines, *printed.values])

    assert "saturated(" in text(node(Op.LT, distance, limit))
    assert "saturated(" in text(node(Op.LE, at(Q), distance))
    # A column compares once, and what differs by pair itself gains nothing.
    assert "saturated(" not in text(node(Op.LT, KV, limit))
    assert "saturated(" not in text(node(Op.LT, distance, at(distance)))
    both = node(Op.EQ, at(Q), at(KV))
    assert "saturated(" not in text(both)
