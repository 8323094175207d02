"""Dropout's generator, Philox in torch integers: every backend drops the same pairs.

Algorithm: J. Salmon, M. Moraes, R. Dror, D. Shaw, Parallel Random Numbers: As Easy as 1, 2, 3
(SC 2011), figure 4, section 3 and table 2, by which 4x32 of 7 rounds passes BigCrush; constants
from the authors' Random123 library.

Layout, which every backend reproduces. Let ``i`` be the pair's *row* of q, ``j`` its *row* of k,
``b`` and ``h`` its batch entry and query head (rows of the tensors, not logical positions, which
``q_index`` may repeat), and ``n = b * heads + h``. Words are modulo 2^32.

- Of each head: words ``w0 ... w3`` are those of Philox-4x32-7 with counter
  ``(n, 0, seed mod 2^32, (seed // 2^32) mod 2^32)``, and ``v`` is the first where the counter's
  second word is 1. Keys are ``(0, 0)`` everywhere, so that what rounds add of them are constants.
- Thirty-two pairs share a counter, those of two rows 8 apart and of sixteen keys 8 apart: with
  ``row(i) = i // 16 * 8 + i % 8`` and ``key(j) = j // 128 * 8 + j % 8``, Philox-4x32-7 has counter
  ``(w0 + row(i), w1 + key(j), w2, w3)`` and gives words ``x0 ... x3``.
- A ``draw`` takes 8 bits, of which each word has one for each pair: of bits 4 to 7 these words, of
  bit ``k`` below 4 ``rotate(x[k + 1], r) ^ rotate(x[k + 2], s) ^ rotate(x[k + 3], t)``, indices
  modulo 4, to the left by ``r, s, t = ROTATIONS[k]``. The pair's bit is number
  ``8 * (m % 4) + 4 * (m // 8) + 2 * (m // 4 % 2) + i // 8 % 2`` from the lowest on, with
  ``m = j // 8 % 16``. So words decide on 32 pairs at a time.
- The pair is dropped where ``draw < t``. With ``p`` rounded to fp32, ``t`` is ``256 p`` rounded
  down or up, one of the two for all that share a counter: up where
  ``u < 2^32 * (256 p - floor(256 p))``, with ``u = v + row(i) * 0xC13FA9A9 + key(j) * 0x91E10DA5``.
  Where ``p`` is 1 nothing is left of what is kept.

Bits 0 to 3, which matter to one pair in 16, are sums of others' bits: half of Philox's work is
saved. Of uniform words, draws of any three pairs are independent, since the 24 sums modulo 2 that
they consist of are linearly independent; ROTATIONS were found by trying. A pair is dropped with
probability ``p``, not with the nearest of 257: ``u`` is uniform as ``v`` is. Over blocks it is
spread evenly: multiples of the plastic number's powers -1 and -2, the two-dimensional sequence of
M. Roberts, The Unreasonable Effectiveness of Quasirandom Sequences (2018). That pairs share a
``t``, those of a block and nearly those of blocks 16 rows on, makes the covariance of whether two
of them are dropped at most 2^-18.

Nothing depends on tile sizes, on the number of keys or on the dtype of q. Rows and keys 8 apart are
what one thread holds of a product's tile on Nvidia's tensor cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 7
ROTATIONS = ((21, 13, 26), (7, 4, 16), (1, 29, 27), (13, 14, 20))
"""By how many bits words are rotated, for each of the four lowest bits of draws."""
_SPREAD = (0xC13FA9A9, 0x91E10DA5)
_LOW = 0xFFFFFFFF
ROWS, KEYS = 16, 128
"""Rows and keys after which the places in a block start again."""

Word = int | torch.Tensor
"""0..2^32-1; tensors are int64 and broadcast."""
Rows = tuple[int, int] | torch.Tensor
"""The first row and the one after the last, or the number of each, int64."""


def philox4x32(
    counter: Sequence[Word], key: tuple[int, int] = (0, 0)
) -> tuple[Word, Word, Word, Word]:
    """Four random words from four counter words, in 7 rounds.

    Args:
        counter: Four numbers in 0..2^32-1, or int64 tensors of such that broadcast.
        key: Two numbers in 0..2^32-1.

    Returns:
        Four numbers or tensors in 0..2^32-1, of as few dims as they depend on.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def kept(
    seed: int | torch.Tensor, p: torch.Tensor, shape: Sequence[int], first_row: int = 0
) -> torch.Tensor:
    """Kept pairs of a call: bool of ``shape``, (batch, heads, q_len, kv_len).

    Args:
        seed: A number, or a 0-d int64 tensor.
        p: With what probability a pair is dropped: a float tensor on the call's device that
            broadcasts to (batch, heads, 1, 1).
        shape: The call's.
        first_row: Number of the first of these rows of q.
    """
    batch, heads, q_len, kv_len = shape
    numbers = torch.arange(batch * heads, device=p.device).reshape(batch, heads)
    return kept_at(seed, p, numbers, (first_row, first_row + q_len), (0, kv_len))


