"""A learned sink: a head that finds nothing can return nearly zero (GPT-OSS; arXiv 2309.17453).

Each query looks for earlier tokens of its own kind and should give the mean of their values, or
zero where there is none. A softmax alone always sums to one, so that a query with no match gives
the mean of everything.
"""

import torch

import attndsl

from picture import draw, fit

SINKS = """
tensor logit[heads]: float
param heat: float
mask  = kv < q
score = heat * score
sink  = logit[h]
"""
SOFTMAX = "param heat: float; mask = kv < q; score = heat * score"
KINDS, LENGTH, HEADS = 12, 20, 2


def tokens():
    """Random tokens as unit vectors, random values, and the outputs to learn."""
    kinds = torch.eye(KINDS)[torch.randint(KINDS, (8, HEADS, LENGTH))]
    values = torch.randn(8, HEADS, LENGTH, 4)
    same = (kinds @ kinds.mT).tril(-1)
    return kinds, values, same @ values / same.sum(-1, keepdim=True).clamp_min(1)


def train(text, backend):
    """The learned tensors, and the mean loss of the last steps."""
    torch.manual_seed(0)
    attention = attndsl.compile(text, backend=backend)
    learned = {"heat": torch.tensor(1.0, requires_grad=True)}
    if "logit" in text:
        learned["logit"] = torch.zeros(HEADS, requires_grad=True)

    def loss():
        kinds, values, expected = tokens()
        return (attention(kinds, kinds, values, scale=1.0, **learned) - expected).square().mean()

    found = fit(learned, loss)
    return {n: x.detach() for n, x in learned.items()}, found


def main():
    learned, loss = train(SINKS, "auto")
    _, reference = train(SINKS, "reference")
    _, without = train(SOFTMAX, "auto")
    kinds = torch.eye(KINDS)[torch.arange(LENGTH) % KINDS].expand(1, HEADS, LENGTH, KINDS)
    units = torch.eye(LENGTH).expand(1, HEADS, LENGTH, LENGTH)
    found = attndsl.compile(SINKS)(kinds, kinds, units, scale=1.0, **learned)[0, 0]
    draw(torch.cat([1 - found.sum(-1, keepdim=True), found], -1), "the sink, then the keys")
    print(f"\nloss with a sink {loss:.4f}, without {without:.4f}")
    print(f"difference to the reference backend's loss: {abs(loss - reference):.1e}")
    assert loss < without / 5
    assert abs(loss - reference) < 1e-4


if __name__ == "__main__":
    main()
