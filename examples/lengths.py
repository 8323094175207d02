"""Sequences of different lengths in one batch: one length per entry instead of a padding mask."""

import torch

import attndsl

from picture import compare, draw, weights

PROGRAM = """
tensor lengths[batch]: int
mask = causal() and kv < lengths[b] and q < lengths[b]
"""


def main():
    attention = attndsl.compile(PROGRAM)
    for length in (20, 12):
        draw(weights(attention, 20, lengths=torch.tensor([length])), f"an entry of length {length}")
    lengths = torch.tensor([100, 37])

    def live(b, h, q, kv):
        return (q >= kv) & (kv < lengths[b]) & (q < lengths[b])

    compare(attention, 100, live=live, lengths=lengths)
    q = k = v = torch.randn(2, 1, 100, 16)
    out, lse = attention(q, k, v, lengths=lengths, return_lse=True)
    print(f"beyond a length: output {out[1, 0, 60].abs().max():.0f}, lse {lse[1, 0, 60]:.0f}")


if __name__ == "__main__":
    main()