def kept_at(
    seed: int | torch.Tensor, p: torch.Tensor, numbers: torch.Tensor, rows: Rows, columns: Rows
) -> torch.Tensor:
    """Kept pairs of some rows and keys.

    Args:
        seed: A number, or a 0-d int64 tensor.
        p: As in :func:`kept`.
        numbers: ``b * heads + h``, int64 (batch, heads).
        rows: The rows of q.
        columns: The rows of k.

    Returns:
        bool (batch, heads, rows, columns).
    """
    if isinstance(rows, torch.Tensor) or isinstance(columns, torch.Tensor):
        return _kept_one_by_one(seed, p, numbers, rows, columns)
    row_places, rows_before = _places(*rows, ROWS, numbers.device)
    column_places, columns_before = _places(*columns, KEYS, numbers.device)
    kept = _kept_bits(seed, p, numbers, row_places[:, None], column_places)
    bits = [
        8 * (group % 4) + 4 * (group // 8) + 2 * (group // 4 % 2) + row
        for row in range(2)
        for group in range(16)
    ]
    blocks = *numbers.shape, len(row_places) // 8, 8, len(column_places) // 8, 8, 2, 16
    whole = torch.stack([kept >> bit & 1 == 1 for bit in bits], dim=-1).reshape(blocks)
    whole = whole.permute(0, 1, 2, 6, 3, 4, 7, 5).flatten(5, 7).flatten(2, 4)
    whole = whole.narrow(2, rows_before, rows[1] - rows[0])
    return whole.narrow(3, columns_before, columns[1] - columns[0])


def _kept_one_by_one(
    seed: int | torch.Tensor, p: torch.Tensor, numbers: torch.Tensor, rows: Rows, columns: Rows
) -> torch.Tensor:
    """Variant of :func:`kept_at` for any rows and keys: words are made for each pair."""
    i, j = (
        x if isinstance(x, torch.Tensor) else torch.arange(*x, device=numbers.device)
        for x in (rows, columns)
    )
    i, group = i[:, None], j // 8 % 16
    places = i // ROWS * 8 + i % 8, j // KEYS * 8 + j % 8
    bits = 8 * (group % 4) + 4 * (group // 8) + 2 * (group // 4 % 2) + i // 8 % 2
    return _kept_bits(seed, p, numbers, *places) >> bits & 1 == 1


def _kept_bits(
    seed: int | torch.Tensor,
    p: torch.Tensor,
    numbers: torch.Tensor,
    row_places: torch.Tensor,
    column_places: torch.Tensor,
) -> torch.Tensor:
    """Words of a bit for each of the 32 pairs that share a counter, 1 for those to keep."""
    of_head = numbers[..., None, None] & _LOW, 0, seed & _LOW, (seed >> 32) & _LOW
    word0, word1, word2, word3 = philox4x32(of_head)
    begin, *_ = philox4x32((of_head[0], 1, *of_head[2:]))
    counter = word0 + row_places & _LOW, word1 + column_places & _LOW, word2, word3
    upper = philox4x32(counter)
    planes = [*(_sum_of_rotated(upper, number) for number in range(4)), *upper]
    spread = begin + row_places * _SPREAD[0] + column_places * _SPREAD[1] & _LOW
    scaled = p.to(torch.float32).clamp(0.0, 1.0) * 256
    least = scaled.floor().clamp(max=255.0)
    rounded_up = spread < ((scaled - least) * 2.0**32).to(torch.int64)
    least = least.to(torch.int64)
    # Whether draws are ``t`` or more, from their lowest bits on.
    kept = torch.where(rounded_up, 0, _LOW)
    for number, plane in enumerate(planes):
        kept = torch.where(least >> number & 1 == 1, kept & plane, kept | plane)
    return kept


def _sum_of_rotated(words: Sequence[Word], number: int) -> Word:
    """The words' bits that are number ``number`` of draws."""
    total: Word = 0
    for step, rotation in enumerate(ROTATIONS[number], start=1):
        word = words[(number + step) % 4]
        total = total ^ (word << rotation & _LOW) ^ word >> 32 - rotation
    return total


def keep_factor(kept: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Factor of each weight that dropout with probability ``p`` gives: 0 or ``1 / (1 - p)``."""
    kept = kept & (p < 1)
    return torch.where(kept, 1 / torch.where(kept, 1 - p.clamp(min=0.0), 1.0), 0.0)


def _places(start: int, stop: int, block: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """Places of whole blocks that reach from ``start`` to ``stop``, and by how much too early."""
    first, last = start // block, max(-(-stop // block), start // block)
    return torch.arange(first * 8, last * 8, device=device), start - first * block


def _multiply(factor: int, words: Word) -> tuple[Word, Word]:
    """High and low words of 32 x 32 bit products; int64 wraps, and its bits are those of uint64."""
    product = words * factor
    return (product >> 32) & _LOW, product & _LOW
