"""ALiBi: a penalty that grows with distance, at a different rate per head (arXiv 2108.12409)."""

import torch

import attndsl

from picture import compare, draw, weights

PROGRAM = """
mask  = causal()
score = score - exp2(-8 * (h + 1) / heads) * (q - kv)
"""


def main():
    attention = attndsl.compile(PROGRAM)
    found = weights(attention, 20, heads=8)
    for head in (0, 3):
        draw(found[head], f"head {head} of 8")

    def score(s, b, h, q, kv):
        return s - torch.exp2(-8 * (h + 1) / 4) * (q - kv)

    compare(attention, 100, score=score, live=lambda b, h, q, kv: q >= kv)


if __name__ == "__main__":
    main()
