"""Block diffusion training (BD3-LM, arXiv 2503.09573): noised positions, then clean positions.

A noised block sees itself and the clean blocks before it; clean blocks are block-causal.
"""

import torch

import attndsl

from picture import compare, draw, weights

PROGRAM = """
param n: int      # positions of each kind
param block: int
q_block  = (q if q < n else q - n) // block
kv_block = (kv if kv < n else kv - n) // block
noised   = q < n and kv < n and q_block == kv_block
crossing = q < n and kv >= n and q_block > kv_block
clean    = q >= n and kv >= n and q_block >= kv_block
mask     = noised or crossing or clean
"""


def main():
    attention = attndsl.compile(PROGRAM, n=12, block=4)
    draw(weights(attention, 24), "12 noised positions, 12 clean ones, blocks of 4")
    prelude = attndsl.compile("block_diffusion(n, block)", n=12, block=4)
    assert torch.equal(weights(attention, 24), weights(prelude, 24))

    def live(b, h, q, kv):
        block, other = q % 48 // 8, kv % 48 // 8
        noised, seen = q < 48, kv < 48
        return (
            (noised & seen & (block == other))
            | (noised & ~seen & (block > other))
            | (~noised & ~seen & (block >= other))
        )

    compare(attndsl.compile(PROGRAM, n=48, block=8), 96, live=live)


if __name__ == "__main__":
    main()
