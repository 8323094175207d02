"""ALiBi with learned slopes: each head learns how far back to look.

The task is to predict a decaying mean of earlier values, at another rate in each head.
"""

import torch

import attndsl

from picture import draw, fit, weights

PROGRAM = """
tensor slope[heads]: float
mask  = causal()
score = score - exp(slope[h]) * (q - kv)
"""
LENGTH, RATES = 24, torch.tensor([0.05, 0.2, 0.8, 1.6])


def train(backend):
    """The slopes that were learned, and the mean loss of the last steps."""
    torch.manual_seed(0)
    attention = attndsl.compile(PROGRAM, backend=backend)
    slope = torch.full_like(RATES, -1.0).requires_grad_()
    back = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    decay = torch.exp(-RATES[:, None, None] * back).tril()
    decay = decay / decay.sum(-1, keepdim=True)

    def loss():
        values = torch.randn(4, len(RATES), LENGTH, 4)
        zeros = torch.zeros(4, len(RATES), LENGTH, 8)
        return (attention(zeros, zeros, values, slope=slope) - decay @ values).square().mean()

    found = fit({"slope": slope}, loss)
    return slope.detach().exp(), found


def main():
    learned, loss = train("auto")
    _, reference = train("reference")
    found = weights(attndsl.compile(PROGRAM), LENGTH, len(RATES), slope=learned.log())
    draw(found[0], "the head that looks far")
    for rate, slope in zip(RATES.tolist(), learned.tolist(), strict=True):
        print(f"rate {rate:.2f}: learned {slope:.2f}")
    print(f"\nloss {loss:.1e}")
    print(f"difference to the reference backend's loss: {abs(loss - reference):.1e}")
    assert loss < 5e-4
    assert abs(loss - reference) < 1e-6


if __name__ == "__main__":
    main()
