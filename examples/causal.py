"""Causal: a query sees the keys up to its own position. The program is one expression."""

import attndsl

from picture import compare, draw, weights

PROGRAM = "q >= kv"


def main():
    attention = attndsl.compile(PROGRAM)
    draw(weights(attention, 20), PROGRAM)
    compare(attention, 100, live=lambda b, h, q, kv: q >= kv)


if __name__ == "__main__":
    main()
