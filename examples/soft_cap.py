"""Gemma 2's local layers: soft-capped scores and a sliding window (arXiv 2408.00118)."""

import torch

import attndsl

from picture import compare, draw, weights

PROGRAM = """
param window: int
param cap: float = 50.0
mask  = causal() and q - kv < window
score = cap * tanh(score / cap)
"""


def main():
    attention = attndsl.compile(PROGRAM, window=8)
    draw(weights(attention, 20), "the mask: causal, window 8")
    print("\nscore -> capped score, cap 2.0")
    for score in (0.5, 2.0, 8.0, 100.0):
        # With one pair, the log-sum-exp is the score itself.
        q, k = torch.full((1, 1, 1, 1), score), torch.ones(1, 1, 1, 1)
        _, capped = attention(q, k, k, scale=1.0, cap=2.0, return_lse=True)
        print(f"  {score:6.1f} -> {capped.item():.4f}")
    compare(
        attention,
        100,
        score=lambda s, b, h, q, kv: 50 * torch.tanh(s / 50),
        live=lambda b, h, q, kv: (q >= kv) & (q - kv < 8),
    )


if __name__ == "__main__":
    main()
