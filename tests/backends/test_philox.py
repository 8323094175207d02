"""Dropout's generator against published vectors, and what it must not depend on."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from attndsl.backends.dense.philox import ROTATIONS, keep_factor, kept, kept_at, philox4x32

SEED = 0x0123456789ABCDEF


def tensor(p: float) -> torch.Tensor:
    return torch.tensor(p, dtype=torch.float64)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "5f6fb709 0d893f64 4f121f81 4f730a48",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "5207ddc2 45165e59 4d8ee751 8c52f662",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "4dfccaba 190a87f0 c47362ba b6b5242a",
        ),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    words = [torch.tensor(int(word, 16)) for word in counter.split()]
    low, high = (int(word, 16) for word in key.split())
    found = [f"{int(word):08x}" for word in philox4x32(words, (low, high))]
    assert found == expected.split()


def draw_of(words: list[int], bit: int) -> int:
    """A pair's draw, from the four words of its block."""

    def bit_of(word: int, place: int) -> int:
        return word >> place % 32 & 1

    draw = sum(bit_of(word, bit) << 4 + number for number, word in enumerate(words))
    for number, rotations in enumerate(ROTATIONS):
        found = 0
        for step, rotation in enumerate(rotations, start=1):
            found ^= bit_of(words[(number + step) % 4], bit - rotation)
        draw |= found << number
    return draw


