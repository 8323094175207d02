"""Graphs know how results lie in memory, and layers in them copy nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim

import attndsl

HEADS, DIM = 4, 8
WIDTH = HEADS * DIM


class Layer(nn.Module):
    """A packed projection before the call; a view, never a copy, behind it."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.before, self.behind = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (
            part.view(batch, length, HEADS, DIM).transpose(1, 2)
            for part in self.before(x).split(WIDTH, -1)
        )
        out = self.attention(q, k, v)
        return self.behind(out.transpose(1, 2).view(batch, length, WIDTH))


def _both(layer, compiled, batch, length):
    x = torch.randn(batch, length, WIDTH, requires_grad=True)
    for found, wanted in zip(
        *(
            (out := run(x), *torch.autograd.grad(out.square().sum(), (x, *layer.parameters())))
            for run in (compiled, layer)
        ),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_graphs_have_the_true_strides(backend):
    layer = Layer(attndsl.compile("causal()", backend=backend))
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for batch, length in ((2, 10), (3, 17)):
        _both(layer, compiled, batch, length)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_inductor_has_the_true_strides(dynamic):
    """It checks the strides of what operators return."""
    layer = Layer(attndsl.compile("causal()"))
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for batch, length in ((2, 10), (3, 17))[: 1 + dynamic]:
        _both(layer, compiled, batch, length)


def test_torchs_functions_are_views_too():
    def attention(q, k, v):
        return attndsl.scaled_dot_product_attention(q, k, v, is_causal=True)

    layer = Layer(attention)
    _both(layer, torch.compile(layer, backend="aot_eager", fullgraph=True), 2, 10)


def test_exported_layers_have_views():
    layer = Layer(attndsl.compile("causal()"))
    sizes = ({0: Dim("batch", max=64), 1: Dim("length", max=4096)},)
    exported = torch.export.export(layer, (torch.randn(2, 10, WIDTH),), dynamic_shapes=sizes)
    x = torch.randn(5, 33, WIDTH)
    torch.testing.assert_close(exported.module()(x), layer(x))
