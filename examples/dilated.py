"""Dilated: every d-th key of a long window (Longformer, arXiv 2004.05150); d differs between heads.

An `if` on the head joins two patterns in one program.
"""

import torch

import attndsl

from picture import compare, draw, weights

PROGRAM = """
step = 1 if h < heads // 2 else 4
mask = 0 <= q - kv < 6 * step and (q - kv) % step == 0
"""


def main():
    attention = attndsl.compile(PROGRAM)
    found = weights(attention, 26, heads=2)
    draw(found[0], "the first half of the heads: 6 keys, one by one")
    draw(found[1], "the second half: 6 keys, 4 apart")

    def live(b, h, q, kv):
        step = torch.where(h < 2, 1, 4)
        return (q >= kv) & (q - kv < 6 * step) & ((q - kv) % step == 0)

    compare(attention, 100, live=live)


if __name__ == "__main__":
    main()
