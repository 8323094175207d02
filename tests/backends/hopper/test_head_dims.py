"""Head dims that are no powers of two: their tiles have columns of zeros, which products skip."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.gpu

DIMS = ((72, 72), (80, 80), (88, 80), (96, 96), (104, 96), (112, 112), (64, 80), (80, 64))


@pytest.fixture
def place():
    """The Hopper backend, at lengths of a few tiles."""
    return SimpleNamespace(backend="hopper", device="cuda", shape=(2, 4, 300, 80))


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("text", ["score", "causal()", "score = softcap(score, 2.0)"])
def test_gradients(check, place, dims, text):
    dim, value_dim = dims
    check(place, text, check.inputs(place, torch.bfloat16, dim=dim, value_dim=value_dim))
