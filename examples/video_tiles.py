"""Sparse attention over tiles of a video (VSA, arXiv 2505.13389): coarse weights choose tiles.

Rows are ordered so that a tile of the video is a run of rows. Means of tiles attend to one another
first; each tile then attends to the rows of the tiles that weigh most, and a gate adds both.
"""

import torch

import attndsl

from picture import draw, weights

PROGRAM = """
param size: int
tensor chosen[batch, heads, tiles, n]: int
mask = kv // size in chosen[b, h, q // size, :]
"""
FRAMES, HEIGHT, WIDTH, SIDE, TOP = 4, 8, 8, 4, 3


def by_tiles(video):
    """Rows (batch, heads, frames * height * width, dim), tile after tile of SIDE x SIDE x SIDE."""
    parts = video.unflatten(2, (FRAMES // SIDE, SIDE, HEIGHT // SIDE, SIDE, WIDTH // SIDE, SIDE))
    return parts.permute(0, 1, 2, 4, 6, 3, 5, 7, 8).flatten(2, 7)


class VideoSparseAttention(torch.nn.Module):
    """Attention of rows in the order of tiles, (batch, heads, length, dim)."""

    def __init__(self, dim):
        super().__init__()
        self.size = SIDE**3
        self.gate = torch.nn.Linear(dim, dim)
        self.fine = attndsl.compile(PROGRAM, size=self.size)
        self.coarse = attndsl.compile("score")

    def chosen(self, q, k):
        """Tiles of each tile and head, (batch, heads, tiles, TOP)."""
        means = [x.unflatten(2, (-1, self.size)).mean(3) for x in (q, k)]
        return self.coarse.weights(*means).topk(TOP).indices

    def forward(self, q, k, v):
        """The rows of chosen tiles, and what means of tiles see, by a gate."""
        coarse = self.coarse(*(x.unflatten(2, (-1, self.size)).mean(3) for x in (q, k, v)))
        with torch.no_grad():
            chosen = self.chosen(q, k)
        coarse = coarse.repeat_interleave(self.size, 2)
        return self.fine(q, k, v, chosen=chosen) + self.gate(q) * coarse


def dense(layer, q, k, v):
    """The same in plain torch, with a mask of all pairs."""
    means = [x.unflatten(2, (-1, layer.size)).mean(3) for x in (q, k, v)]
    tile = torch.arange(q.shape[2]) // layer.size
    listed = layer.chosen(q, k)[:, :, tile][..., None, :] == tile[:, None]
    found = []
    for (queries, keys, values), live in (((q, k, v), listed.any(-1)), (means, torch.tensor(True))):
        score = (queries @ keys.mT / q.shape[3] ** 0.5).masked_fill(~live, -torch.inf)
        found.append(score.softmax(-1) @ values)
    return found[0] + layer.gate(q) * found[1].repeat_interleave(layer.size, 2)


def main():
    torch.manual_seed(0)
    layer = VideoSparseAttention(16)
    length = FRAMES * HEIGHT * WIDTH
    q, k, v = (by_tiles(torch.randn(2, 3, length, 16)).requires_grad_() for _ in range(3))
    small = attndsl.compile(PROGRAM, size=4)
    few = torch.tensor([[1, 3, 4], [0, 1, 2], [2, 4, 5], [0, 3, 5], [1, 4, 5], [0, 2, 5]])
    draw(weights(small, 24, chosen=few[None, None]), "three of six tiles of 4 rows")
    out, wanted = layer(q, k, v), dense(layer, q, k, v)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, wanted)]
    pairs = [(out, wanted), *zip(*grads, strict=True)]
    worst = max(float((one - other).detach().abs().max()) for one, other in pairs)
    print(f"\nlargest difference to plain torch, outputs and gradients: {worst:.1e}")
    assert worst < 1e-4


if __name__ == "__main__":
    main()
