"""Masks and scores of FlexAttention's documentation, against torch's own eager implementation.

The reference is torch's ``math_attention`` in fp64, which calls the same Python functions under
vmap; torch's ``flex_attention`` itself refuses inputs that require grad on CPUs.
"""

from __future__ import annotations

import math

import pytest
import torch
from support.flex_mods import KV, MODS, B, D, H, Q, random
from torch._higher_order_ops.flex_attention import math_attention
from torch.nn.attention import flex_attention as torch_flex

from attndsl.flex import create_block_mask, flex_attention


@pytest.mark.parametrize("name", MODS)
def test_mods_of_the_documentation(name):
    case = MODS[name]()
    shapes = [(B, H, Q, D), (B, H, KV, D), (B, H, KV, D)]
    inputs = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    leaves = [x.requires_grad_() for x in inputs] + list(case.learns.values())

    ours = None
    blocks = (torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32))
    theirs = torch_flex.BlockMask.from_kv_blocks(
        *blocks, BLOCK_SIZE=1 << 30, mask_mod=case.mask, seq_lengths=(1, 1)
    )
    if case.mask is not None:
        ours = create_block_mask(case.mask, B, H, Q, KV, device="cpu", BLOCK_SIZE=8)
    identity = lambda score, b, h, q_idx, kv_idx: score  # noqa: E731
    wanted, wanted_lse, wanted_max = math_attention(
        *inputs, case.reference or identity, theirs.as_tuple(), D**-0.5, {}
    )
    wanted_lse, wanted_max = wanted_lse * math.log(2), wanted_max * math.log(2)
    out, aux = flex_attention(
        *inputs, case.score, ours, return_aux=torch_flex.AuxRequest(lse=True, max_scores=True)
    )
    # Softmax of rows with no live pair is 0 in both; torch's lse has no gradient there.
    live = wanted_lse > -math.inf
    torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(aux.lse, wanted_lse, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(aux.max_scores, wanted_max, atol=1e-6, rtol=1e-6)

    weights = random(*out.shape)
    gradients = [
        torch.autograd.grad((o * weights).sum() + lse[live].sin().sum(), leaves)
        for o, lse in ((out, aux.lse), (wanted, wanted_lse))
    ]
    for mine, other in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=2e-6, rtol=2e-6)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted there")
@pytest.mark.parametrize("name", MODS)
def test_mods_in_interpreted_kernels(name):
    case = MODS[name]()
    blocks = None
    if case.mask is not None:
        blocks = create_block_mask(case.mask, B, H, Q, KV, device="cpu", BLOCK_SIZE=8)
    results = []
    for backend in ("reference", "triton"):
        shapes = [(B, H, Q, D), (B, H, KV, D), (B, H, KV, D)]
        inputs = [random(*shape, seed=seed).float() for seed, shape in enumerate(shapes)]
        leaves = [x.requires_grad_() for x in inputs] + list(case.learns.values())
        out = flex_attention(*inputs, case.score, blocks, kernel_options={"backend": backend})
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=5e-3, rtol=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODS)
def test_mods_in_graphs(name):
    torch._dynamo.reset()
    case = MODS[name]()
    blocks = None
    if case.mask is not None:
        blocks = create_block_mask(case.mask, B, H, Q, KV, device="cpu", BLOCK_SIZE=8)

    def attention(*inputs):
        return flex_attention(*inputs, case.score, blocks)

    results = []
    for function in (attention, torch.compile(attention, fullgraph=True, backend="aot_eager")):
        shapes = [(B, H, Q, D), (B, H, KV, D), (B, H, KV, D)]
        inputs = [random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
        out = function(*inputs)
        leaves = inputs + list(case.learns.values())
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    torch.testing.assert_close(*results)
