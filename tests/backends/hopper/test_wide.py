"""The backward above head dim 128, where two warpgroups share a tile's work by product."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import attndsl

pytestmark = pytest.mark.gpu

TEXTS = {
    "full": "score",
    "causal": "causal()",
    "window": "sliding_window(70)",
    "cap": "mask = causal()\nscore = softcap(score, 2.0)",
    "alibi": "mask = causal()\nscore = score + alibi()",
    "gain": "tensor gain[heads]: float\nscore = gain[h] * score",
    "documents": "tensor doc[q_len]: int\nmask = doc[q] == doc[kv]",
    "nothing": "q < 0",
    "some rows": "q < 70 and kv >= q",
}
DIMS = ((256, 256), (136, 136), (192, 128), (64, 256), (256, 64), (128, 136), (200, 160))


@pytest.fixture
def place():
    """The Hopper backend, at lengths of a few tiles."""
    return SimpleNamespace(backend="hopper", device="cuda", shape=(2, 4, 300, 256))


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_programs(check, place, name, dtype):
    length = place.shape[2]
    captures = {
        "documents": {"doc": (torch.arange(length, device="cuda") // 90).int()},
        "gain": {"gain": torch.rand(4, device="cuda") + 0.5},
    }.get(name)
    inputs = check.inputs(place, dtype, kv_heads=2, captures=captures or {}, with_lse=True)
    check(place, TEXTS[name], inputs)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("name", ["full", "causal"])
def test_head_dims(check, place, dims, name):
    dim, value_dim = dims
    check(place, TEXTS[name], check.inputs(place, torch.bfloat16, dim=dim, value_dim=value_dim))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 200), (200, 2), (64, 64), (65, 63), (129, 1000)])
@pytest.mark.parametrize("group", [1, 4])
def test_lengths(check, place, sizes, group):
    q_len, kv_len = sizes
    inputs = check.inputs(place, torch.float16, q_len=q_len, kv_len=kv_len, kv_heads=4 // group)
    for name in ("full", "causal"):
        check(place, TEXTS[name], inputs)


def test_sums_of_one_program_come_out_alike_again():
    """dK and dV have one order of addition: a race of the warpgroups would show there."""
    leaves = [
        torch.randn(2, 8, 2048, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    attention = attndsl.compile("causal()", backend="hopper")
    grad_out = torch.randn_like(leaves[0])
    out = attention(*leaves)
    _, *first = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    for _ in range(20):
        _, *again = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one, other)
