"""Kernels draw for a part of a call what they draw for the whole."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.backends.base import Backward, Call, Draws, Wants
from attndsl.backends.dense.philox import kept_at
from attndsl.backends.emit.dropout_offsets import kinds_of_draws, why_pairs
from attndsl.call.argument_checks import sizes_of
from attndsl.call.dispatch import get_backend
from attndsl.pipeline import lower
from attndsl.source import Source

P = 0.4
LOWERED = lower(Source(f"weights = dropout(softmax(score), {P})"), {})
LEARNED = lower(
    Source(
        """
        tensor gain[heads]: float
        tensor bias[q_len, kv_len]: float
        tensor table[n]: float
        tensor near[n]: float
        score = gain[h] * score + bias[q, kv] + table[(q * kv) % n] + near[abs(q - kv) % n]
        weights = dropout(softmax(score), 0.4)
        """
    ),
    {},
)
HEADS, B_OFFSET, H_OFFSET = 5, 2, 3
STARTS = {
    "whole blocks": (32, 128),
    "rows within blocks": (37, 128),
    "keys within blocks": (16, 9),
    "positions": (None, None),
    "positions of queries": (None, 256),
    "positions of keys": (21, None),
}


def part(device, start, q_offset=0, kv_offset=0, index=False, **captures) -> Call:
    """All weights are equal, and the values name the keys."""
    q = torch.zeros(1, 2, 24, 16, device=device)
    k = torch.zeros(1, 2, 16, 16, device=device)
    v = torch.eye(16, device=device).expand(1, 2, 16, 16)
    call = Call(q, k, v, 1.0, sizes_of(q, k), captures, seed=11)
    draws = Draws(HEADS, B_OFFSET, H_OFFSET, *start)
    if index:
        positions = {
            "q_index": q_offset + 3 * torch.arange(24, device=device),
            "kv_index": kv_offset + torch.arange(16, device=device) ** 2,
        }
    else:
        positions = {"q_offset": torch.tensor(q_offset, device=device), "kv_offset": kv_offset}
    return call._replace(draws=draws, **positions)


def kept(call: Call) -> torch.Tensor:
    """Which of the call's pairs are kept, by the rows and keys of the whole."""
    draws = call.draws
    sides = (
        (draws.q_start, call.q_offset, call.q_index, call.q.shape[2]),
        (draws.kv_start, call.kv_offset, call.kv_index, call.k.shape[2]),
    )
    places = []
    for start, offset, index, length in sides:
        if start is not None:
            places.append(start + torch.arange(length))
        elif index is not None:
            places.append(index.cpu())
        else:
            places.append(int(offset) + torch.arange(length))
    rows, keys = places
    numbers = B_OFFSET * HEADS + H_OFFSET + torch.arange(2)[None]
    probability = torch.full((1, 2, 1, 1), P)
    all_pairs = kept_at(
        call.seed, probability, numbers, (0, int(rows.max()) + 1), (0, int(keys.max()) + 1)
    )
    return all_pairs[:, :, rows][..., keys]


@pytest.mark.parametrize("index", [False, True], ids=["offsets", "indices"])
@pytest.mark.parametrize("name", STARTS)
def test_a_part_draws_what_the_whole_draws(device, name, index):
    call = part(device, STARTS[name], q_offset=7, kv_offset=5, index=index)
    out, _ = get_backend("triton").forward(LOWERED, call)
    assert torch.equal(out.cpu() > 0, kept(call))


@pytest.mark.parametrize("name", ["whole blocks", "keys within blocks"])
def test_gradients_of_a_part(device, name):
    call = part(device, STARTS[name])
    q, k, v = (torch.randn(x.shape, device=device) for x in (call.q, call.k, call.v))
    shapes = {"gain": (2,), "bias": (24, 16), "table": (5,), "near": (5,)}
    captures = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    sizes = {**call.sizes, "n": 5}
    call = call._replace(q=q, k=k, v=v, sizes=sizes, tensors=captures, q_offset=0)
    inputs = {"q": q, "k": k, "v": v, **captures}
    leaves = {n: x.double().cpu().requires_grad_() for n, x in inputs.items()}
    rows, columns = torch.arange(24)[:, None], torch.arange(16)
    score = leaves["gain"][:, None, None] * (leaves["q"] @ leaves["k"].mT)
    score = score + leaves["bias"] + leaves["table"][rows * columns % 5]
    score = score + leaves["near"][(rows - columns).abs() % 5]
    wanted = (score.softmax(-1) * kept(call) / (1 - P)) @ leaves["v"]
    pull = torch.randn(wanted.shape, device=device)
    wanted.backward(pull.double().cpu())

    backend = get_backend("triton")
    out, lse = backend.forward(LEARNED, call)
    wants = Wants(tensors=frozenset(captures))
    found = backend.backward(LEARNED, call, Backward(out, lse, pull, None, wants))
    grads = {"q": found.q, "k": found.k, "v": found.v, **found.tensors}
    torch.testing.assert_close(out.cpu().double(), wanted.detach(), rtol=1e-4, atol=1e-4)
    for n, leaf in leaves.items():
        torch.testing.assert_close(grads[n].cpu().double(), leaf.grad, rtol=1e-3, atol=1e-4)


def test_what_kernels_of_blocks_do_not_draw():
    blocks, rows, positions = (
        part("cpu", STARTS[name]) for name in ("whole blocks", "rows within blocks", "positions")
    )
    assert why_pairs(blocks) is None
    assert why_pairs(blocks._replace(draws=None)) is None
    assert "begins within one" in why_pairs(rows)
    assert "the device alone" in why_pairs(positions)
    assert kinds_of_draws(positions) == ("position", "position")


@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_texts_of_whole_calls_know_of_no_parts(direction, backend):
    text = attndsl.compile(f"weights = dropout(softmax(score), {P})").source(
        direction, head_dim=64, backend=backend
    )
    assert "given.draws_" not in text
    assert "drop_of_part(" not in text
    assert "kept_pairs_of_part(" not in text
    assert "number = head.b * sizes.heads + head.h\n" in text
