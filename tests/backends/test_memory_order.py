"""The order of a result's dims in memory is the one that torch gives to ``empty_like``."""

from __future__ import annotations

import random

import pytest
import torch

from attndsl.backends.memory_order import arranged_like, empty_like


def _lies(rng: random.Random) -> torch.Tensor:
    """A tensor of some memory order: dense, a slice, with steps, or expanded."""
    sizes = [rng.choice([1, 2, 3, 5]) for _ in range(3)]
    order = rng.sample(range(3), 3)
    steps = [rng.choice([1, 1, 2]) for _ in range(3)]
    width = rng.choice([1, 2, 4])
    memory = torch.randn(*(sizes[dim] * steps[dim] for dim in order), width + rng.choice([0, 3]))
    part = memory[(*(slice(None, None, steps[dim]) for dim in order), slice(width))]
    found = part.permute(*(order.index(dim) for dim in range(3)), 3)
    if rng.random() < 0.3:
        dim = rng.randrange(3)
        found = found.narrow(dim, 0, 1).expand_as(found)
    return found


def _steps(x: torch.Tensor) -> list[int]:
    """Strides of the dims that have any."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def test_the_order_is_torchs():
    rng = random.Random(0)
    for _ in range(500):
        x = _lies(rng)
        assert _steps(empty_like(x)) == _steps(torch.empty_like(x)), (x.shape, x.stride())


@pytest.mark.parametrize("width", [1, 3, 8])
def test_another_width_keeps_the_order(width):
    rng = random.Random(width)
    for _ in range(100):
        x = _lies(rng)
        found = empty_like(x, width)
        assert found.shape == (*x.shape[:3], width)
        assert not found._is_view()
        assert found.untyped_storage().nbytes() == found.numel() * 4
        order = sorted(range(3), key=lambda dim: (torch.empty_like(x).stride(dim), -dim))
        kept = [found.stride(dim) for dim in order if x.shape[dim] > 1]
        assert kept == sorted(kept)


def test_what_lies_as_asked_for_is_not_copied():
    like = torch.randn(2, 5, 3, 4).transpose(1, 2)
    assert arranged_like(like, like) is like
    other = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    found = arranged_like(other, like)
    assert found.stride() == like.stride()
    assert torch.equal(found, other.float())


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 0, 3, 4)])
def test_nothing_has_an_order_too(shape):
    batch, heads, length, width = shape
    like = torch.empty(batch, length, heads, width).transpose(1, 2)
    assert empty_like(like, 7).shape == (batch, heads, length, 7)
