"""Native sparse attention (NSA, arXiv 2502.11089): three branches, and gates that weigh them.

Each query sees means of earlier blocks of keys, the whole blocks whose means weigh most, and its
latest keys. Query heads of one key head share their blocks, so that these are read once.
"""

import torch

import attndsl

from picture import draw, weights

SELECTED = """
param size: int
tensor chosen[batch, kv_heads, q_len, n]: int
mask = causal() and kv // size in chosen[b, hkv, q, :]
"""
COMPRESSED = "param size: int; mask = (kv + 1) * size <= q + 1"
LATEST = "param window: int; mask = sliding_window(window)"


class NativeSparseAttention(torch.nn.Module):
    """Attention of (batch, heads, length, dim), whose length is a multiple of ``size``."""

    def __init__(self, dim, size=8, top=3, window=12):
        super().__init__()
        self.gates = torch.nn.Linear(dim, 3)
        self.size, self.top, self.window = size, top, window
        self.compressed = attndsl.compile(COMPRESSED, size=size)
        self.selected = attndsl.compile(SELECTED, size=size)
        self.latest = attndsl.compile(LATEST, window=window)

    def chosen(self, q, means):
        """Numbers of blocks, (batch, kv heads, length, top): the own one, and the heaviest ones."""
        heavy = self.compressed.weights(q, means).unflatten(1, (means.shape[1], -1)).sum(2)
        own = (torch.arange(q.shape[2]) // self.size)[:, None]
        heavy = torch.where(own == torch.arange(means.shape[2]), torch.inf, heavy)
        return heavy.topk(min(self.top, means.shape[2])).indices

    def forward(self, q, k, v):
        """The branches' outputs, each by a gate of its own."""
        means, mean_values = (x.unflatten(2, (-1, self.size)).mean(3) for x in (k, v))
        with torch.no_grad():
            chosen = self.chosen(q, means)
        outputs = [
            self.compressed(q, means, mean_values), self.selected(q, k, v, chosen=chosen),
            self.latest(q, k, v),
        ]  # fmt: skip
        return (torch.stack(outputs, -1) * self.gates(q).sigmoid()[..., None, :]).sum(-1)


def dense(layer, q, k, v):
    """The same in plain torch, with a mask of all pairs for each branch."""
    length, size, group = q.shape[2], layer.size, q.shape[1] // k.shape[1]
    means, mean_values = (x.unflatten(2, (-1, size)).mean(3) for x in (k, v))
    i, j = torch.arange(length)[:, None], torch.arange(length)
    block = torch.arange(length // size)
    listed = layer.chosen(q, means).repeat_interleave(group, 1)[..., None, :] == j[:, None] // size
    branches = [
        (means, mean_values, (block + 1) * size <= i + 1),
        (k, v, (j <= i) & listed.any(-1)),
        (k, v, (j <= i) & (i - j < layer.window)),
    ]
    found = []
    for keys, values, live in branches:
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        score = (q @ keys.mT / q.shape[3] ** 0.5).masked_fill(~live, -torch.inf)
        found.append(score.softmax(-1).nan_to_num(0.0) @ values)
    return (torch.stack(found, -1) * layer.gates(q).sigmoid()[..., None, :]).sum(-1)


def main():
    torch.manual_seed(0)
    layer = NativeSparseAttention(16)
    q, k, v = (torch.randn(2, heads, 64, 16, requires_grad=True) for heads in (4, 2, 2))
    means = k.detach().unflatten(2, (-1, layer.size)).mean(3)
    chosen = layer.chosen(q.detach(), means)
    draw(weights(layer.selected, 64, heads=2, chosen=chosen[:1]), "selected blocks of one key head")
    out, wanted = layer(q, k, v), dense(layer, q, k, v)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, wanted)]
    pairs = [(out.detach(), wanted), *zip(*grads, strict=True)]
    worst = max(float((one - other).detach().abs().max()) for one, other in pairs)
    print(f"\nlargest difference to plain torch, outputs and gradients: {worst:.1e}")
    assert worst < 1e-4


if __name__ == "__main__":
    main()
