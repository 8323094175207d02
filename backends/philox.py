"""Dropout's generator, Philox in torch integers: every backend drops the same pairs.

Algorithm: J. Salmon, M. Moraes, R. Dror, D. Shaw, Parallel Random Numbers: As Easy as 1, 2, 3
(SC 2011), figure 4, section 3 and table 2, by which 2x32 of 7 rounds passes BigCrush; constants
from the authors' Random123 library.

Layout, which every backend reproduces. Let ``i`` be the pair's *row* of q, ``j`` its *row* of k,
``b`` and ``h`` its batch entry and query head (rows of the tensors, not logical positions, which
``q_index`` may repeat). Words are modulo 2^32.

- Of each head: words ``w0, w1`` are the first of Philox-4x32-10 with counter
  ``(b * heads + h, 0, 0, 0)`` and key ``(seed mod 2^32, (seed // 2^32) mod 2^32)``.
- Four pairs share a counter, those of rows 8 apart and of keys 8 apart: with ``place(i) =
  i // 16 * 8 + i % 8``, Philox-2x32-7 has counter ``(w0 + place(i), w1 + place(j))`` and key
  ``seed mod 2^32``.
- Of its two words the pair has number ``i // 8 % 2``, and of this the lower half where
  ``j // 8 % 2`` is 0, else the upper one: ``draw``, of 16 bits.
- ``u = (draw + 1/2) * 2^-16``, exact in fp32, in (0, 1);
- the pair is kept where ``u >= p``, with ``p`` rounded to fp32 first.

Nothing depends on tile sizes, on the number of keys or on the dtype of q. Rows and keys 8 apart are
what one thread holds of a product's tile on Nvidia's tensor cores, and of the tile's transpose,
which the backward has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_MULTIPLIER_OF_TWO = 0xD256D193
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_ROUNDS_OF_TWO = 7
_LOW = 0xFFFFFFFF
_BLOCK = 16
"""Rows and keys after which the places in a block start again."""

Word = int | torch.Tensor
"""0..2^32-1; tensors are int64 and broadcast."""


def philox4x32(
    counter: Sequence[torch.Tensor], key: tuple[Word, Word]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four random words from four counter words, in 10 rounds.

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


def philox2x32(
    counter: tuple[torch.Tensor, torch.Tensor], key: Word
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two random words from two counter words, in 7 rounds; arguments as of :func:`philox4x32`."""
    c0, c1 = counter
    for _ in range(_ROUNDS_OF_TWO):
        high, low = _multiply(_MULTIPLIER_OF_TWO, c0)
        c0, c1 = high ^ key ^ c1, low
        key = (key + _WEYL[0]) & _LOW
    return c0, c1


def uniform(
    seed: int | torch.Tensor,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device,
    first_row: int = 0,
) -> torch.Tensor:
    """``u`` of every pair: fp32 (batch, heads, q_len, kv_len) in (0, 1), of 16 bits.

    The rows are ``first_row`` and those that follow.
    """
    numbers = torch.arange(batch * heads, device=device).reshape(batch, heads)
    return uniform_at(seed, numbers, (first_row, first_row + q_len), (0, kv_len))


def uniform_at(
    seed: int | torch.Tensor,
    numbers: torch.Tensor,
    rows: tuple[int, int],
    columns: tuple[int, int],
) -> torch.Tensor:
    """``u`` of the pairs of some rows and keys.

    Args:
        seed: A number, or a 0-d int64 tensor.
        numbers: ``b * heads + h``, int64 (batch, heads).
        rows: The first row of q, and the one after the last.
        columns: The first row of k, and the one after the last.

    Returns:
        fp32 (batch, heads, rows, columns).
    """
    zero = torch.zeros_like(numbers)
    key = seed & _LOW, (seed >> 32) & _LOW
    w0, w1, *_ = (
        word[..., None, None] for word in philox4x32((numbers & _LOW, zero, zero, zero), key)
    )
    row_places, rows_before = _places(*rows, numbers.device)
    column_places, columns_before = _places(*columns, numbers.device)
    counter = (w0 + row_places[:, None]) & _LOW, (w1 + column_places) & _LOW
    words = torch.stack(philox2x32(counter, key[0]), dim=-1)
    draws = torch.stack((words & 0xFFFF, words >> 16), dim=-1)
    shape = *numbers.shape, len(row_places) // 8, 8, len(column_places) // 8, 8, 2, 2
    whole = draws.reshape(shape).permute(0, 1, 2, 6, 3, 4, 7, 5).flatten(5, 7).flatten(2, 4)
    whole = whole.narrow(2, rows_before, rows[1] - rows[0])
    whole = whole.narrow(3, columns_before, columns[1] - columns[0])
    return (whole.to(torch.float32) + 0.5) * 2.0**-16


def _places(start: int, stop: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Places of whole blocks that reach from ``start`` to ``stop``, and by how much too early."""
    first, last = start // _BLOCK, max(-(-stop // _BLOCK), start // _BLOCK)
    return torch.arange(first * 8, last * 8, device=device), start - first * _BLOCK


def _multiply(factor: int, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low words of 32 x 32 bit products; int64 wraps, and its bits are those of uint64."""
    product = words * factor
    return (product >> 32) & _LOW, product & _LOW
