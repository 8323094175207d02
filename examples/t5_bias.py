"""T5's relative bias (arXiv 1910.10683): one learned number per head and distance bucket.

Near distances have buckets of their own, and far distances share buckets. The task is to predict
the mean of the last values: 3 values in the first head, 8 in the second.
"""

import torch

import attndsl

from picture import draw, fit, weights

PROGRAM = """
param buckets: int = 16
param longest: int = 32
tensor table[heads, buckets]: float
mask  = causal()
score = score + table[h, t5_bucket_causal(q - kv, buckets, longest)]
"""
LENGTH, REACH, BUCKETS = 32, (3, 8), 16


def train(backend):
    """The table that was learned, and the mean loss of the last steps."""
    torch.manual_seed(0)
    attention = attndsl.compile(PROGRAM, backend=backend)
    table = torch.zeros(len(REACH), BUCKETS, requires_grad=True)
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    near = torch.stack([((back >= 0) & (back < reach)).float() for reach in REACH])
    near = near / near.sum(-1, keepdim=True)

    def loss():
        values = torch.randn(4, len(REACH), LENGTH, 4)
        zeros = torch.zeros(4, len(REACH), LENGTH, 8)
        return (attention(zeros, zeros, values, table=table) - near @ values).square().mean()

    found = fit({"table": table}, loss)
    return table.detach(), found


def main():
    learned, loss = train("auto")
    _, reference = train("reference")
    found = weights(attndsl.compile(PROGRAM), LENGTH, len(REACH), table=learned)
    draw(found[1], "the head of 8")
    for head, row in enumerate((learned - learned[:, :1]).tolist()):
        print(f"head {head}: " + " ".join(f"{value:5.1f}" for value in row))
    print(f"\nloss {loss:.1e}")
    print(f"difference to the reference backend's loss: {abs(loss - reference):.1e}")
    assert loss < 1e-3
    assert abs(loss - reference) < 1e-6


if __name__ == "__main__":
    main()
