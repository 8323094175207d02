"""A learned bias per head and distance. The backward pass computes its gradient.

The table starts at zero and learns what another program computes: ALiBi.
"""

import torch

import attndsl

from picture import draw, weights

PROGRAM = """
tensor table[heads, 2 * kv_len]: float
mask  = causal()
score = score + table[h, q - kv + kv_len]
"""
LENGTH, HEADS = 24, 2


def main():
    torch.manual_seed(0)
    student = attndsl.compile(PROGRAM)
    teacher = attndsl.compile("mask = causal(); score = score + alibi()")
    table = torch.zeros(HEADS, 2 * LENGTH, requires_grad=True)
    optimizer = torch.optim.Adam([table], lr=0.1)
    losses = []
    for _ in range(150):
        q, k, v = (torch.randn(4, HEADS, LENGTH, 16) for _ in range(3))
        loss = (student(q, k, v, table=table) - teacher(q, k, v)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    draw(weights(student, LENGTH, HEADS, table=table.detach())[0], "head 0, learned")
    draw(weights(teacher, LENGTH, HEADS)[0], "head 0, ALiBi")
    print(f"\nmean squared difference: {losses[0]:.1e} at first, {losses[-1]:.1e} now")
    assert losses[-1] < losses[0] / 100


if __name__ == "__main__":
    main()
