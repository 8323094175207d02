"""Under torch.compile: one graph, the same results, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attndsl
from attndsl import scaled_dot_product_attention


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _one_graph(function, *leaves, backend="aot_eager"):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    outs = [compiled(*leaves), function(*leaves)]
    assert counter.frame_count == 1
    torch.testing.assert_close(*outs)
    learned = [x for x in leaves if x.requires_grad]
    grads = [torch.autograd.grad(out.square().sum(), learned) for out in outs]
    torch.testing.assert_close(*grads)


def _leaves():
    return [torch.randn(2, 3, length, 8, requires_grad=True) for length in (5, 7, 7)]


BIAS = causal_lower_right(5, 7)
UPPER_LEFT = causal_upper_left(5, 7)
CALLS = {
    "causal": lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
    "five dims": lambda q, k, v: scaled_dot_product_attention(q[:, None], k[:, None], v[:, None]),
    "broadcast": lambda q, k, v: scaled_dot_product_attention(q, k[:1], v[:, :1], scale=0.3),
    "a bias": lambda q, k, v: scaled_dot_product_attention(q, k, v, BIAS),
    "an upper left bias": lambda q, k, v: scaled_dot_product_attention(q, k, v, UPPER_LEFT),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    _one_graph(CALLS[name], *_leaves())


def test_learned_and_bool_masks():
    mask = torch.randn(3, 5, 7, requires_grad=True)

    def function(q, k, v, mask):
        return scaled_dot_product_attention(
            q, k, v, mask.sin(), is_causal=True
        ) + scaled_dot_product_attention(q, k, v, mask[0] > -1)

    _one_graph(function, *_leaves(), mask)


def test_a_bias_as_an_argument():
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    leaves = _leaves()
    torch.testing.assert_close(
        compiled(*leaves, BIAS), scaled_dot_product_attention(*leaves, attn_mask=BIAS)
    )


def test_other_lengths_do_not_break_a_compiled_function():
    def function(q, k, v, mask):
        return scaled_dot_product_attention(q, k, v, mask, is_causal=True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for q_len, kv_len in ((5, 7), (6, 9), (8, 4)):
        q, k = torch.randn(2, 3, q_len, 8), torch.randn(2, 3, kv_len, 8)
        mask = torch.randn(q_len, kv_len, requires_grad=True)
        outs = [call(q, k, k, mask) for call in (compiled, function)]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(out.sum(), mask) for out in outs))


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return scaled_dot_product_attention(q, k, v, mask)

    leaves = [x.detach() for x in _leaves()] + [torch.randn(5, 7) > 0]
    exported = torch.export.export(Layer(), tuple(leaves))
    torch.testing.assert_close(exported.module()(*leaves), Layer()(*leaves))


def test_autocast():
    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return scaled_dot_product_attention(q, k, v)

    _one_graph(function, *_leaves())


def test_dropout_is_drawn_anew():
    q, k, v = _leaves()
    compiled = torch.compile(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, dropout_p=0.5),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    assert torch.autograd.grad(first.sum(), q)[0].abs().max() > 0


def test_jagged_tensors():
    parts = [torch.randn(length, 16) for length in (3, 0, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)

    def function(x):
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        return scaled_dot_product_attention(q, q, q, is_causal=True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    outs = [call(x).values() for call in (compiled, function)]
    torch.testing.assert_close(*outs)
    grads = [torch.autograd.grad(out.square().sum(), x)[0].values() for out in outs]
    torch.testing.assert_close(*grads)


def test_modules():
    module = attndsl.nn.MultiheadAttention(16, 2, batch_first=True)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(6)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True

    def function(x):
        out, weights = module(x, x, x, attn_mask=mask, key_padding_mask=padding, is_causal=True)
        return out + weights.sum(-1, keepdim=True)

    _one_graph(function, torch.randn(2, 6, 16, requires_grad=True))


def test_weights_of_modules_that_drop_some():
    module = attndsl.nn.MultiheadAttention(16, 1, dropout=0.4, batch_first=True)
    torch.nn.init.normal_(module.in_proj_bias)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 6, 16)
    for _ in range(2):
        out, weights = compiled(x, x, x)
        value = module._project(x, x, x)[2]
        torch.testing.assert_close(out, module.out_proj(weights @ value))


def test_fake_tensors_run_no_kernel():
    with FakeTensorMode():
        q = torch.empty(1, 4, 1 << 18, 64, requires_grad=True)
        mask = torch.empty(1, 1, 1, 1 << 18)
        out = scaled_dot_product_attention(q, q, q, mask, dropout_p=0.1)
        assert out.shape == q.shape
        out.sum().backward()
        assert q.grad.shape == q.shape
