"""Fast forms of functions: how near they are, where they may stand, and who gets them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import triton

from attndsl import ir
from attndsl.backends.base import Call
from attndsl.backends.device import library
from attndsl.backends.emit.expression import print_expressions
from attndsl.backends.emit.leaf_names import LeafNames
from attndsl.backends.fast_math import APPROX, EX2, EXACT, FORMS, fast_nodes, forms_for
from attndsl.backends.kernels.compile import load_module
from attndsl.ir import Node, Op, Program, const, node
from attndsl.pipeline import lower, lower_program
from attndsl.source import Source

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SCORE = ir.SCORE
TINY = 2.0**-126
BLOCK = 1024
KERNEL = """
import triton
import triton.language as tl

from attndsl.backends.device.library import {function}


@triton.jit
def apply(X, Y, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + place, {function}(tl.load(X + place)))
"""

RECIPROCAL = """
import triton
import triton.language as tl


@triton.jit
def reciprocal(x):
    return 1.0 / x
"""


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


@dataclass(frozen=True)
class Bound:
    """What a form is of, and the largest error that it may have."""

    exact: Callable[[torch.Tensor], torch.Tensor]
    error: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Of the operand and the exact result, in fp64."""


# Halves of units in the last place come on top, of results that are rounded once more.
BOUNDS = {
    "exp_ex2": Bound(torch.exp, lambda x, y: y * 2.0**-22 * (2 + x.abs().clamp(max=200)) + TINY),
    "tanh_ex2": Bound(torch.tanh, lambda x, y: (y.abs() * 2.0**-17).clamp(max=4e-7) + TINY),
    "sigmoid_ex2": Bound(_sigmoid, lambda x, y: torch.full_like(x, 3e-7)),
    "silu_ex2": Bound(_silu, lambda x, y: 3e-7 * x.abs() + TINY),
    "tanh_approx": Bound(torch.tanh, lambda x, y: 1.02 * 2.0**-11 * y.abs() + TINY),
    "sigmoid_approx": Bound(_sigmoid, lambda x, y: torch.full_like(x, 1.02 * 2.0**-12)),
    "silu_approx": Bound(_silu, lambda x, y: 1.02 * 2.0**-12 * x.abs() + TINY),
}


def _grid(dense: int) -> torch.Tensor:
    """Operands of both signs: dense where functions bend, subnormal, huge, infinite, and NaN."""
    parts = [
        torch.linspace(0, 1, dense),
        torch.linspace(0, 20, dense),
        torch.logspace(-45, 38, dense, dtype=torch.float64).float(),
        torch.tensor([0.0, 2.0**-149, TINY, 0.0625, 87.0, 89.0, 104.0, 3.4e38, math.inf, math.nan]),
    ]
    size = torch.cat(parts)
    grid = torch.cat((size, -size))
    return torch.nn.functional.pad(grid, (0, -len(grid) % BLOCK))


