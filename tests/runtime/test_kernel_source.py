"""The text of generated kernels: what ``source`` gives, takes and refuses."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

import attndsl
from attndsl import errors


def test_sources_and_explanations() -> None:
    attention = attndsl.compile(
        "tensor gain[heads]: float; score = gain[h] * score; mask = causal()"
    )
    text = attention.source("forward")
    compile(text, "forward", "exec")
    assert attention.source("forward") == text
    for direction in ("backward", "tangent"):
        heading = ast.get_docstring(ast.parse(attention.source(direction)))
        assert heading is not None
        assert heading.startswith(
            "Weights again, from the log-sum-exp: what kernels of gradients and"
        )
    assert "LINE_SUMS" in attention.source("backward", gain=torch.ones(2, requires_grad=True))
    with pytest.raises(errors.ArgumentError, match="sideways") as caught:
        attention.source("sideways")
    assert caught.value.hint == "use 'forward', 'backward', 'tangent'"
    shown = attention.explain()
    for part in ("score", "mask", "gain", "PARTIAL", "backend"):
        assert part in shown
    assert shown.endswith("\nbackend      cpu on cpu: the default for cpu tensors")


def test_sources_of_tangents() -> None:
    attention = attndsl.compile(
        "tensor gain[heads]: float; param cap: float; score = cap * tanh(gain[h] * score / cap)"
    )
    text = attention.source("tangent", gain=torch.ones(2, requires_grad=True))
    assert "def attention_tangent" in text
    assert "dot(q_moved, " in text
    assert "moved_score_of_pair(" in text
    assert "t_moved_gain" in text
    assert "moved_score_of_pair(" not in attention.source("tangent")
    both = attention.source("tangent", backend="hopper", gain=torch.ones(2, requires_grad=True))
    assert "def attention_forward_tangent" in both
    assert attention.source("tangent", backend="hopper") == both
    own = attndsl.compile("weights = sigmoid(score)")
    assert "def attention_tangent" in own.source("tangent")
    with pytest.raises(errors.UnsupportedError, match="only softmax weights"):
        own.source("tangent", backend="hopper")
    product = attndsl.compile(
        "tensor u[heads, q_len, 4]: float; tensor w[heads, kv_len, 4]: float;"
        "score = score + dot(u[h, q, :], w[h, kv, :])"
    )
    assert "def attention_forward" in product.source("forward")
    with pytest.raises(errors.UnsupportedError, match="tangents of programs with contractions"):
        product.source("tangent")


SOME = """
tensor gain[heads]: float; tensor table[heads, pages, 4]: float; tensor page[pages]: int
tensor u[heads, q_len, rank]: float; tensor w[heads, kv_len, rank]: float; param cap: float
score = score * gain[h] + table[h, page[q // 64], 0] + cap + dot(u[h, q, :], w[h, kv, :])
"""


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize(
    ("captures", "message"),
    [
        ({"gain": torch.ones(8, 2)}, r"gain has shape \(8, 2\)"),
        ({"gain": torch.ones(8, dtype=torch.int32)}, "gain is of dtype torch.int32"),
        ({"gain": 2.0}, "gain is a float"),
        ({"table": torch.ones(8, 3, 5)}, "its dim 2 is declared as 4"),
        ({"gain": torch.ones(8), "table": torch.ones(6, 3, 4)}, "as heads, which is 8"),
        ({"table": torch.ones(8, 3, 4), "page": torch.ones(4).int()}, "as pages, which is 3"),
        ({"u": torch.ones(8, 9, 3), "w": torch.ones(8, 9, 5)}, "as rank, which is 3"),
        ({"cap": torch.ones(2)}, r"cap has shape \(2,\)"),
        ({"cap": "x"}, "cap is 'x'"),
        ({"gan": torch.ones(8)}, "no tensor or run-time param 'gan'"),
    ],
)
def test_sources_refuse_captures_that_calls_refuse(
    captures: dict[str, Any], message: str, backend: str
) -> None:
    with pytest.raises(errors.AttnDSLError, match=message) as caught:
        attndsl.compile(SOME).source(backend=backend, **captures)
    assert caught.value.hint


def test_sources_take_captures_of_any_lengths() -> None:
    attention = attndsl.compile("tensor rel[2 * q_len - 1]: float; score = score + rel[q - kv]")
    assert "def attention_forward" in attention.source(rel=torch.ones(77))


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("hoper", "did you mean 'hopper'?"),
        ("Triton", "did you mean 'triton'?"),
        ("auto", "use one of triton, hopper, short, decode"),
        ("cpu", "use one of triton, hopper, short, decode"),
        ("reference", "use one of triton, hopper, short, decode"),
        ("", "use one of triton, hopper, short, decode"),
    ],
)
def test_sources_of_backends_that_generate_none(name: str, hint: str) -> None:
    with pytest.raises(errors.ArgumentError, match=f"backend '{name}'") as caught:
        attndsl.compile("causal()").source(backend=name)
    assert caught.value.hint == hint
