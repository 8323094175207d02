"""Dropout's generator, Philox-4x32-10 in torch integers: every backend drops the same pairs.

Algorithm: J. Salmon, M. Moraes, R. Dror, D. Shaw, Parallel Random Numbers: As Easy as 1, 2, 3
(SC 2011), figure 4 and section 3; constants from the authors' Random123 library.

Layout, which every backend reproduces. For the pair at *row* ``i`` of q, *row* ``j`` of k, batch
``b``, query head ``h`` (rows of the tensors, not logical positions, which ``q_index`` may repeat):

- counter ``(j // 4, i, b * heads + h, 0)``, each word modulo 2^32;
- key ``(seed mod 2^32, (seed // 2^32) mod 2^32)``;
- the word used is number ``j % 4`` of the four that come out;
- ``u = (word >> 8) * 2^-24``, exact in fp32, in [0, 1);
- the pair is kept where ``u >= p``, with ``p`` rounded to fp32 first.

Nothing depends on tile sizes, on the number of keys or on the dtype of q.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox4x32(
    counter: Sequence[torch.Tensor], key: tuple[int | torch.Tensor, int | torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four random words from four counter words.

    Args:
        counter: Four int64 tensors in 0..2^32-1 that broadcast.
        key: Two numbers in 0..2^32-1, or 0-d int64 tensors of such.

    Returns:
        Four int64 tensors in 0..2^32-1.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniform(
    seed: int | torch.Tensor,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    first_row: int = 0,
) -> torch.Tensor:
    """``u`` of every pair: fp32 (batch, heads, q_len, kv_len) in [0, 1), multiples of 2^-24.

    The rows are ``first_row`` and those that follow.
    """

    def steps(count: int, *shape: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int64, device=device).reshape(shape) & _LOW

    fours = -(-kv_len // 4)
    counter = (
        steps(fours, 1, 1, fours),
        steps(q_len, 1, q_len, 1) + first_row,
        steps(batch * heads, batch * heads, 1, 1),
        torch.zeros((1, 1, 1), dtype=torch.int64, device=device),
    )
    words = torch.stack(philox4x32(counter, (seed & _LOW, (seed >> 32) & _LOW)), dim=-1)
    rows = words.reshape(batch, heads, q_len, fours * 4)[..., :kv_len]
    return (rows >> 8).to(torch.float32) * 2.0**-24


def _multiply(factor: int, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of 32 x 32 bit products; int64 wraps, and its bits are those of uint64."""
    product = words * factor
    return (product >> 32) & _LOW, product & _LOW