def _apply(function: str, x: torch.Tensor, folder: Path) -> torch.Tensor:
    path = folder / f"{function}.py"
    path.write_text(KERNEL.format(function=function), "utf-8")
    found = torch.empty_like(x)
    module: Any = load_module(path, function)
    module.apply[(len(x) // BLOCK,)](x, found, BLOCK)
    return found


def _hold(function: str, x: torch.Tensor, found: torch.Tensor, share: float = 1.0) -> None:
    """Fail unless ``found`` is within the bound everywhere, and NaN and infinite where it must.

    ``share`` is how much of the bound may be used up.
    """
    bound = BOUNDS[function]
    x, found = x.double().cpu(), found.double().cpu()
    exact = bound.exact(x)
    assert torch.equal(found.isnan(), exact.isnan())
    # Results that fp32 has not: they may be infinite, or the largest number.
    told = exact.isfinite() & (exact.abs() < 3.3e38)
    error, allowed = (found - exact).abs()[told], share * bound.error(x, exact)[told]
    worst = int((error - allowed).argmax())
    assert (error <= allowed).all(), f"at {x[told][worst]}: {error[worst]}, not {allowed[worst]}"
    infinite = exact.isinf()
    assert torch.equal(found[infinite], exact[infinite])


def _hold_limits(function: str, x: torch.Tensor, found: torch.Tensor) -> None:
    """Functions that saturate do so exactly, and then their derivatives are 0."""
    limits = {"tanh": (-1.0, 1.0), "sigmoid": (0.0, 1.0)}
    low_high = limits.get(function.partition("_")[0])
    if low_high is not None:
        assert (found[x < -100] == low_high[0]).all()
        assert (found[x > 100] == low_high[1]).all()
    if function.startswith("tanh"):
        assert (found[x == 0] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("function", BOUNDS)
def test_form_on_hardware(function: str, tmp_path: Path) -> None:
    x = _grid(1 << 20).cuda()
    found = _apply(function, x, tmp_path)
    _hold(function, x, found)
    _hold_limits(function, x, found)


@pytest.mark.gpu
def test_small_sigmoids_are_exact_enough_on_hopper(tmp_path: Path) -> None:
    """Weights of sigmoid attention, which begin at 1 / kv_len (arXiv 2409.04431)."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("measured on compute capability 9.0; nobody promises it of others")
    x = torch.linspace(-11.5, 0.0, BLOCK << 10).cuda()
    error = _apply("sigmoid_approx", x, tmp_path).double() - x.double().sigmoid()
    assert (error.abs() <= x.double().sigmoid() / 50).all()
    assert error.abs().max() <= 4e-6


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")
@pytest.mark.parametrize("function", [name for name in BOUNDS if name.endswith("_ex2")])
def test_form_in_rounded_arithmetic(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter has no reciprocal instruction, but it rounds all else to fp32.

    Half the bound is left to the instructions' own errors, a few units in the last place.
    """
    path = tmp_path / "reciprocal.py"
    path.write_text(RECIPROCAL, "utf-8")
    monkeypatch.setattr(library, "reciprocal_approx", load_module(path, "reciprocal").reciprocal)
    x = _grid(1 << 15)
    found = _apply(function, x, tmp_path)
    _hold(function, x, found, share=0.5)
    _hold_limits(function, x, found)


def test_every_form_has_a_function_and_a_bound() -> None:
    names = {form.function for forms in FORMS.values() for form in forms.values()}
    assert names == set(BOUNDS)
    assert all(hasattr(library, name) for name in names)
    assert set(FORMS[EX2]) == set(FORMS[APPROX])


def test_who_gets_which() -> None:
    assert forms_for("bf16", "cuda", exact=False) == APPROX
    assert forms_for("fp16", "cuda", exact=False) == EX2
    for dtype, target, exact in (
        ("fp32", "cuda", False), ("bf16", "cuda", True), ("bf16", "hip", False),
        ("bf16", None, False),
    ):  # fmt: skip
        assert forms_for(dtype, target, exact) == EXACT


def _text(root: Node, forms: str) -> str:
    printed = print_expressions((root,), LeafNames({}, {}, 16, forms=forms))
    return "\n".join([*printed.lines, *printed.results])


def test_text_names_the_form() -> None:
    root = node(Op.TANH, SCORE)
    assert _text(root, EXACT) == "tanh(score)"
    assert _text(root, EX2) == "tanh_ex2(score)"
    assert _text(root, APPROX) == "tanh_approx(score)"


def _parts(text: str) -> set[Op]:
    program = lower(Source(text), {}).program
    roots = [program.score] if program.mask is None else [program.score, program.mask]
    return {item.op for item in fast_nodes(roots)}


@pytest.mark.parametrize(
    "text",
    [
        "mask = tanh(score) > 0.5",
        "score = where(tanh(score) > 0.5, score, 0.0)",
        "score = log(sigmoid(score))",
        "score = 1.0 / (1.0 + exp(-score))",
        "score = sqrt(1.0 - tanh(score))",
        "score = floor(8.0 * sigmoid(score))",
        "tensor t[kv_len]: float; score = score + t[int(9.0 * sigmoid(score))]",
    ],
)
def test_what_magnifies_errors_gets_exact_operands(text: str) -> None:
    assert not _parts(text)


def test_other_operands_take_fast_forms() -> None:
    assert _parts("score = 50.0 * tanh(score / 50.0)") == {Op.TANH}
    assert _parts("score = where(q >= kv, silu(score), exp(score) / 3.0)") == {Op.SILU, Op.EXP}


def test_masks_and_their_tiles_agree(tmp_path: Path) -> None:
    """A pair is live or not: what finds tiles must see the kernels' own mask."""
    from attndsl.backends.base import Wants
    from attndsl.backends.engine.kernel_listing import source_of
    from attndsl.backends.kernels.example import example_call
    from attndsl.backends.triton.family import Portable

    lowered = lower(Source("tensor t[q_len]: float; mask = tanh(t[q]) >= tanh(t[kv])"), {})
    call = example_call(lowered, 16, 16, torch.bfloat16, {"t": torch.zeros(2)})
    assert "tanh_" not in source_of((Portable(),), lowered, call, "forward", Wants())


def test_exact_programs_have_kernels_of_their_own(counted: Any) -> None:
    plain, exact = (lower_program(Program(node(Op.TANH, SCORE), exact=e)) for e in (False, True))
    assert plain.digest != exact.digest
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(1, 1, 16, 16, device=device, dtype=torch.bfloat16) for _ in range(3))
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 16, "q_len": 16, "kv_len": 16}
    call = Call(q, k, v, 0.25, sizes)
    for _ in range(2):
        for lowered in (plain, exact):
            counted.forward(lowered, call)
    assert counted.kernels_built == 2


def test_functions_of_constants_are_constants() -> None:
    """They are exact then, and no function sees a number in place of a tile."""
    assert float(_text(node(Op.TANH, const(0.5)), EX2)) == math.tanh(0.5)


def test_interpreter_stays_exact() -> None:
    if isinstance(library.tanh, triton.runtime.JITFunction):
        pytest.skip("the kernels are compiled here")
    assert forms_for("bf16", None, exact=False) == EXACT