@pytest.mark.parametrize("p", [0.1, 0.5, 0.77, 0.999])
def test_layout_of_counters_and_bits(p):
    """The layout is a promise to every backend: pairs are looked at here one at a time."""
    found = kept(SEED, tensor(p), (2, 3, 37, 301))
    assert (found.shape, found.dtype) == ((2, 3, 37, 301), torch.bool)
    scaled = 256 * float(torch.tensor(p, dtype=torch.float32))
    least = math.floor(scaled)
    of_head = {}
    for b, h, i, j in itertools.product((0, 1), (0, 2), (0, 7, 9, 18, 36), (0, 5, 77, 140, 300)):
        if (b, h) not in of_head:
            seed = SEED % 2**32, SEED // 2**32
            words = philox4x32((torch.tensor(b * 3 + h), 0, *seed))
            begin, *_ = philox4x32((torch.tensor(b * 3 + h), 1, *seed))
            of_head[b, h] = *map(int, words), int(begin)
        w0, w1, w2, w3, v = of_head[b, h]
        row, key, m = i // 16 * 8 + i % 8, j // 128 * 8 + j % 8, j // 8 % 16
        counter = (w0 + row) % 2**32, (w1 + key) % 2**32, w2, w3
        words = [int(word) for word in philox4x32([torch.tensor(word) for word in counter])]
        u = (v + row * 0xC13FA9A9 + key * 0x91E10DA5) % 2**32
        t = least + (u < (scaled - least) * 2**32)
        bit = 8 * (m % 4) + 4 * (m // 8) + 2 * (m // 4 % 2) + i // 8 % 2
        assert found[b, h, i, j].item() == (draw_of(words, bit) >= t)


def test_any_three_draws_of_a_block_are_independent():
    """Their 24 bits are sums of the words' 128 bits of which no sum is 0."""
    draws = []
    for bit in range(32):
        sums = [1 << 32 * number + bit for number in range(4)]
        for number, rotations in enumerate(ROTATIONS):
            total = 0
            for step, rotation in enumerate(rotations, start=1):
                total ^= 1 << 32 * ((number + step) % 4) + (bit - rotation) % 32
            sums.append(total)
        draws.append(sums)
    for others in itertools.combinations(range(1, 32), 2):
        # Rotated words make the same sums: one of the three may be the first.
        reduced: dict[int, int] = {}
        for value in draws[0] + draws[others[0]] + draws[others[1]]:
            while value.bit_length() in reduced:
                value ^= reduced[value.bit_length()]
            assert value
            reduced[value.bit_length()] = value


def test_pairs_do_not_depend_on_the_size_of_the_call():
    p = tensor(0.3)
    whole = kept(7, p, (2, 2, 33, 270))
    assert torch.equal(kept(7, p, (1, 2, 20, 13)), whole[:1, :, :20, :13])
    part = kept_at(7, p, torch.tensor([[3]]), (9, 31), (117, 240))
    assert torch.equal(part, whole[1:, 1:, 9:31, 117:240])
    assert torch.equal(kept(7, p, (2, 2, 13, 270), first_row=20), whole[:, :, 20:])


def test_rows_and_keys_by_their_numbers():
    p, heads = torch.tensor(0.4), torch.tensor([[0, 1], [2, 3]])
    whole = kept(7, p, (2, 2, 33, 270))
    rows, keys = torch.tensor([32, 0, 7, 7]), torch.arange(100, 270, 3)
    assert torch.equal(kept_at(7, p, heads, rows, (0, 270)), whole[:, :, rows])
    assert torch.equal(kept_at(7, p, heads, (3, 20), keys), whole[:, :, 3:20, keys])
    assert torch.equal(kept_at(7, p, heads, rows, keys), whole[:, :, rows][..., keys])
    before = kept_at(7, p, heads, (-5, 3), (-9, 4))
    assert torch.equal(before[:, :, 5:, 9:], whole[:, :, :3, :4])
    assert torch.equal(kept_at(7, p, heads, torch.arange(-5, 3), torch.arange(-9, 4)), before)


def test_seeds_differ_and_repeat():
    p, shape = tensor(0.5), (1, 1, 64, 128)
    first = kept(1, p, shape)
    assert torch.equal(first, kept(1, p, shape))
    for other in (2, -1, 1 + 2**32, 2**64 - 2):
        same = (kept(other, p, shape) == first).float().mean()
        assert abs(same - 0.5) < 0.03


@pytest.mark.parametrize("p", [1e-4, 0.001, 0.01, 0.1, 1 / 3, 0.5, 0.9, 0.999])
def test_as_many_are_dropped_as_were_asked_for(p):
    """Not as the nearest of 257 probabilities has it."""
    found = torch.cat([~kept(seed, tensor(p), (2, 4, 256, 512)) for seed in range(8)])
    deviation = math.sqrt(p * (1 - p) / found.numel())
    assert abs(found.double().mean() - p) < 5 * deviation


def test_what_is_dropped_does_not_tell_of_others():
    p = 0.25
    found = (~kept(3, tensor(p), (2, 4, 256, 512))).double()
    n = found.numel()
    assert abs(found.mean(2) - p).max() < 5.5 * math.sqrt(p * (1 - p) / 256)
    assert abs(found.mean(3) - p).max() < 5.5 * math.sqrt(p * (1 - p) / 512)
    steps = (1, 2, 8, 16, 32, 64, 128)
    pairs = [(found[..., n:], found[..., :-n]) for n in steps]
    pairs += [(found[..., n:, :], found[..., :-n, :]) for n in steps]
    pairs += [(found[..., n:, n:], found[..., :-n, :-n]) for n in steps]
    pairs += [(found[1:], found[:-1]), (found[:, 1:], found[:, :-1])]
    for a, b in pairs:
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(n / 2)


def test_certain_probabilities():
    shape = (1, 2, 40, 200)
    everything = kept(5, tensor(0.0), shape)
    assert everything.all()
    assert torch.equal(keep_factor(everything, tensor(-0.5)), torch.ones(shape).double())
    assert not keep_factor(kept(5, tensor(1.0), shape), tensor(1.0)).any()


def test_empty_calls():
    assert kept(0, tensor(0.1), (1, 2, 3, 0)).shape == (1, 2, 3, 0)
    assert kept(0, tensor(0.1), (0, 2, 3, 4)).shape == (0, 2, 3, 4)
