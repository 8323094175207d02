"""Kernels that are launched with the same addresses again: one graph in their place."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.backends.kernels import launch_graphs as module
from attndsl.backends.kernels.launch_graphs import LaunchGraphs
from attndsl.foundation.caches import CACHES, Reason


@pytest.fixture
def ran(monkeypatch):
    """Launches of kernels, and of graphs, in order; no GPU is asked."""
    found = []

    def captured(launches):
        found.append(f"graph of {len(launches)}")
        return lambda: found.append("graph")

    monkeypatch.setattr(module, "_captured", captured)
    monkeypatch.setattr(module, "_is_capturing", lambda: False)
    return found


def launches_of(ran, number=3):
    def run(programs, stream, arguments):
        ran.append((programs, stream, tuple(arguments)))

    return lambda: [(run, place + 1, [place]) for place in range(number)]


ONE_BY_ONE = [(1, 7, (0,)), (2, 7, (1,)), (3, 7, (2,))]


def test_what_comes_again_is_a_graph(ran):
    graphs = LaunchGraphs()
    graphs.launch(("one", 7), 7, launches_of(ran))
    assert ran == ONE_BY_ONE
    for _ in range(2):
        graphs.launch(("one", 7), 7, launches_of(ran))
    assert ran == [*ONE_BY_ONE, "graph of 3", "graph", "graph"]
    ran.clear()
    graphs.launch(("other", 7), 7, launches_of(ran))
    assert ran == ONE_BY_ONE


def test_graphs_of_torch_get_the_kernels_themselves(ran, monkeypatch):
    graphs = LaunchGraphs()
    monkeypatch.setattr(module, "_is_capturing", lambda: True)
    for _ in range(3):
        graphs.launch("one", 7, launches_of(ran))
    assert ran == 3 * ONE_BY_ONE
    monkeypatch.setattr(module, "_is_capturing", lambda: False)
    graphs.launch("one", 7, launches_of(ran))
    assert ran[9:] == ["graph of 3", "graph"]


def test_other_kernels_have_other_graphs(ran):
    graphs = LaunchGraphs()
    for _ in range(3):
        graphs.launch("one", 7, launches_of(ran))
    assert len(graphs) == 1
    CACHES.invalidate(Reason.KERNELS)
    assert len(graphs) == 0
    for number in range(3 * module._MOST):
        graphs.launch(number, 7, launches_of(ran, 0))
    assert len(graphs) <= module._MOST


def operands(**how):
    return [torch.randn(2, 4, 512, 64, dtype=torch.bfloat16, **how) for _ in range(3)]


@pytest.mark.gpu
def test_gradients_of_steps_are_alike():
    """By kernels, by graphs of them, on other streams and within a graph of torch."""
    attention = attndsl.compile("causal()", backend="hopper")
    q, k, v = (x.requires_grad_() for x in operands(device="cuda"))
    grad = torch.randn_like(q)
    stream = torch.cuda.Stream()

    def step():
        return torch.autograd.grad(attention(q, k, v), (q, k, v), grad)

    def check(found):
        torch.cuda.synchronize()
        for one, other in zip(found, wanted, strict=True):
            # Sums of dQ come in no fixed order.
            torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)

    wanted = step()
    for _ in range(4):
        check(step())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            check(step())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = step()
    graph.replay()
    check(found)
    for _ in range(4):
        with torch.no_grad():
            grad.mul_(2)
        wanted = [2 * x for x in wanted]
        check(step())
