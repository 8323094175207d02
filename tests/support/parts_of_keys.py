"""Calls whose keys are split, for tests of what puts them together."""

from __future__ import annotations

import re
from itertools import pairwise

import torch

PROGRAMS = {
    "nothing": "score",
    "causal": "causal()",
    "window": "causal() and q - kv < 9",
    "alibi": "mask = causal(); score = score + alibi()",
    "soft cap": "mask = causal(); score = softcap(score, 2.0)",
    "bias": "tensor t[heads, n, m]: float; mask = q + 3 >= kv; score = score + t[h, q, kv]",
    "gain": "tensor t[heads]: float; param a: float; score = t[h] * score + a * (q - kv)",
    "rows and columns": "tensor r[heads, n]: float; tensor t[heads, n]: float; mask = causal()"
    "; score = score + r[h, q] - t[h, kv]",
    "distances": "tensor t[heads, n]: float; mask = causal(); score = score + t[h, q - kv]",
    "rows without pairs": "kv < q - 5",
    "sink": "tensor t[heads]: float; mask = causal() and q - kv < 9; sink = t[h]",
    "sink of numbers": "mask = kv < q - 5; sink = 0.3 * h",
    "sink of all": "tensor t[batch, heads]: float; param a: float; score = a * score"
    "; sink = t[b, h] + a * heads",
}
LENGTH, WIDTH = 26, 16
CUTS = (0, 7, 7, 26)
"""Parts of keys; one has none."""


def captures_of(text, device, length=LENGTH):
    """Captures of a program, by their declared dims; ``heads`` and ``batch`` are 2."""
    found = {}
    sizes = {"heads": 2, "batch": 2, "n": length, "m": length}
    for name, dims in re.findall(r"tensor (\w+)\[([^\]]*)\]: float", text):
        shape = [sizes[dim] for dim in dims.split(", ")]
        found[name] = torch.randn(shape, device=device).requires_grad_()
    if "param a" in text:
        found["a"] = torch.tensor(0.6, device=device, requires_grad=True)
    return found


def parts_of(attention, operands, captures, cuts=CUTS, **options):
    q, k, v = operands
    return [
        attention(
            q, k[:, :, first:last], v[:, :, first:last], kv_offset=first, return_lse=True,
            **options, **captures,
        )
        for first, last in pairwise(cuts)
    ]  # fmt: skip


def operands_of(device, dtype=torch.float32):
    return [
        torch.randn(2, 2, LENGTH, WIDTH, device=device, dtype=dtype).requires_grad_()
        for _ in range(3)
    ]
