"""One program for many calls: kernels contain only the parts that a call uses.

Padding, documents, a soft cap and a bias are declared with `= none`. Each call says by its
arguments which of them it has. The bias is one for all heads: size 1 along a declared dim.
"""

import torch

import attndsl

from picture import compare, draw, weights

PROGRAM = """
param cap: float = none
tensor pad[batch, kv_len]: bool = none
tensor doc[batch, kv_len]: int = none
tensor bias[heads, q_len, kv_len]: float = none
mask = causal() and pad[b, kv]
mask = doc[b, q] == doc[b, kv]
score = softcap(score, cap)
score = score + bias[h, q, kv]
"""


def main():
    attention = attndsl.compile(PROGRAM)
    plain = attndsl.compile("causal()")
    doc = (torch.arange(20) // 8)[None]
    pad = torch.arange(20)[None] < 16
    draw(weights(attention, 20), "nothing is given: causal")
    draw(weights(attention, 20, doc=doc, pad=pad), "documents of 8, and 16 keys that count")

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 100, 32) for _ in range(3))
    same = torch.equal(attention(q, k, v, pad=None), plain(q, k, v))
    print(f"\nwithout any of them it is the causal program, bit for bit: {same}")
    if not same:
        raise SystemExit("the programs differ")

    bias = torch.randn(1, 100, 100)
    pad = torch.arange(100) < torch.tensor([100, 70])[:, None]

    def score(s, b, h, q, kv):
        return 2 * torch.tanh(s / 2) + bias[0, q, kv]

    def live(b, h, q, kv):
        return (q >= kv) & pad[b, kv]

    compare(attention, 100, score=score, live=live, cap=2.0, pad=pad, bias=bias)


if __name__ == "__main__":
    main()
