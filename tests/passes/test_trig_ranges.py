"""Arguments of sines are small where all pairs of a call say so, and never where one may not."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.ir import Op
from attndsl.passes.int_ranges import POSITION_LIMIT
from attndsl.passes.trig_ranges import MOST_ANGLE, small_angles, useful_reach
from attndsl.pipeline import lower
from attndsl.source import Source

ALWAYS = (
    "sin(0.1 * (kv % 64))", "cos(tanh(score) * 3)", "sin(min(max(score, -9.0), 9.0))",
    "sin(0.001 * min(abs(q - kv), 1000000))", "cos(where(q > kv, 2.0, sigmoid(score)))",
)  # fmt: skip
NEVER = (
    "sin(score)", "cos(float(q) * q * q)", "tan(exp(0.001 * q))", "sin(q / (kv + 1.0))",
    "sin(1e9 * (q - kv))", "cos(max(score, 1.0))",
)  # fmt: skip


def score_of(text):
    return lower(Source(f"score = score + {text}"), {}).program.score


def small(text, reach=None):
    root = score_of(text)
    found = small_angles((root,), {}, True, reach)
    assert all(x.op in (Op.SIN, Op.COS, Op.TAN) for x in found)
    return len(found)


@pytest.mark.parametrize("text", ALWAYS)
def test_arguments_that_are_small_in_every_call(text):
    assert small(text) == 1
    assert useful_reach((score_of(text),), {}, 1024) is None


@pytest.mark.parametrize("text", NEVER)
def test_arguments_that_may_be_large(text):
    assert small(text) == 0
    assert small(text, 4096) == 0
    assert useful_reach((score_of(text),), {}, 4096) is None


def test_captures_and_params_may_be_anything():
    text = "param c: float; tensor t[heads]: float; score = score + sin(c * q) + cos(t[h] * 0.5)"
    assert not small_angles((lower(Source(text), {}).program.score,), {}, True, 64)


def test_ints_are_as_large_as_their_type():
    text = "tensor t[kv_len]: int; score = score + sin(0.5 * t[kv])"
    root = lower(Source(text), {}).program.score
    assert small_angles((root,), {"t": 8}, True, None)
    assert not small_angles((root,), {"t": 32}, True, 64)


@pytest.mark.parametrize("factor", [1.0, 0.37, 0.01, 1e-4])
def test_the_reach_is_the_largest_power_of_two_of_small_angles(factor):
    root = score_of(f"sin({factor} * (q - kv))")
    reach = useful_reach((root,), {}, 1000)
    assert reach is not None
    assert reach & (reach - 1) == 0
    assert (reach - 1) * factor <= MOST_ANGLE
    assert 2 * (reach - 1) * factor > MOST_ANGLE or 2 * reach > POSITION_LIMIT
    assert useful_reach((root,), {}, reach) == reach
    assert useful_reach((root,), {}, reach + 1) is None


def test_calls_of_which_some_angles_are_small_have_a_reach_of_their_own():
    root = score_of("sin(1.0 * (q - kv)) + cos(0.001 * (q - kv))")
    near, far = (useful_reach((root,), {}, n) for n in (1000, 1 << 20))
    assert near is not None and far is not None and near < far  # noqa: PT018
    counts = [len(small_angles((root,), {}, True, reach)) for reach in (near, far, None)]
    assert counts == [2, 1, 0]


def test_bounds_are_those_of_rounded_arithmetic():
    # An interval of exact arithmetic would end at the limit itself.
    text = f"sin(min(max(score, -1.0), 1.0) * {MOST_ANGLE})"
    assert small(text) == 0
    assert small(text.replace(str(MOST_ANGLE), str(0.99 * MOST_ANGLE))) == 1


PROGRAM = (
    "score = score * cos(0.9 * kv) + sin(3.7 * (q - kv)) + tan(0.01 * kv_len) * sin(0.3 * h); "
    "mask = sin(0.5 * (q - kv)) > -0.9"
)


def results_of(backend, q_offset):
    """Output and gradients of q, k and v."""
    torch.manual_seed(0)
    operands = [torch.randn(1, 2, 48, 16, requires_grad=True) for _ in range(3)]
    out = attndsl.compile(PROGRAM, backend=backend)(*operands, q_offset=q_offset)
    return out, *torch.autograd.grad(out.square().sum(), operands)


@pytest.mark.parametrize("q_offset", [0, 4000])
def test_kernels_agree_with_the_reference(q_offset):
    # With an offset positions have no bounds that a kernel could know.
    wanted = results_of("reference", q_offset)
    for backend in ("triton", "short", "decode"):
        for found, exact in zip(results_of(backend, q_offset), wanted, strict=True):
            torch.testing.assert_close(found, exact, atol=1e-4, rtol=1e-4)


SOURCES = (
    *((backend, direction) for backend in ("triton", "hopper")
      for direction in ("forward", "backward", "tangent")),
    ("short", "forward"), ("short", "backward"), ("decode", "forward"),
)  # fmt: skip


@pytest.mark.parametrize(("backend", "direction"), SOURCES)
def test_kernels_of_all_families_have_the_short_reduction(backend, direction):
    attn = attndsl.compile("score = score + sin(3.7 * (q - kv))")
    text = attn.source(direction, backend=backend)
    assert "sin_cody_waite(" in text
    assert "import sin\n" not in text
    large = attndsl.compile("score = score + sin(1e6 * (q - kv))")
    assert "cody_waite" not in large.source(direction, backend=backend)
