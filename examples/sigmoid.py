"""Sigmoid attention (arXiv 2409.04431): weights need not sum to one, so heads can count.

Each query counts the earlier tokens of its own kind. A softmax can only tell which these are.
"""

import torch

import attndsl

from picture import draw, fit

PROGRAM = """
tensor bias[heads]: float
param heat: float
mask    = kv < q
score   = heat * score + bias[h]
weights = sigmoid(score)
"""
SOFTMAX = "param heat: float; mask = kv < q; score = heat * score"
KINDS, LENGTH, HEADS = 6, 20, 2


def tokens():
    """Random tokens as unit vectors, and how many of the same kind come before each."""
    kinds = torch.eye(KINDS)[torch.randint(KINDS, (8, HEADS, LENGTH))]
    return kinds, (kinds @ kinds.mT).tril(-1).sum(-1, keepdim=True)


def train(text, backend):
    """The learned tensors, and the mean loss of the last steps."""
    torch.manual_seed(0)
    attention = attndsl.compile(text, backend=backend)
    learned = {"heat": torch.tensor(1.0, requires_grad=True)}
    if "bias" in text:
        learned["bias"] = torch.full((HEADS,), -3.0, requires_grad=True)

    def loss():
        kinds, counts = tokens()
        ones = torch.ones(*counts.shape)
        return (attention(kinds, kinds, ones, scale=1.0, **learned) - counts).square().mean()

    found = fit(learned, loss)
    return {n: x.detach() for n, x in learned.items()}, found


def main():
    learned, loss = train(PROGRAM, "auto")
    _, reference = train(PROGRAM, "reference")
    _, softmax = train(SOFTMAX, "auto")
    kinds = torch.eye(KINDS)[torch.arange(LENGTH) % KINDS].expand(1, HEADS, LENGTH, KINDS)
    units = torch.eye(LENGTH).expand(1, HEADS, LENGTH, LENGTH)
    found = attndsl.compile(PROGRAM)(kinds, kinds, units, scale=1.0, **learned)[0, 0]
    draw(found, f"weights of a sequence that repeats after {KINDS} tokens")
    count = float(found[-1].sum())
    print(f"\nthe last token counts {count:.2f} of its kind; there are {(LENGTH - 1) // KINDS}")
    print(f"loss with a sigmoid {loss:.4f}, with a softmax {softmax:.4f}")
    print(f"difference to the reference backend's loss: {abs(loss - reference):.1e}")
    assert loss < softmax / 20
    assert abs(loss - reference) < 1e-4


if __name__ == "__main__":
    main()
