"""Lookups by a query and a block of keys: one a row of a tile for each block, not one a pair."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from support.jobs import hopper_source

from attndsl.backends.base import Wants
from attndsl.backends.device.library import load_of_blocks
from attndsl.backends.kernels.example import example_call
from attndsl.pipeline import lower
from attndsl.source import Source

LENGTH = 300
HEAD = "tensor m[heads, q_len, n]: bool\nmask = "


@triton.jit
def look_up(TABLE, OUT, first, width, count, step, M: tl.constexpr, N: tl.constexpr,
            SIZE: tl.constexpr, TURNED: tl.constexpr):  # fmt: skip
    q, kv = tl.arange(0, M), first + tl.arange(0, N)
    if TURNED:
        q, kv = q[None, :], kv[:, None]
    else:
        q, kv = q[:, None], kv[None, :]
    found = load_of_blocks(TABLE + q * width, kv, first, count, step, SIZE)
    tl.store(OUT + q * N + kv - first, found + 0 * (q + kv))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("keys", [32, 64, 128])
@pytest.mark.parametrize("size", [32, 64, 128, 512])
def test_a_tile_looks_up_what_its_pairs_do(device, size, keys, turned):
    rows, count = 16, max(2, 384 // size)
    table = torch.randint(0, 100, (rows, 2 * count), dtype=torch.int32, device=device)
    for first in range(0, 512, keys):
        out = torch.full((rows, keys), -1, dtype=torch.int32, device=device)
        look_up[(1,)](table, out, first, 2 * count, count, 2, rows, keys, size, turned)
        kv = (first + torch.arange(keys, device=device)) // size
        assert torch.equal(out, table[:, ::2][:, kv.clamp(max=count - 1)])


@pytest.mark.parametrize(
    ("condition", "blocks"),
    [
        ("m[h, q, kv // 128]", True), ("m[h, q // 64, kv // 64]", True), ("m[h, q, kv >> 5]", True),
        ("m[h, q, kv // 96]", False), ("m[h, q, kv // 16]", False),
        ("m[h, q, (kv + 1) // 64]", False),
        ("m[h, kv // 64, kv]", False), ("m[h, q, q // 64 + kv // 64]", False),
        ("m[h, 0, kv // 64]", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_lookups_of_blocks_are_told_from_others(condition, blocks, direction):
    lowered = lower(Source(HEAD + condition), {})
    call = example_call(lowered, 64, 64, torch.bfloat16, {})
    for moved in (call, call._replace(q_offset=3)):
        text = hopper_source(lowered, moved, direction, Wants(True, True, True))
        assert ("load_of_blocks(" in text) == (blocks and moved is call)


@pytest.fixture
def place():
    """The Hopper backend, at lengths of a few tiles."""
    return SimpleNamespace(backend="hopper", device="cuda", shape=(2, 4, LENGTH, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("size", [32, 64, 128, 512])
@pytest.mark.parametrize("beside", ["", "causal() and ", "q - kv < 40 or "])
def test_masks_by_blocks_of_keys(check, place, dim, size, beside):
    torch.manual_seed(size)
    for q_size in (1, 64):
        table = torch.rand(4, LENGTH, -(-LENGTH // size), device="cuda") < 0.4
        text = f"{HEAD}{beside}m[h, q // {q_size}, kv // {size}]"
        inputs = check.inputs(place, torch.bfloat16, dim=dim, kv_heads=2, captures={"m": table})
        check(place, text, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_scores_by_blocks_of_keys(check, place, dim):
    table = torch.randn(4, LENGTH, 5, device="cuda")
    text = "tensor t[heads, q_len, n]: float; mask = causal(); score = score + t[h, q, kv // 64]"
    inputs = check.inputs(place, torch.bfloat16, dim=dim, captures={"t": table})
    check(place, text, inputs)
