"""A small decoder of bytes with random weights, and its plain use: one request at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

LAYERS = ("global", "local", "global")
WIDTH, HEADS, KV_HEADS, DIM, LONGEST, WINDOW = 64, 4, 2, 16, 512, 16


class Layer(nn.Module):
    """Attention and a feed-forward part, each added to what comes in."""

    def __init__(self) -> None:
        """Random weights."""
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.mlp = nn.Sequential(
            nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor, number: int, attend: Attend) -> torch.Tensor:
        """(tokens, WIDTH) to the same."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, DIM))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        x = x + self.out(attend(number, q, k, v).flatten(1))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """Bytes at positions to the logits of the bytes behind them."""

    def __init__(self) -> None:
        """Random weights."""
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in LAYERS)
        self.head = nn.Linear(WIDTH, 256)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """(tokens,) to (tokens, 256). ``attend`` takes a layer's number and rows of q, k and v."""
        x = self.bytes(tokens) + 0.3 * self.positions(positions)
        for number, layer in enumerate(self.layers):
            x = layer(x, number, attend)
        return self.head(x)


@torch.no_grad()
def plain(model: Decoder, prompt: bytes, count: int) -> bytes:
    """The most likely ``count`` bytes behind ``prompt``, by torch's attention over all bytes."""
    found = list(prompt)
    device = model.head.weight.device
    for _ in range(count):
        rows = torch.arange(len(found), device=device)
        far = rows[:, None] - rows

        def attend(
            number: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, far: torch.Tensor = far
        ) -> torch.Tensor:
            live = (far >= 0) & ((far < WINDOW) | (LAYERS[number] == "global"))
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            return functional.scaled_dot_product_attention(
                q, k.repeat_interleave(HEADS // KV_HEADS, 0),
                v.repeat_interleave(HEADS // KV_HEADS, 0), live,
            ).transpose(0, 1)  # fmt: skip

        logits = model(torch.tensor(found, device=device), rows, attend)
        found.append(int(logits[-1].argmax()))
    return bytes(found[len(prompt) :])
