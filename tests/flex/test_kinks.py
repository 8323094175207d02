"""Gradients of traced functions where they have kinks and jumps are those of torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import attndsl
from attndsl.passes.magnitude import magnitude

AT = (0.0, 1.0, 6.0, -1.3, -1.0, 0.7, -0.0, 3.0)
"""Of each head: bounds of the functions below are among them."""
FUNCTIONS = {
    "clamp from below": lambda x: x.clamp(min=0.0),
    "clamp to both": lambda x: x.clamp(0.0, 1.0),
    "clamp from above": lambda x: torch.clamp(x, max=1.0),
    "clamp, crossed": lambda x: x.clamp(1.0, 0.0),
    "clip": lambda x: torch.clip(x, -1.0, 0.0),
    "clamp by a tensor": lambda x: torch.clamp(x, min=-x),
    "relu": torch.relu,
    "relu6": F.relu6,
    "hardtanh": F.hardtanh,
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "maximum": lambda x: torch.maximum(x, torch.zeros_like(x)),
    "abs": torch.abs,
    "remainder": lambda x: torch.remainder(x, 0.7),
    "%": lambda x: x % -0.9,
    "% by a tensor": lambda x: torch.remainder(2.3 + 0.0 * x, x + 0.11),
    "fmod": lambda x: torch.fmod(x, 0.9),
    "fmod by a tensor": lambda x: torch.fmod(-2.3 + 0.0 * x, x + 0.11),
    "frac": torch.frac,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_torch(name):
    function = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, len(AT), 6, 8, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    found = []
    for traced in (True, False):
        gain = torch.tensor(AT, dtype=torch.float64, requires_grad=True)
        if traced:
            made = attndsl.trace(lambda s, b, h, q, kv, gain=gain: s + function(gain[h]) * kv)
            out = attndsl.compile(made.text, backend="cpu")(q, k, v, **made.captures)
        else:
            bias = function(gain).view(1, -1, 1, 1) * torch.arange(6)
            out = torch.softmax(q @ k.mT * 8**-0.5 + bias, -1) @ v
        found.append((out, torch.autograd.grad(out.sin().sum(), gain)[0]))
    for ours, wanted in zip(*found, strict=True):
        # torch has a sixth in fp32 in the derivative of hardsigmoid.
        torch.testing.assert_close(ours, wanted, atol=1e-7, rtol=1e-7)


def test_a_remainder_of_scores_has_their_gradient():
    x = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    step = torch.tensor([0.7, -0.9], requires_grad=True)
    attention = attndsl.compile("tensor step[heads]: float\nscore = score % step[h]")
    scores = torch.remainder(x @ x.mT * 8**-0.5, step.view(1, 2, 1, 1))
    found = [
        torch.autograd.grad(out.sin().sum(), (x, step))
        for out in (attention(x, x, x, step=step), torch.softmax(scores, -1) @ x)
    ]
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, kv: torch.where(q >= kv, s, -torch.inf).clamp(max=50.0),
        lambda s, b, h, q, kv: torch.where(q >= kv, s, -torch.inf).clamp(min=-torch.inf),
        lambda s, b, h, q, kv: (s + torch.where(q >= kv, 0.0, -torch.inf)).clamp_max(30.0),
    ],
)
def test_a_clamp_of_masked_scores_keeps_the_mask(function):
    made = attndsl.trace(function)
    q = torch.randn(1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    wanted = attndsl.compile("causal()")(q, q, q)
    torch.testing.assert_close(attndsl.compile(made.text)(q, q, q), wanted)


@pytest.mark.parametrize(
    ("function", "bound"),
    [
        (lambda s, b, h, q, kv: s.clamp(-20.0, 20.0), 20.0),
        (lambda s, b, h, q, kv: 20 * torch.clamp(s / 20, -1, 1), 20.0),
        (lambda s, b, h, q, kv: F.hardtanh(s), 1.0),
        (lambda s, b, h, q, kv: F.relu6(s), 6.0),
    ],
)
def test_bounds_of_scores_are_known(function, bound):
    """Kernels then take no maximum off."""
    lowered = attndsl.compile(attndsl.trace(function).text).lowered
    assert magnitude(lowered.program.score) == bound
