"""Combine a window with a mask function from other code: trace the function, then join both.

Libraries give masks as Python functions. `attndsl.trace` reads them as programs, and `attndsl.join`
adds to them, whatever names they use.
"""

import torch

import attndsl

from picture import compare, draw, weights

WINDOW = """
param near: int = 6
t0 = q - kv
mask = t0 < near or kv < 2
"""


def padded(starts):
    """A library's causal mask, with so many positions of padding before each row's text."""

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (kv_idx >= starts[b])

    return mask_mod


def main():
    starts = torch.tensor([4, 0])
    found = attndsl.trace(padded(starts))
    theirs = attndsl.compile(found.text, **found.captures)
    attention = attndsl.join(theirs, WINDOW)
    print(attention.text)
    draw(weights(attention, 20), "causal, 4 positions of padding, the last 6 keys and the first 2")

    def live(b, h, q, kv):
        return (q >= kv) & (kv >= starts[b]) & ((q - kv < 9) | (kv < 2))

    compare(attention, 100, live=live, near=9)


if __name__ == "__main__":
    main()
