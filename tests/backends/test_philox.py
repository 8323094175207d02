"""Dropout's generator against published vectors, and what it must not depend on."""

from __future__ import annotations

import math

import pytest
import torch

from attndsl.backends.philox import philox2x32, philox4x32, uniform, uniform_at

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        (
            "00000000 00000000 00000000 00000000",
            "00000000 00000000",
            "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ),
        (
            "ffffffff ffffffff ffffffff ffffffff",
            "ffffffff ffffffff",
            "408f276d 41c83b0e a20bc7c6 6d5451fd",
        ),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    words = [torch.tensor(int(word, 16)) for word in counter.split()]
    low, high = (int(word, 16) for word in key.split())
    found = [f"{int(word):08x}" for word in philox4x32(words, (low, high))]
    assert found == expected.split()


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000", "00000000", "257a3673 cd26be2a"),
        ("ffffffff ffffffff", "ffffffff", "ab302c4d 3dc9d239"),
        ("243f6a88 85a308d3", "13198a2e", "bedbbe6b e4c770b3"),
    ],
)
def test_known_answers_of_random123_for_two_words(counter, key, expected):
    first, second = (torch.tensor(int(word, 16)) for word in counter.split())
    found = [f"{int(word):08x}" for word in philox2x32((first, second), int(key, 16))]
    assert found == expected.split()


def test_layout_of_counter_and_key():
    """The layout is a promise to every backend: draws are picked here one pair at a time."""
    seed = 0x0123456789ABCDEF
    found = uniform(seed, 2, 3, 37, 45, CPU)
    assert (found.shape, found.dtype) == ((2, 3, 37, 45), torch.float32)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 4, 9), (1, 0, 13, 2), (0, 2, 31, 44), (1, 1, 36, 16)):
        of_head = [torch.tensor(word) for word in (b * 3 + h, 0, 0, 0)]
        w0, w1, *_ = map(int, philox4x32(of_head, (0x89ABCDEF, 0x01234567)))
        places = i // 16 * 8 + i % 8, j // 16 * 8 + j % 8
        counter = tuple(
            torch.tensor((w + p) % 2**32) for w, p in zip((w0, w1), places, strict=True)
        )
        word = int(philox2x32(counter, 0x89ABCDEF)[i // 8 % 2])
        draw = word // 2**16 if j // 8 % 2 else word % 2**16
        assert found[b, h, i, j].item() == (draw + 0.5) / 2**16


def test_pairs_do_not_depend_on_the_size_of_the_call():
    whole = uniform(7, 2, 2, 33, 41, CPU)
    assert torch.equal(uniform(7, 1, 2, 20, 13, CPU), whole[:1, :, :20, :13])
    part = uniform_at(7, torch.tensor([[3]]), (9, 31), (17, 40))
    assert torch.equal(part, whole[1:, 1:, 9:31, 17:40])


def test_seeds_differ_and_repeat():
    first = uniform(1, 1, 1, 64, 64, CPU)
    assert torch.equal(first, uniform(1, 1, 1, 64, 64, CPU))
    for other in (2, -1, 1 + 2**32, 2**64 - 2):
        assert (uniform(other, 1, 1, 64, 64, CPU) == first).float().mean() < 1e-3


def test_uniform_is_uniform():
    drawn = uniform(3, 2, 4, 128, 128, CPU).double()
    n = drawn.numel()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 5 / math.sqrt(12 * n)
    counts = torch.histc(drawn, bins=16, min=0, max=1)
    chi_squared = ((counts - n / 16) ** 2 / (n / 16)).sum()
    assert chi_squared < 45
    pairs = [(drawn[..., n:], drawn[..., :-n]) for n in (1, 8, 16)]
    pairs += [(drawn[..., n:, :], drawn[..., :-n, :]) for n in (1, 8, 16)]
    pairs += [(drawn[1:], drawn[:-1]), (drawn[:, 1:], drawn[:, :-1])]
    for a, b in pairs:
        correlation = torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]
        assert abs(correlation) < 5 / math.sqrt(n)


def test_empty_calls():
    assert uniform(0, 1, 2, 3, 0, CPU).shape == (1, 2, 3, 0)
    assert uniform(0, 0, 2, 3, 4, CPU).shape == (0, 2, 3, 4)
