"""Calls within CUDA graphs: what is replayed is what an eager call makes of the new inputs."""

from __future__ import annotations

import pytest
import torch

import attndsl

pytestmark = pytest.mark.gpu


def _inputs(requires_grad=False):
    shapes = [(2, 4, 300, 64), (2, 2, 300, 64), (2, 2, 300, 64)]
    return [
        torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_(requires_grad)
        for s in shapes
    ]


def _captured(function):
    """``function``'s results within a graph, and the graph; called outside first."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function()
    return found, graph


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("text", ["score", "mask = causal()\nscore = softcap(score, 20.0)"])
def test_a_forward_is_replayed(backend, text):
    attention, (q, k, v) = attndsl.compile(text, backend=backend), _inputs()
    found, graph = _captured(lambda: attention(q, k, v, return_lse=True))
    for _ in range(3):
        for x in (q, k, v):
            x.copy_(torch.randn_like(x))
        graph.replay()
        for a, b in zip(found, attention(q, k, v, return_lse=True), strict=True):
            torch.testing.assert_close(a, b, atol=0.0, rtol=0.0)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("text", ["score", "mask = causal()\nscore = softcap(score, 20.0)"])
def test_a_backward_is_replayed(backend, text):
    attention, inputs = attndsl.compile(text, backend=backend), _inputs(requires_grad=True)
    grad_out = torch.randn_like(inputs[0])

    def gradients():
        return torch.autograd.grad(attention(*inputs), inputs, grad_out)

    found, graph = _captured(gradients)
    for _ in range(3):
        with torch.no_grad():
            for x in (*inputs, grad_out):
                x.copy_(torch.randn_like(x))
        graph.replay()
        # The Hopper backward adds up dQ in no fixed order.
        for a, b in zip(found, gradients(), strict=True):
            torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_results_do_not_depend_on_what_is_kept(backend):
    """Memory is used again and again, in other shapes between, and results stay right."""
    attention = attndsl.compile("causal()", backend=backend)
    reference = attndsl.compile("causal()", backend="reference")
    memory = torch.randn(3, 2 * 4 * 512 * 64, device="cuda", dtype=torch.bfloat16)
    shapes = [(2, 4, 512, 64), (1, 8, 512, 64), (2, 4, 256, 128), (4, 4, 256, 64)]
    views = [[x.view(shape) for x in memory] for shape in shapes]
    views.append([x.view(2, 512, 4, 64).transpose(1, 2) for x in memory])
    for _ in range(3):
        memory.copy_(torch.randn_like(memory))
        for q, k, v in views:
            out = attention(q, k, v)
            wanted = reference(q.float(), k.float(), v.float())
            torch.testing.assert_close(out.float(), wanted, atol=2e-2, rtol=2e-2)
            fresh = attention(q.clone(), k.clone(), v.clone())
            torch.testing.assert_close(out, fresh, atol=0.0, rtol=0.0)


LEARNED = {
    "gain": ("tensor t[heads]: float; score = tanh(score * t[h])", (4,)),
    "bias": ("tensor t[q_len, kv_len]: float; score = score + t[q, kv]", (300, 300)),
    "distances": ("tensor t[n]: float; score = score + t[q - kv + 300]", (600,)),
    "buckets of two": ("tensor t[n]: float; score = score + t[(q * kv) % n]", (37,)),
}


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("name", LEARNED)
def test_gradients_of_captures_are_replayed(backend, name):
    text, shape = LEARNED[name]
    attention, inputs = attndsl.compile(text, backend=backend), _inputs(requires_grad=True)
    table = torch.randn(shape, device="cuda", requires_grad=True)
    grad_out = torch.randn_like(inputs[0])

    def gradients():
        return torch.autograd.grad(attention(*inputs, t=table), table, grad_out)

    found, graph = _captured(gradients)
    for _ in range(3):
        with torch.no_grad():
            for x in (*inputs, table, grad_out):
                x.copy_(torch.randn_like(x))
        graph.replay()
        assert torch.equal(found[0], gradients()[0])
