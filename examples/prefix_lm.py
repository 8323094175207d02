"""Prefix LM: every query sees the first n keys. Each call passes `n`, a run-time param."""

import attndsl

from picture import compare, draw, weights

PROGRAM = """
param n: int
prefix_lm(n)
"""


def main():
    attention = attndsl.compile(PROGRAM)
    for n in (5, 12):
        draw(weights(attention, 20, n=n), f"prefix_lm(n), n={n}")
        compare(attention, 100, live=lambda b, h, q, kv, n=n: (q >= kv) | (kv < n), n=n)


if __name__ == "__main__":
    main()
