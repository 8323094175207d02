"""Sine, cosine and tangent of the kernels, in the interpreter or on a GPU, against fp64."""

import math

import pytest
import torch
import triton
import triton.language as tl

from attndsl.backends.device.trigonometry import (
    cos,
    cos_cody_waite,
    sin,
    sin_cody_waite,
    tan,
    tan_cody_waite,
)
from attndsl.passes.trig_ranges import MOST_ANGLE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def all_three(X, SIN, COS, TAN, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    x = tl.load(X + places)
    tl.store(SIN + places, sin(x))
    tl.store(COS + places, cos(x))
    tl.store(TAN + places, tan(x))


@triton.jit
def all_three_cody_waite(X, SIN, COS, TAN, COUNT: tl.constexpr):
    places = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    x = tl.load(X + places)
    tl.store(SIN + places, sin_cody_waite(x))
    tl.store(COS + places, cos_cody_waite(x))
    tl.store(TAN + places, tan_cody_waite(x))


def values(x):
    results = [torch.empty_like(x, device=DEVICE) for _ in range(3)]
    all_three[(1,)](x.to(DEVICE), *results, x.numel())
    return [result.cpu() for result in results]


def values_cody_waite(x, count=1 << 12):
    assert x.numel() % count == 0
    results = [torch.empty_like(x, device=DEVICE) for _ in range(3)]
    all_three_cody_waite[(x.numel() // count,)](x.to(DEVICE), *results, count)
    return [result.cpu() for result in results]


def last_places(found, exact):
    """Errors of fp32 results in units of the last place of the exact ones."""
    unit = torch.exp2(torch.floor(torch.log2(exact.abs().clamp_min(2.0**-126))) - 23)
    return (found.double() - exact).abs() / unit


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


def near_multiples():
    """The fp32 numbers beside each multiple of pi / 2 up to a little more than the limit."""
    most = 1.05 * MOST_ANGLE
    x = (torch.arange(1, int(most / (math.pi / 2)), dtype=torch.float64) * (math.pi / 2)).float()
    below, above = (torch.nextafter(x, torch.tensor(end)) for end in (0.0, math.inf))
    found = torch.cat([x, below, above, -x])
    return torch.cat([found, found[: -found.numel() % (1 << 12)]])


def spread_evenly():
    generator = torch.Generator().manual_seed(0)
    low, high = -20.0, math.log2(1.05 * MOST_ANGLE)
    exponents = torch.rand(1 << 18, generator=generator) * (high - low) + low
    return torch.exp2(exponents) * torch.randn(1 << 18, generator=generator).sign()


@pytest.mark.parametrize("arguments", [near_multiples, spread_evenly])
def test_the_short_reduction_errs_by_places_at_the_end(arguments):
    x = arguments()
    exact = x.double()
    for found, wanted, most in zip(
        values_cody_waite(x), (exact.sin(), exact.cos(), exact.tan()), (1.6, 1.6, 4.0), strict=True
    ):
        assert last_places(found, wanted).max() < most


def test_the_short_reduction_of_zero_and_nan():
    x = torch.zeros(1 << 12)
    x[1] = math.nan
    sine, cosine, tangent = values_cody_waite(x)
    assert [float(found[0]) for found in (sine, cosine, tangent)] == [0.0, 1.0, 0.0]
    assert all(found[1].isnan() for found in (sine, cosine, tangent))
