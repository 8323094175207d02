"""Gradients by distance: sums along the diagonals, of whole tiles first."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import attndsl
from attndsl.backends.base import Wants
from attndsl.backends.gradients.gradient_plan import plan_gradients
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.example import example_call
from attndsl.backends.triton.captures import KINDS
from attndsl.backends.triton.captures.distance_sums import by_distance

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels are compiled, not interpreted, here"
)
TEXTS = {
    "relative": """
        tensor rel[heads, n]: float
        mask = causal()
        score = score + rel[h, q - kv + kv_len]
    """,
    "slopes": "tensor s[heads]: float; mask = causal(); score = score - s[h] * (q - kv)",
    "buckets": """
        tensor t[buckets, heads]: float
        score = score + t[min(int(floor(log2(abs(q - kv) + 1.0))), 4), h]
    """,
    "gain too": """
        tensor s[heads]: float
        tensor gain[heads]: float
        mask = sliding_window(9)
        score = gain[h] * score - s[h] * abs(q - kv)
    """,
    "param": "param a: float; score = score + a * (kv - q)",
    "twice": """
        tensor r[n]: float
        score = score + r[clamp(q - kv, -3, 3) + 3] * r[clamp(kv - q, 0, 3)]
    """,
    "with a sink": """
        tensor r[n]: float
        tensor z[heads]: float
        score = score + r[clamp(q - kv, -30, 30) + 30]
        sink = z[h]
    """,
    "with dropout": """
        tensor r[n]: float
        mask = causal()
        score = score + r[min(q - kv, 30)]
        weights = dropout(softmax(score), 0.3)
    """,
    "with own weights": """
        tensor r[n]: float
        score = score + r[clamp(q - kv, -30, 30) + 30]
        weights = sigmoid(score) / kv_len
    """,
    "in a cap": """
        tensor r[n]: float
        score = 2 * tanh(score) + r[clamp(q - kv, 0, 60)]
        mask = q != 3 and score < 2
    """,
}


def captures_of(name, heads, length, device):
    def learned(*shape):
        return (0.3 * torch.rand(shape, device=device)).requires_grad_()

    return {
        "relative": {"rel": learned(heads, 2 * length + 10)},
        "slopes": {"s": learned(heads)},
        "buckets": {"t": learned(5, heads)},
        "gain too": {"s": learned(heads), "gain": learned(heads)},
        "param": {"a": learned()},
        "twice": {"r": learned(7)},
        "with a sink": {"r": learned(61), "z": learned(heads)},
        "in a cap": {"r": learned(61)},
        "with dropout": {"r": learned(31)},
        "with own weights": {"r": learned(61)},
    }[name]


def wants_of(name):
    program = attndsl.compile(TEXTS[name]).lowered.program
    tensors = frozenset(decl.name for decl in program.tensors)
    return Wants(tensors=tensors, params=frozenset(decl.name for decl in program.params))


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_summed_along_diagonals(name):
    lowered, wants = attndsl.compile(TEXTS[name]).lowered, wants_of(name)
    call = example_call(lowered, 64, 64, torch.bfloat16, {})
    apart = by_distance(lowered, call, wants.tensors | wants.params)
    others = {"gain too": {"gain"}, "with a sink": {"z"}}.get(name, set())
    assert apart == (wants.tensors | wants.params) - others
    left = plan_gradients(KINDS, lowered, call, wants).lines
    # The sink's own gradient is no kernel's.
    assert left.tensors | left.params == others - {"z"}


@pytest.mark.parametrize(
    "text",
    [
        "tensor bias[kv_len]: float; score = score + bias[kv]",
        "tensor s[heads]: float; score = score * s[h] - (q - kv)",
        "tensor s[heads]: float; score = tanh(score - s[h] * (q - kv))",
        "tensor s[heads]: float; weights = sigmoid(score) * s[h] * (q - kv)",
        "tensor s[heads]: float; score = score - s[h] * (q - kv) - s[h] * q",
    ],
)
def test_what_is_not(text):
    lowered = attndsl.compile(text).lowered
    name = lowered.program.tensors[0].name
    call = example_call(lowered, 64, 64, torch.bfloat16, {})
    assert not by_distance(lowered, call, {name})


SHAPES = [(2, 1, 40, 40, 0), (2, 2, 33, 70, 5), (2, 2, 70, 33, -4)]
"""Heads, key heads, queries, keys, offset of queries."""


def in_turn():
    """Each program with one of the shapes; the others with ``-m slow``."""
    for number, name in enumerate(TEXTS):
        for place, shape in enumerate(SHAPES):
            marks = [pytest.mark.slow] * (number % len(SHAPES) != place)
            yield pytest.param(name, *shape, marks=marks)


@interpreted
@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "q_len", "kv_len", "offset"), list(in_turn())
)
def test_gradients(check, name, heads, kv_heads, q_len, kv_len, offset):
    place = SimpleNamespace(backend="triton", device="cpu", shape=(2, heads, q_len, 16))
    captures = captures_of(name, heads, max(q_len, kv_len), "cpu")
    options = {"q_offset": offset} | ({"seed": 5} if name == "with dropout" else {})
    inputs = check.inputs(
        place, torch.float32, kv_heads=kv_heads, q_len=q_len, kv_len=kv_len, captures=captures,
        options=options,
    )  # fmt: skip
    check(place, TEXTS[name], inputs)


@interpreted
@pytest.mark.parametrize(
    ("mask", "q_len", "kv_len", "offset"),
    # Of one key tile, some diagonals have no tile.
    [
        ("q - kv < 99", 70, 9, 0),
        ("causal()", 70, 70, 0),
        ("q - kv < 9", 33, 90, 5),
        ("q != 40", 64, 33, -4),
    ],
)
def test_oblong_tiles(check, monkeypatch, mask, q_len, kv_len, offset):
    # No other test has this program, so that no kernel of it is known.
    text = f"tensor r[n]: float; mask = {mask}; score = score + r[q - kv + 101]"
    monkeypatch.setattr("attndsl.backends.triton.kernels.INTERPRETED", (Config(32, 16, 4, 1),))
    place = SimpleNamespace(backend="triton", device="cpu", shape=(1, 2, q_len, 16))
    captures = {"r": (0.3 * torch.rand(202)).requires_grad_()}
    inputs = check.inputs(
        place, torch.float32, q_len=q_len, kv_len=kv_len, captures=captures,
        options={"q_offset": offset},
    )  # fmt: skip
    check(place, text, inputs)


@interpreted
@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (1, 1)])
def test_lengths_of_nothing(sizes):
    q_len, kv_len = sizes
    attention = attndsl.compile(TEXTS["twice"], backend="triton")
    r = torch.rand(7, requires_grad=True)
    q, k, v = (torch.randn(1, 1, length, 8) for length in (q_len, kv_len, kv_len))
    (found,) = torch.autograd.grad(attention(q, k, v, r=r).sum(), r)
    # One key has all the weight, whatever its score.
    torch.testing.assert_close(found, torch.zeros(7), atol=1e-6, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("dim", [64, 128])
def test_kernels(check, name, backend, dim):
    place = SimpleNamespace(backend=backend, device="cuda", shape=(2, 4, 300, dim))
    captures = captures_of(name, 4, 300, "cuda")
    if name == "param":
        # The error of one number is not evened out by others.
        captures = {"a": captures["a"].detach()}
    options = {"seed": 5} if name == "with dropout" else {}
    inputs = check.inputs(place, torch.bfloat16, kv_heads=2, captures=captures, options=options)
    check(place, TEXTS[name], inputs)
