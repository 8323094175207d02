"""Sparse attention with an indexer (DSA, DeepSeek V3.2): each query has a list of tokens.

A small attention of its own, the indexer, gives each earlier token a number. The layer's heads then
attend to the tokens with the largest ones, and all of them share the list.
"""

import torch

import attndsl

from picture import draw, weights

PROGRAM = """
tensor chosen[tokens, n]: int
mask = causal() and kv in chosen[token, :]
"""
HEADS, DIM, INDEX_HEADS, INDEX_DIM, TOP = 4, 16, 2, 8, 12


class Indexer(torch.nn.Module):
    """The indexer: scores of earlier tokens by a few small heads."""

    def __init__(self, width):
        super().__init__()
        self.queries = torch.nn.Linear(width, INDEX_HEADS * INDEX_DIM)
        self.keys = torch.nn.Linear(width, INDEX_DIM)
        self.weights = torch.nn.Linear(width, INDEX_HEADS)

    def forward(self, rows):
        """Tokens of each query: (batch * length, TOP), -1 where there are fewer."""
        q = self.queries(rows).unflatten(-1, (INDEX_HEADS, INDEX_DIM))
        products = torch.einsum("bqhd,bkd->bqhk", q, self.keys(rows)).relu()
        score = torch.einsum("bqhk,bqh->bqk", products, self.weights(rows))
        later = torch.ones(score.shape[1:], dtype=torch.bool).triu(1)
        found = score.masked_fill(later, -torch.inf).topk(min(TOP, rows.shape[1]))
        return torch.where(found.values > -torch.inf, found.indices, -1).flatten(0, 1)


class SparseAttention(torch.nn.Module):
    """A layer whose heads attend to the indexer's tokens."""

    def __init__(self, width):
        super().__init__()
        self.indexer = Indexer(width)
        self.rows = torch.nn.Linear(width, 3 * HEADS * DIM)
        self.out = torch.nn.Linear(HEADS * DIM, width)
        self.attention = attndsl.compile(PROGRAM)

    def forward(self, rows):
        """Rows (batch, length, width) to rows."""
        q, k, v = self.rows(rows).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
        with torch.no_grad():
            chosen = self.indexer(rows)
        return self.out(self.attention(q, k, v, chosen=chosen).transpose(1, 2).flatten(2))


def dense(layer, rows):
    """The same in plain torch, with a mask of all pairs."""
    q, k, v = layer.rows(rows).unflatten(-1, (3, HEADS, DIM)).permute(2, 0, 3, 1, 4)
    length = rows.shape[1]
    listed = layer.indexer(rows).view(-1, 1, length, 1, TOP) == torch.arange(length)[:, None]
    live = listed.any(-1) & torch.ones(length, length, dtype=torch.bool).tril()
    out = (q @ k.mT / DIM**0.5).masked_fill(~live, -torch.inf).softmax(-1) @ v
    return layer.out(out.transpose(1, 2).flatten(2))


def main():
    torch.manual_seed(0)
    layer, rows = SparseAttention(32), torch.randn(2, 40, 32)
    chosen = layer.indexer(rows[:1])
    draw(weights(layer.attention, 40, chosen=chosen), f"{TOP} tokens of each query")
    found, wanted = layer(rows), dense(layer, rows)
    difference = float((found - wanted).detach().abs().max())
    print(f"\nlargest difference to plain torch: {difference:.1e}")
    assert difference < 1e-5


if __name__ == "__main__":
    main()
