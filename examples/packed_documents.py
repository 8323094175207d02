"""Documents packed into one sequence, with causal attention inside each document.

`doc[b, q]` is the number of the document that a position belongs to.
"""

import torch

import attndsl

from picture import compare, draw, weights

PROGRAM = """
tensor doc[batch, kv_len]: int
mask = q >= kv and doc[b, q] == doc[b, kv]
"""


def packed(*lengths):
    """Document numbers of documents of these lengths."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def main():
    attention = attndsl.compile(PROGRAM)
    draw(weights(attention, 20, doc=packed(6, 3, 11)[None]), "documents of 6, 3 and 11")
    doc = torch.stack([packed(40, 60), packed(10, 80, 10)])

    def live(b, h, q, kv):
        return (q >= kv) & (doc[b, q] == doc[b, kv])

    compare(attention, 100, live=live, doc=doc)


if __name__ == "__main__":
    main()
