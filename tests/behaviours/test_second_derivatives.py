"""A derivative of a gradient is that of the reference, wherever the first one comes from."""

from __future__ import annotations

import torch

import attndsl

TEXT = "tensor gain[heads]: float; mask = q >= kv; score = gain[h] * score * score"


def test_second_derivatives(check, kernels):
    inputs = check.inputs(kernels, torch.float32)
    gain = torch.rand(inputs.q.shape[1], device=inputs.q.device) + 0.5
    found = {}
    for backend, dtype in ((kernels.backend, inputs.q.dtype), ("reference", torch.float64)):
        leaves = [
            x.detach().to(dtype).requires_grad_() for x in (inputs.q, inputs.k, inputs.v, gain)
        ]
        q, k, v, own = leaves
        out = attndsl.compile(TEXT, backend=backend)(q, k, v, gain=own)
        grads = torch.autograd.grad(out, leaves, inputs.grad_out.to(dtype), create_graph=True)
        total = sum((x * x).sum() for x in grads)
        found[dtype] = torch.autograd.grad(total, leaves)
    for mine, exact in zip(*found.values(), strict=True):
        # The gradients that this is a gradient of err by what their own kernels do.
        assert (mine - exact).norm() <= 2e-3 * exact.norm()
