"""Flexible attention 7: several calls in one function, torch.compile, fake tensors, export."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import attndsl

CAUSAL = "q >= kv"
ALIBI = "score + (kv - q) * exp2(-(h + 1) * 8 / heads)"
GAIN = "tensor gain[heads]: float; score = score * gain[h]"


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _leaves(place, length=None, dtype=torch.float32):
    batch, heads, default, dim = place.shape
    if (place.backend, place.device) == ("triton", "cpu"):
        batch = 1  # Interpreted kernels take as long for each entry as for the first.
    shape = batch, heads, length or (24 if place.device == "cpu" else min(default, 256)), dim
    return [
        torch.randn(shape, device=place.device, dtype=dtype, requires_grad=True) for _ in range(3)
    ]


def _compiled(place, *texts):
    return [attndsl.compile(text, backend=place.backend) for text in texts]


def _gradients(function, leaves):
    out = function(*leaves)
    return out, torch.autograd.grad(out.square().sum(), leaves)


def _same(place, build, *texts):
    """``build(attentions)`` at the place and in the reference agree, forward and backward."""
    leaves = _leaves(place)
    out, grads = _gradients(build(*_compiled(place, *texts)), leaves)
    oracle = [attndsl.compile(text, backend="reference") for text in texts]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected, expected_grads = _gradients(build(*oracle), wide)
    torch.testing.assert_close(out.double(), expected, atol=5e-3, rtol=5e-3)
    for found, exact in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found.double(), exact, atol=2e-2, rtol=2e-2)


def test_one_output_is_the_next_query(place):
    _same(place, lambda a, b: lambda q, k, v: b(a(q, k, v), k, v), CAUSAL, ALIBI)


def test_three_calls_in_one_function(place):
    def build(a, b, c):
        return lambda q, k, v: c(a(q, k, v), b(q, k, v), v)

    _same(place, build, CAUSAL, ALIBI, "score * 2")


def test_between_other_operations(place):
    _same(place, lambda a: lambda q, k, v: torch.cos(a(torch.sin(q), k.sin(), v)), ALIBI)


def _one_graph(function, leaves, backend="aot_eager"):
    """Compiled, ``function`` gives what it gives without, as one graph; forward and backward."""
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    out, grads = _gradients(compiled, leaves)
    assert counter.frame_count == 1
    expected, expected_grads = _gradients(function, leaves)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    for found, exact in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(found, exact, atol=1e-3, rtol=1e-3)
    _gradients(compiled, leaves)
    assert counter.frame_count == 1


@pytest.mark.few_when_interpreted(backend=["aot_eager"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_to_one_graph(place, backend):
    (attention,) = _compiled(place, CAUSAL)
    _one_graph(lambda q, k, v: torch.cos(attention(q.sin(), k, v)), _leaves(place), backend)


def test_two_programs_compile_to_one_graph(place):
    a, b = _compiled(place, CAUSAL, ALIBI)
    _one_graph(lambda q, k, v: b(a(q, k, v).cos(), k, v) + q, _leaves(place))


def test_three_programs_compile_to_one_graph(place):
    a, b, c = _compiled(place, CAUSAL, ALIBI, "score * 2")
    _one_graph(lambda q, k, v: c(a(q, k, v), b(q, k, v), v), _leaves(place))


def test_captures_and_lse_compile_to_one_graph(place):
    (attention,) = _compiled(place, GAIN)

    def function(q, k, v, gain):
        out, lse = attention(q, k, v, gain=gain.exp(), return_lse=True)
        return out + (lse * 2).unsqueeze(-1)

    gain = torch.randn(place.shape[1], device=place.device, requires_grad=True)
    _one_graph(function, [*_leaves(place), gain])


def test_params_of_both_kinds_compile_to_one_graph(place):
    text = "param near: int; param gain: float; mask = abs(q - kv) < near; score = score * gain"
    (attention,) = _compiled(place, text)

    def function(q, k, v, gain):
        return attention(q, k, v, near=5, gain=gain)

    gain = torch.tensor(0.7, device=place.device, requires_grad=True)
    _one_graph(function, [*_leaves(place), gain])


def test_dropout_in_a_graph_is_drawn_at_each_run(place):
    (attention,) = _compiled(place, "weights = dropout(softmax(score), 0.5)")
    q, k, _ = _leaves(place)
    v = torch.eye(q.shape[2], device=place.device).expand(*q.shape[:2], -1, -1).requires_grad_()
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first == 0, second == 0)
    assert 0.4 < float((first == 0).float().mean()) < 0.6
    # dV are the weights, transposed, summed over the rows that come back.
    (grad,) = torch.autograd.grad(first, v, torch.eye(q.shape[2], device=v.device).expand_as(first))
    torch.testing.assert_close(grad, first.mT, atol=1e-2, rtol=1e-2)


def test_learned_params_beside_numbers_compile_to_one_graph():
    torch._dynamo.reset()
    attention = attndsl.compile(
        "param gain: float\nparam n: int\ntensor bias[heads]: float\n"
        "score = gain * score + bias[h] * n",
        backend="reference",
    )

    def function(q, gain, bias):
        return attention(q, q, q, gain=gain, n=3, bias=bias).sin().sum()

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 2, 6, 4), (), (2,))
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    wanted, found = (torch.autograd.grad(f(*leaves), leaves) for f in (function, compiled))
    torch.testing.assert_close(found, wanted)


def test_other_lengths_do_not_break_a_compiled_function(place):
    (attention,) = _compiled(place, CAUSAL)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    for length in (16, 24, 40):
        leaves = _leaves(place, length)
        torch.testing.assert_close(compiled(*leaves), attention(*leaves), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_inductor_compiles_to_one_graph():
    leaves = [torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True) for _ in range(3)]
    attention = attndsl.compile(CAUSAL, backend="triton")
    _one_graph(lambda q, k, v: torch.cos(attention(q.sin(), k, v)), leaves, "inductor")


def test_fake_tensors_run_no_kernel(place):
    """Shapes, dtypes and gradients without any data."""
    (attention,) = _compiled(place, GAIN)
    batch, heads, length, dim = place.shape
    with FakeTensorMode():
        q = torch.empty(batch, heads, length, dim, device=place.device, requires_grad=True)
        k, v = (torch.empty(batch, heads, length + 3, dim, device=place.device) for _ in range(2))
        gain = torch.empty(heads, device=place.device, requires_grad=True)
        out, lse = attention(q, k, v, gain=gain, return_lse=True)
        assert out.shape == q.shape
        assert lse.shape == q.shape[:-1]
        (out.sum() + lse.sum()).backward()
        assert q.grad.shape == q.shape
        assert gain.grad.shape == gain.shape


def test_meta_tensors_need_no_memory():
    attention = attndsl.compile(CAUSAL, backend="reference")
    with FakeTensorMode():
        q = torch.empty(1, 1, 1 << 20, 64)
        assert attention(q, q, q).shape == q.shape


def test_export(place):
    (attention,) = _compiled(place, ALIBI)

    class Layer(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v).cos()

    leaves = [x.detach() for x in _leaves(place)]
    exported = torch.export.export(Layer(), tuple(leaves))
    torch.testing.assert_close(
        exported.module()(*leaves), attention(*leaves).cos(), atol=1e-5, rtol=1e-5
    )
