"""Helpers of the examples: text pictures of weights, attention by plain torch, a training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attndsl import Attention

SHADES = " .:-=+*#%@"


def weights(attention: Attention, length: int, heads: int = 1, **captures: Any) -> torch.Tensor:
    """Weights where all raw scores are equal, (heads, length, length).

    Values are unit vectors, so that outputs are weights.
    """
    zeros = torch.zeros(1, heads, length, 4)
    units = torch.eye(length).expand(1, heads, length, length)
    return attention(zeros, zeros, units, **captures)[0]


def draw(weights: torch.Tensor, title: str) -> None:
    """Print the weights of a head (the first of several), a row for each query.

    The darkest character of a row is its largest weight.
    """
    print(f"\n{title}")
    for row in weights if weights.dim() == 2 else weights[0]:
        top = float(row.max())
        levels = [1 + round(w / top * (len(SHADES) - 2)) if w > 0 else 0 for w in row.tolist()]
        print("  |" + "".join(2 * SHADES[level] for level in levels) + "|")


def compare(
    attention: Attention,
    length: int,
    score: Callable[..., Any] = lambda s, b, h, q, kv: s,
    live: Callable[..., Any] = lambda b, h, q, kv: torch.tensor(True),
    batch: int = 2,
    heads: int = 4,
    **captures: Any,
) -> None:
    """Print how far ``attention`` is from the same thing in plain torch, and fail if it is far.

    Args:
        attention: The compiled program.
        length: Of queries and keys.
        score: The score of a pair, from ``s = q . k / sqrt(dim)`` and the pair's place.
        live: Whether a pair takes part.
        batch: Batch size.
        heads: Heads of q, k and v.
        **captures: Given to ``attention``.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, heads, length, 32) for _ in range(3))
    place = [
        torch.arange(n).reshape([-1 if i == dim else 1 for i in range(4)])
        for dim, n in enumerate((batch, heads, length, length))
    ]
    dense = score(q @ k.mT / 32**0.5, *place)
    dense = torch.where(live(*place), dense, -torch.inf)
    # A row without any live pair is NaN here; the language defines it as 0.
    expected = torch.softmax(dense, -1).nan_to_num(0.0) @ v
    difference = float((attention(q, k, v, **captures) - expected).abs().max())
    print(f"\nlargest difference to plain torch, length {length}: {difference:.1e}")
    assert difference < 1e-5


def fit(
    learned: Mapping[str, torch.Tensor], loss: Callable[[], torch.Tensor], steps: int = 80
) -> float:
    """Change the tensors ``learned`` so that ``loss()`` falls; the mean of the last 20 losses."""
    optimizer = torch.optim.Adam(learned.values(), lr=0.2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        found = loss()
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return sum(losses[-20:]) / 20
