"""Sliding window: the last `window` keys. `compile` binds the window by name."""

import attndsl

from picture import compare, draw, weights

PROGRAM = "causal() and q - kv < window"


def main():
    for window in (4, 9):
        attention = attndsl.compile(PROGRAM, window=window)
        draw(weights(attention, 20), f"{PROGRAM}, window={window}")
        compare(attention, 100, live=lambda b, h, q, kv, w=window: (q >= kv) & (q - kv < w))


if __name__ == "__main__":
    main()
