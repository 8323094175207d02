"""Python numbers, scalars, blocks and both widths of ints side by side in one expression."""

from __future__ import annotations

import textwrap

import pytest
import torch
from support.fork_server import compiling, run_python

import attndsl
from attndsl import ir
from attndsl.backends.emit.expression import print_expressions
from attndsl.backends.emit.leaf_names import LeafNames
from attndsl.backends.emit.operand_kinds import OperandKind, is_normal, known_value, number
from attndsl.ir import DType, Op, const, node, param, size, var

PROGRAMS = {
    "shifts of 64 bits": """
        param n: int
        tensor t[kv_len]: int
        mask = (t[kv] >> 1 & 1) == 0 or (n << 3) + (q << 51) + (kv << 12) > h << 40
        """,
    "scalars": "param n: int; mask = (n | b) + (n & h) != kv or n == h; score = score * (n ^ 3)",
    "sizes": "score = score * (head_dim + 1) - (1000 + head_dim) / (head_dim << 2) + head_dim // 3",
    "powers": "mask = bool(h ** 0); score = score + q ** 0 + (kv % 3) ** 12 / 2 ** 10 + score ** 0",
    "a float param": "param x: float; mask = x < 0.75 or kv == 0; score = score * x",
    "a mask of scalars": """
        param n: int = 0
        mask = (h < 1) | (4 == 52) | (q >= kv)
        score = score - n / max(q, 3) / (abs(kv // 68) + 1)
        score = where(not 1 > q, score, -inf)
        """,
    "everything": """
        param x: float
        param n: int
        tensor t[heads, kv_heads, q_len, q_len]: float
        score = round(score) / (abs(sigmoid(x)) + 1) + (kv_heads / max(hkv, 3) - t[h, hkv, q, kv])
        mask = (n + (kv << 12)) >= (head_dim >> 5 ^ (3 ** 1))
        """,
    "unsigned bytes": "tensor u[kv_len]: int; score = score + (u[kv] << 23) / 2147483648.0",
}


def _captures(text: str) -> dict[str, object]:
    found = {
        "n": 5,
        "x": 0.5,
        "t": torch.arange(11) << 33 if "t[kv_len]" in text else torch.randn(2, 2, 11, 11),
        "u": torch.full((11,), 255, dtype=torch.uint8),
    }
    return {name: value for name, value in found.items() if f" {name}" in text}


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here, below")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_equal_the_reference(name: str) -> None:
    text = PROGRAMS[name]
    q, k, v = (torch.randn(2, 2, 11, 16) for _ in range(3))
    captures = _captures(text)
    found = {
        backend: attndsl.compile(text, backend=backend)(q, k, v, **captures)
        for backend in ("reference", "triton")
    }
    torch.testing.assert_close(found["triton"], found["reference"], atol=2e-4, rtol=2e-4)


JOINED = """
param n: int
param x: float
tensor t[kv_len]: int
mask = (
    (t[kv] >> 1 & 1) == 0 and (n << 3) + (q << 51) + (kv << 12) > h << 40 and (n | b) != (n & h)
    or bool(h ** 0) and x < 0.75 and (n + (kv << 12)) >= (head_dim >> 5 ^ (3 ** 1))
)
score = score * (head_dim + 1) - (1000 + head_dim) / (head_dim << 2) + q ** 0 + score ** 0
score = score - n / max(q, 3) / (abs(kv // 68) + 1) + (kv_heads / max(hkv, 3) - abs(sigmoid(x)))
score = where(not 1 > q, score + (kv % 3) ** 12, -inf)
"""
SCRIPT = textwrap.dedent(
    """
    import sys
    import torch
    from support.cross import cross_compile
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.emit.facts import facts_of
    from attndsl.backends.kernels.config import Config
    from attndsl.pipeline import lower
    from attndsl.source import Source

    lowered = lower(Source(sys.argv[1]), {})
    captures = {"t": torch.zeros((2,), dtype=torch.int64)}
    facts = facts_of(lowered.program, example_call(lowered, 16, 16, torch.float32, captures))
    configs = {"forward": (Config(32, 32, 4, 1),)}
    cross_compile(lowered, facts, "cuda:90", configs, configs)
    """
)


def test_programs_compile() -> None:
    done = run_python(SCRIPT, JOINED, env=compiling())
    assert done.returncode == 0, done.stderr[-3000:]


def test_what_a_kernel_knows_is_a_number() -> None:
    known = {const(3): 3, size("head_dim"): 64}
    assert known_value(node(Op.ADD, const(3), size("head_dim")), 64, known) == 67
    assert known_value(node(Op.ADD, const(3), var("h")), 64, known) is None
    assert known_value(node(Op.POW, var("q"), const(0)), 64, {const(0): 0}) == 1


@pytest.mark.parametrize(
    ("value", "kind", "bits"),
    [
        (3, OperandKind.NUMBER, 32), (1 << 31, OperandKind.SCALAR, 64), (True, OperandKind.BLOCK,
        32),
        (0.5, OperandKind.NUMBER, 32), (1e-40, OperandKind.SCALAR, 32), (float("inf"),
        OperandKind.NUMBER, 32),
    ],
)  # fmt: skip
def test_kinds_of_constants(value: float, kind: OperandKind, bits: int) -> None:
    found = number(value, "[1, 1]")
    assert (found.kind, found.bits) == (kind, bits)


def test_floats_that_triton_takes_for_wider_ones() -> None:
    assert is_normal(0.0)
    assert is_normal(3e38)
    assert not is_normal(1e300)
    assert not is_normal(1e-40)


def test_powers_of_ints_by_squaring() -> None:
    root = ir.cast(node(Op.POW, node(Op.ADD, var("q"), const(1)), const(64)), DType.FLOAT)
    printed = print_expressions((root,), LeafNames({}, {}, 16))
    assert sum(line.count(" * ") for line in printed.lines) == 6


def test_a_scalar_beside_a_wide_one() -> None:
    wide = node(Op.MUL, param("n", DType.INT), const(3))
    printed = print_expressions((node(Op.ADD, wide, var("q")),), LeafNames({}, {"n": 32}, 16))
    assert printed.results == ("(p_n).to(tl.int64) * 3 + q",)
