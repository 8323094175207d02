"""Under autocast q, k and v take its dtype, and what a program adds keeps its own."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl import scaled_dot_product_attention
from attndsl.flex import flex_attention

BIAS = attndsl.compile("tensor bias[q_len, kv_len]: float; score = score + bias[q, kv]")
SINK = attndsl.compile("tensor height[heads]: float; sink = height[h]")
FACES = {
    "program": lambda q, k, v, bias: BIAS(q, k, v, bias=bias),
    "sdpa": scaled_dot_product_attention,
    "flex": lambda q, k, v, bias: flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i, j]),
}


def _operands():
    return [torch.randn(2, 2, length, 8, requires_grad=True) for length in (5, 9, 9)]


# Steps of this size beside 100 are lost in fp16 and bf16.
FINE = 100 + torch.randn(5, 9, generator=torch.Generator().manual_seed(1)) / 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("face", FACES)
def test_biases_keep_their_dtype(face, dtype):
    attention, operands = FACES[face], _operands()
    bias = FINE.clone().requires_grad_()
    with torch.autocast("cpu", dtype):
        found = attention(*operands, bias)
    assert found.dtype is dtype
    low = [x.detach().to(dtype).requires_grad_() for x in operands]
    expected = attention(*low, bias)
    assert torch.equal(found, expected)
    assert not torch.equal(found, attention(*low, bias.to(dtype)))
    grads = torch.autograd.grad(found.float().sin().sum(), [*operands, bias])
    wanted = torch.autograd.grad(expected.float().sin().sum(), [*low, bias])
    assert [x.dtype for x in grads] == [torch.float32] * 4
    for one, other in zip(grads, wanted, strict=True):
        assert torch.equal(one, other.float())


def test_sinks_keep_their_dtype():
    q, k, v = _operands()
    height = 3 + torch.rand(2) / 256
    with torch.autocast("cpu", torch.bfloat16):
        found, lse = SINK(q, k, v, height=height, return_lse=True)
    low = [x.bfloat16() for x in (q, k, v)]
    wanted, wanted_lse = SINK(*low, height=height, return_lse=True)
    assert torch.equal(found, wanted)
    assert torch.equal(lse, wanted_lse)
    assert lse.dtype is torch.float32
    assert not torch.equal(lse, SINK(*low, height=height.bfloat16(), return_lse=True)[1])


@pytest.mark.parametrize("face", FACES)
def test_operands_of_several_dtypes_become_one(face):
    """Rotary embeddings give fp32 beside values of a projection in the dtype of autocast."""
    q, k, v = _operands()
    with torch.autocast("cpu", torch.bfloat16):
        found = FACES[face](q, k, v.bfloat16(), FINE)
        assert FACES[face](*(x.double() for x in (q, k, v)), FINE.double()).dtype is torch.float64
    assert torch.equal(found, FACES[face](q.bfloat16(), k.bfloat16(), v.bfloat16(), FINE))
    with pytest.raises(attndsl.AttnDSLError, match=r"v(alue)? is torch\.bfloat16"):
        FACES[face](q, k, v.bfloat16(), FINE)


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_in_a_graph(graphs, inside):
    def function(q, k, v, bias):
        if not inside:
            return BIAS(q, k, v, bias=bias)
        with torch.autocast("cpu", torch.bfloat16):
            return BIAS(q, k, v, bias=bias)

    compiled, operands = graphs(function), _operands()
    with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
        outs = [run(*operands, FINE) for run in (compiled, function)]
    assert outs[0].dtype is torch.bfloat16
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), operands) for x in outs))
