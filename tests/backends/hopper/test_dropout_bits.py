"""Dropout in the Hopper kernels: the pairs of the reference, and all that stands beside them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.jobs import why_portable

import attndsl
from attndsl.backends.base import Wants
from attndsl.backends.kernels.example import example_call
from attndsl.pipeline import lower
from attndsl.source import Source

SEED = 0x1234_5678_9ABC_DEF
TEXTS = {
    "full": "weights = dropout(softmax(score), 0.25)",
    "causal": "mask = causal()\nweights = dropout(softmax(score), 0.1)",
    "window": "mask = sliding_window(70)\nweights = dropout(softmax(score), 0.5)",
    "cap": "mask = causal()\nscore = softcap(score, 2.0)\nweights = dropout(softmax(score), 0.1)",
    "alibi": "mask = causal()\nscore = score + alibi()\nweights = dropout(softmax(score), 0.1)",
    "sigmoid": "mask = causal()\nweights = dropout(sigmoid(score), 0.3)",
    "sink": (
        "tensor gain[heads]: float\nmask = causal()\nsink = gain[h]\n"
        "weights = dropout(softmax(score), 0.2)"
    ),
    "gain": (
        "tensor gain[heads]: float\nscore = gain[h] * score\nweights = dropout(softmax(score), 0.2)"
    ),
    "column": (
        "tensor bias[kv_len]: float\nscore = score + bias[kv]\n"
        "weights = dropout(softmax(score), 0.2)"
    ),
    "documents": (
        "tensor doc[q_len]: int\nmask = doc[q] == doc[kv]\nweights = dropout(softmax(score), 0.2)"
    ),
    "everything": "param p: float\nmask = causal()\nweights = dropout(softmax(score), p)",
    "nearly everything": "param p: float\nweights = dropout(softmax(score), p * 0.9999)",
    "half": "weights = dropout(softmax(score), 0.5)",
    "half and causal": "mask = causal()\nweights = dropout(softmax(score), 0.5)",
}


@pytest.fixture
def place():
    """The Hopper backend, at lengths of a few tiles."""
    return SimpleNamespace(backend="hopper", device="cuda", shape=(2, 4, 300, 64))


def refusal(text: str, kind: str, head_dim: int = 64, **learned: frozenset[str]) -> str | None:
    lowered = lower(Source(text), {})
    call = example_call(lowered, head_dim, head_dim, torch.bfloat16, {})
    return why_portable(lowered, call, kind, wants=Wants(**learned))


def test_what_runs_where():
    text = "param p: float\nscore = score * (1 + p)\nweights = dropout(softmax(score), p)"
    assert refusal(text, "forward", 256) is None
    assert refusal(text, "backward", 128) is None
    assert refusal(text, "backward", 192) == (
        "the Hopper backward kernel supports dropout at head dims up to 128"
    )
    assert refusal(text, "backward", params=frozenset({"p"})) == (
        "gradients of a dropout probability are summed pair by pair"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("seed", [0, SEED, -3, "tensor"])
@pytest.mark.parametrize(
    ("p", "shape"), [(0.5, (2, 3, 333, 450)), (0.22, (2, 3, 333, 450)), (0.22, (8, 2, 1024, 1024))]
)
def test_pairs_are_those_of_the_reference(dim, seed, p, shape):
    """All weights are equal, and the values name the keys of one window."""
    batch, heads, q_len, kv_len = shape
    q = torch.zeros(batch, heads, q_len, dim, device="cuda", dtype=torch.float16)
    k = torch.zeros(batch, heads, kv_len, dim, device="cuda", dtype=torch.float16)
    drawn = torch.tensor(SEED, device="cuda") if seed == "tensor" else seed
    found = {}
    for backend in ("hopper", "reference"):
        attention = attndsl.compile(
            "param p: float; weights = dropout(softmax(score), p)", backend=backend
        )
        windows = []
        for begin in range(0, kv_len, dim):
            v = torch.zeros_like(k)
            size = min(dim, kv_len - begin)
            v[:, :, begin : begin + size, :size] = torch.eye(size, device="cuda")
            windows.append(attention(q, k, v, p=p, seed=drawn)[..., :size] > 0)
        found[backend] = torch.cat(windows, -1)
    assert torch.equal(found["hopper"], found["reference"])
    assert abs(float(found["hopper"].float().mean()) - (1 - p)) < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128])
def test_programs(check, place, name, dtype, dim):
    captures: dict[str, Any] = {"p": 1.0} if "param p" in TEXTS[name] else {}
    if "doc" in TEXTS[name]:
        captures["doc"] = (torch.arange(300, device="cuda") // 90).int()
    if "gain" in TEXTS[name]:
        # Gradients of factors are those of other kernels in fp16.
        learned = dtype is torch.bfloat16 or name != "gain"
        captures["gain"] = (torch.rand(4, device="cuda") + 0.5).requires_grad_(learned)
    if "bias" in TEXTS[name]:
        captures["bias"] = torch.randn(300, device="cuda").requires_grad_()
    inputs = check.inputs(
        place, dtype, kv_heads=2, dim=dim, captures=captures, options={"seed": SEED},
        with_lse=name != "sigmoid",
    )  # fmt: skip
    check(place, TEXTS[name], inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(1, 1), (1, 200), (200, 2), (64, 64), (65, 63), (129, 1000)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (72, 40), (256, 256), (192, 128)])
def test_lengths(check, place, sizes, dims):
    q_len, kv_len = sizes
    inputs = check.inputs(
        place, torch.bfloat16, q_len=q_len, kv_len=kv_len, kv_heads=1, dim=dims[0],
        value_dim=dims[1], options={"seed": SEED},
    )  # fmt: skip
    # Twice a value has no rounding: of one live pair, delta is exact as the reference's is.
    for name in ("half", "half and causal"):
        check(place, TEXTS[name], inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_calls_come_out_alike_again(dim):
    """All but dQ has one order of addition: a race would show there."""
    leaves = [
        torch.randn(2, 8, 2048, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    attention = attndsl.compile(TEXTS["causal"], backend="hopper")
    grad_out = torch.randn_like(leaves[0])
    first = None
    for _ in range(20):
        out = attention(*leaves, seed=SEED)
        found = (out, *torch.autograd.grad(out, leaves, grad_out)[1:])
        first = first or found
        assert all(map(torch.equal, found, first))
