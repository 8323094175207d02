"""Sine, cosine and tangent of the kernels, in the interpreter or on a GPU, against fp64."""

import math

import pytest
import torch
import triton
import triton.language as tl

from attndsl.backends.device.trigonometry import cos, sin, tan

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def all_three(X, SIN, COS, TAN, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    x = tl.load(X + places)
    tl.store(SIN + places, sin(x))
    tl.store(COS + places, cos(x))
    tl.store(TAN + places, tan(x))


def values(x):
    results = [torch.empty_like(x, device=DEVICE) for _ in range(3)]
    all_three[(1,)](x.to(DEVICE), *results, x.numel())
    return [result.cpu() for result in results]


@pytest.mark.parametrize(("low", "high"), [(-40, -3), (-3, 3), (3, 20), (20, 45)])
def test_values_of_all_sizes(low, high):
    generator = torch.Generator().manual_seed(low)
    exponents = torch.rand(1 << 12, generator=generator) * (high - low) + low
    signs = torch.randn(1 << 12, generator=generator).sign()
    x = torch.exp2(exponents) * signs
    exact = x.double()
    for found, wanted in zip(values(x), (exact.sin(), exact.cos(), exact.tan()), strict=True):
        torch.testing.assert_close(found, wanted.float(), atol=1e-7, rtol=2e-6)


def test_the_largest_numbers():
    # Of 2^100 and 2^127, to 17 digits by arithmetic of 400 bits.
    found = values(torch.tensor([2.0**100, 2.0**127, -(2.0**127), 0.0]))
    wanted = [
        [-0.87218360541826731, 0.62338551295587024, -0.62338551295587024, 0.0],
        [0.48917865697472145, 0.78191463871496007, 0.78191463871496007, 1.0],
    ]
    torch.testing.assert_close(torch.stack(found[:2]), torch.tensor(wanted))


def test_what_is_no_number_has_none():
    for found in values(torch.tensor([math.inf, -math.inf, math.nan, -math.nan])):
        assert found.isnan().all()
