"""Attention by torch's own softmax, and calls to compare it on."""

from __future__ import annotations

import torch

from attndsl.backends.base import Call
from attndsl.call.argument_checks import sizes_of

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN, DIM, VALUE_DIM = 2, 4, 2, 9, 7, 5, 6


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def make_call(
    tensors=None, params=None, dims=None, dtype=torch.float64, leaves=None, scale=0.4, **options
):
    if leaves is None:
        leaves = (
            draw(BATCH, HEADS, Q_LEN, DIM, dtype=dtype),
            draw(BATCH, KV_HEADS, KV_LEN, DIM, dtype=dtype),
            draw(BATCH, KV_HEADS, KV_LEN, VALUE_DIM, dtype=dtype),
        )
    q, k, v = leaves
    return Call(
        q, k, v, scale, sizes_of(q, k) | (dims or {}), tensors or {}, params or {}, **options
    )


def by_hand(call, change=lambda s: s, live=None, sink=None):
    """Softmax attention by torch; ``live`` without dead rows."""
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (call.k, call.v))
    score = change(call.q @ k.mT * call.scale)
    if live is not None:
        score = score.masked_fill(~live, -torch.inf)
    if sink is not None:
        score = torch.cat([score, sink.expand(*score.shape[:-1], 1)], -1)
    weights = score.softmax(-1)[..., : k.shape[2]]
    return weights @ v, score.logsumexp(-1)


def exact(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
