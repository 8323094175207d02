"""Captured tensors of size 1 along a declared dim: what expanded ones give, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attndsl
from attndsl.errors import AttnDSLError, ShapeError

BATCH, HEADS, KV_HEADS, ROWS, KEYS, DIM = 2, 4, 2, 9, 13, 8
TEXT = """
tensor bias[batch, heads, q_len, kv_len]: float
tensor far[heads, 2 * kv_len]: float
tensor pad[batch, kv_len]: bool
mask = pad[b, kv]
score = score + bias[b, h, q, kv] + far[h, q - kv + kv_len]
"""
SHAPES = {"bias": (BATCH, HEADS, ROWS, KEYS), "far": (HEADS, 2 * KEYS), "pad": (BATCH, KEYS)}


def operands() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    sizes = ((HEADS, ROWS), (KV_HEADS, KEYS), (KV_HEADS, KEYS))
    return tuple(torch.randn(BATCH, *size, DIM, requires_grad=True) for size in sizes)


def results(
    attention: attndsl.Attention, captures: dict[str, torch.Tensor], expand: bool
) -> list[torch.Tensor]:
    """The output, and gradients of all inputs as they are given."""
    q, k, v = operands()
    shapes = SHAPES if expand else {name: x.shape for name, x in captures.items()}
    used = {name: x.expand(shapes[name]).contiguous() for name, x in captures.items()}
    out = attention(q, k, v, **used)
    torch.manual_seed(2)
    inputs = [q, k, v, *(x for x in captures.values() if x.requires_grad)]
    return [out, *torch.autograd.grad(out, inputs, torch.randn(out.shape))]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@settings(max_examples=8, deadline=None)
@given(
    ones=st.fixed_dictionaries(
        {name: st.lists(st.booleans(), min_size=len(x), max_size=len(x))
         for name, x in SHAPES.items()}
    )
)  # fmt: skip
def test_a_size_of_1_counts_for_all_indices(backend: str, ones: dict[str, list[bool]]) -> None:
    torch.manual_seed(0)
    captures: dict[str, torch.Tensor] = {}
    for name, shape in SHAPES.items():
        sizes = [1 if one else size for one, size in zip(ones[name], shape, strict=True)]
        drawn = torch.rand(sizes)
        captures[name] = drawn < 0.8 if name == "pad" else drawn.requires_grad_()
    attention = attndsl.compile(TEXT, backend=backend)
    for found, wanted in zip(
        results(attention, captures, expand=False), results(attention, captures, expand=True),
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_the_program_is_that_of_the_smaller_dims() -> None:
    q, k, _ = operands()
    sizes = {"batch": BATCH, "heads": HEADS, "kv_heads": KV_HEADS, "q_len": ROWS, "kv_len": KEYS}
    attention = attndsl.compile("tensor bias[batch, heads]: float\nscore = score + bias[b, h]")
    smaller = attndsl.compile("tensor bias[1, heads]: float\nscore = score + bias[0, h]")
    bias = torch.ones(1, HEADS)
    assert attention.variant({"bias": bias}, sizes)[0].lowered.digest == smaller.lowered.digest
    whole = {"bias": torch.ones(BATCH, HEADS)}
    assert attention.variant(whole, sizes)[0] is attention
    assert attention.scores(q, k, bias=bias).shape == (BATCH, HEADS, ROWS, KEYS)


@pytest.mark.parametrize(
    ("text", "captures", "message"),
    [
        # A size that only tensors tell is what they say, and dims of numbers too.
        ("tensor t[n]: float\ntensor u[n]: float\nscore = score + t[q % n] + u[kv % n]",
         {"t": (5,), "u": (1,)}, "n"),
        ("tensor t[heads, q_len, r]: float\ntensor u[heads, kv_len, r]: float\n"
         "score = score + dot(t[h, q, :], u[h, kv, :])",
         {"t": (HEADS, ROWS, 4), "u": (HEADS, KEYS, 1)}, "r"),
        ("tensor t[heads]: float\nscore = score + t[h]", {"t": (2,)}, "t"),
        ("tensor t[heads]: float\nscore = score + t[h]", {"t": (1, HEADS)}, "t"),
    ],
)  # fmt: skip
def test_other_sizes_are_refused(text: str, captures: dict[str, Any], message: str) -> None:
    q, k, v = operands()
    given = {name: torch.zeros(shape) for name, shape in captures.items()}
    with pytest.raises((ShapeError, AttnDSLError), match=message):
        attndsl.compile(text)(q, k, v, **given)


def test_sizes_vary_from_call_to_call_and_in_parts_of_a_call() -> None:
    q, k, v = operands()
    attention = attndsl.compile("tensor t[heads, q_len]: float\nscore = score * t[h, q]")
    t = torch.rand(HEADS, 1) + 0.5
    whole = attention(q, k, v, t=t.expand(HEADS, ROWS))
    for _ in range(2):
        torch.testing.assert_close(attention(q, k, v, t=t), whole)
        torch.testing.assert_close(attention(q, k, v, t=t.expand(HEADS, ROWS).clone()), whole)
    # One row of nine, as in decoding: its own share has one element too, and both mean the same.
    part = {"q_offset": 4, "q_len": ROWS, "kv_len": KEYS}
    row = attention(q[:, :, 4:5], k, v, t=t, **part)
    torch.testing.assert_close(row, whole[:, :, 4:5])
    heads = {"h_offset": 2, "heads": HEADS, "kv_heads": KV_HEADS}
    every = torch.full((1, 1), 0.7)
    torch.testing.assert_close(
        attention(q[:, 2:], k[:, 1:], v[:, 1:], t=every, **heads),
        attention(q, k, v, t=every)[:, 2:],
    )


def test_a_part_without_keys_takes_them() -> None:
    attention = attndsl.compile(
        "tensor x[heads, q_len, kv_len]: float\nmask = causal(); score = score + x[h, q, kv]"
    )
    q, k, v = (torch.randn(1, 2, rows, DIM) for rows in (3, 0, 0))
    for shape in ((2, 3, 1), (2, 7, 1), (1, 1, 1), (2, 7, 7)):
        x = torch.randn(shape, requires_grad=True)
        out = attention(q, k, v, x=x, q_len=7, kv_len=7)
        assert out.eq(0).all()
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert grad.eq(0).all()
        assert grad.shape == x.shape
    with pytest.raises(ShapeError, match="kv_len, which is 0 in this call"):
        attention(q, k, v, x=torch.randn(2, 3, 1))


def test_what_looks_at_a_program_takes_them_too() -> None:
    q, k, v = operands()
    attention = attndsl.compile(TEXT)
    few = {
        "bias": torch.rand(1, HEADS, 1, 1), "far": torch.rand(1, 2 * KEYS),
        "pad": torch.rand(1, KEYS) < 0.7,
    }  # fmt: skip
    all_ = {name: x.expand(SHAPES[name]).clone() for name, x in few.items()}
    torch.testing.assert_close(attention.scores(q, k, **few), attention.scores(q, k, **all_))
    torch.testing.assert_close(attention.weights(q, k, **few), attention.weights(q, k, **all_))
    sizes = {"q_len": ROWS, "kv_len": KEYS, "batch": BATCH, "heads": HEADS}
    masks = [attention.mask(**sizes, pad=x["pad"]) for x in (few, all_)]
    assert torch.equal(masks[0].expand(masks[1].shape), masks[1])
    attndsl.compare(attention, q.detach(), k.detach(), v.detach(), **few)
