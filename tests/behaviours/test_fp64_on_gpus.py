"""fp64 on a GPU: torch operations run it there, so that gradients can be checked."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import attndsl
from attndsl.flex import flex_attention

pytestmark = pytest.mark.gpu

PROGRAMS = {
    "causal": ("causal()", {}),
    "captures": (
        "tensor bias[heads, q_len, kv_len]: float; tensor t[n]: float; param cap: float\n"
        "mask = q >= kv or kv % 3 == 0\n"
        "score = cap * tanh(score / cap) + bias[h, q, kv] + t[q - kv + 5]",
        {"bias": (3, 5, 6), "t": (11,), "cap": ()},
    ),
    "sinks and dropout": (
        "tensor s[heads]: float; mask = causal(); sink = s[h]; "
        "weights = dropout(softmax(score), 0.3)",
        {"s": (3,)},
    ),
    "own weights": ("mask = causal(); weights = sigmoid(score)", {}),
    "dot": (
        "tensor a[heads, q_len, r]: float; tensor c[heads, kv_len, r]: float\n"
        "score = score + dot(a[h, q, :], c[h, kv, :])",
        {"a": (3, 5, 2), "c": (3, 6, 2)},
    ),
}


def _leaf(*shape):
    return torch.randn(shape, dtype=torch.float64, device="cuda", requires_grad=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_right(name):
    text, sizes = PROGRAMS[name]
    attention = attndsl.compile(text)
    names = tuple(sizes)
    leaves = (
        _leaf(2, 3, 5, 4),
        _leaf(2, 3, 6, 4),
        _leaf(2, 3, 6, 4),
        *map(_shaped, sizes.values()),
    )

    def call(q, k, v, *captures):
        given = dict(zip(names, captures, strict=True))
        seed = {"seed": 3} if "dropout" in text else {}
        return attention(q, k, v, **given, **seed)

    out = call(*leaves)
    assert (out.dtype, out.device.type) == (torch.float64, "cuda")
    host = [x.detach().cpu() for x in leaves]
    torch.testing.assert_close(out.cpu(), call(*host))
    assert gradcheck(call, leaves)
    assert gradgradcheck(call, leaves, fast_mode=True)


def _shaped(shape):
    leaf = _leaf(*shape)
    with torch.no_grad():
        leaf.add_(3.0 * (leaf.dim() == 0))
    return leaf


def test_long_masks_and_grouped_heads():
    """Several tiles, of all kinds."""
    attention = attndsl.compile("causal() and q - kv < 300")
    q, k, v = _leaf(2, 4, 700, 16), _leaf(2, 2, 700, 16), _leaf(2, 2, 700, 16)
    grad_out = torch.randn_like(q)
    found = attention(q, k, v)
    grads = torch.autograd.grad(found, (q, k, v), grad_out)
    host = [x.detach().cpu().requires_grad_() for x in (q, k, v)]
    wanted = attention(*host)
    wanted_grads = torch.autograd.grad(wanted, host, grad_out.cpu())
    for x, y in zip((found, *grads), (wanted, *wanted_grads), strict=True):
        torch.testing.assert_close(x.cpu(), y)


def test_functions_and_drop_in_take_fp64():
    q, k, v = (_leaf(2, 3, 5, 4) for _ in range(3))
    assert gradcheck(lambda *x: attndsl.scaled_dot_product_attention(*x, is_causal=True), (q, k, v))
    assert gradcheck(lambda *x: flex_attention(*x, lambda s, b, h, i, j: s * (i - j)), (q, k, v))
    compiled = torch.compile(attndsl.compile("causal()"), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), attndsl.compile("causal()")(q, k, v))


def test_explain_says_so():
    text = attndsl.compile("causal()").explain("cuda")
    assert "in fp64    cpu, whose torch operations run on all devices" in text
