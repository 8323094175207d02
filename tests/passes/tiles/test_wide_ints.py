"""Ints are 64 bits and wrap: no plan takes them for anything else."""

from __future__ import annotations

import sys

import pytest
import torch
from support.brute import call_of, lowered_of, true_kinds

import attndsl
from attndsl.backends.tiled.tile_kinds import grid_of, kinds_by_bounds, segment_kinds, wide_ints
from attndsl.inspection.tile_search import find_tiles
from attndsl.passes.tiles.tile_plan import BACKWARD_KV, DIRECTIONS, EMPTY, FORWARD, FULL

LEAST, MOST = -sys.maxsize - 1, sys.maxsize
BY_PARAM = [
    "kv < n", "q >= kv and q - kv < n", "kv + n > q", "n - kv > q", "abs(n) < q", "-n < q",
    "n // -1 < q", "q * n > kv", "(q - kv) << n > 5", "q // 16 >= n and kv != n",
    "max(q, n) - kv > 3", "n * n > q", "n + 1 > kv", "n * 64 - kv < q", "(q - kv) * n // 7 < 9",
]  # fmt: skip
VALUES = [LEAST, -(1 << 47), -(1 << 31) - 1, -(1 << 31), (1 << 31) - 1, 1 << 31, 1 << 62, MOST]
LITERAL = [
    f"q + {MOST} > kv", f"kv < {MOST}", f"sliding_window({MOST})", f"q * {1 << 62} > kv",
    "(q << 20 << 20 << 20) > kv", "q - kv < 5000000000", f"(q - kv) + {1 << 62} + {1 << 62} > 0",
]  # fmt: skip
TABLES = {
    "lengths": "tensor t[batch]: int\nmask = kv < t[b] + q",
    "differences": "tensor t[kv_len]: int\nmask = t[q] - t[kv] > 5",
    "sums": "tensor t[kv_len]: int\nmask = abs(t[q] + t[kv]) < 9",
    "products": "tensor t[kv_len]: int\nmask = t[q] * t[kv] > 0",
    "quotients": "tensor t[kv_len]: int\nmask = (t[q] - t[kv]) // -1 >= 0",
    "truncation": "tensor t[kv_len]: int\nmask = int(float(t[q]) * 4.0 - float(kv)) > 0",
}


def check(text: str, **captures: torch.Tensor | int) -> None:
    """All loops and bounds against every pair, at two sizes of tiles."""
    lowered = lowered_of(text)
    call = call_of(lowered, 70, 70, batch=2, **captures)
    for block_m, block_n in [(16, 32), (13, 7)]:
        wanted = true_kinds(lowered, call, block_m, block_n)
        grid = grid_of(call, block_m, block_n)
        maps = [(kinds_by_bounds(lowered.sparsity, grid), lowered.sparsity.evaluate)]
        for direction in DIRECTIONS.values():
            loop = lowered.sparsity.loop(direction, block_m, block_n, False, False, wide_ints(call))
            exact = loop.listed is None or lowered.sparsity.evaluate
            kinds = find_tiles(lowered, call, block_m, block_n, direction.name).kinds
            maps.append((kinds, exact))
            if loop.listed is None:
                used = segment_kinds(loop, direction, grid, wanted.shape[:2])
                maps.append((used if direction.along == "kv" else used.transpose(2, 3), False))
        for found, exact in maps:
            assert not ((found == EMPTY) & (wanted != EMPTY)).any()
            assert not ((found == FULL) & (wanted != FULL)).any()
            assert not exact or torch.equal(found, wanted)


@pytest.mark.parametrize("mask", BY_PARAM)
def test_params_near_the_ends_of_64_bits(mask: str) -> None:
    for value in VALUES:
        check(f"param n: int\nmask = {mask}", n=value)


@pytest.mark.parametrize("mask", ["(n + h) % 64 > 0", "(q + n) % 64 > kv_len", "(n + h) // 8 < q"])
@pytest.mark.parametrize("value", [-70, -64, 5, 64])
def test_remainders_of_sums_with_params(mask: str, value: int) -> None:
    check(f"param n: int\nmask = {mask}", n=value)


@pytest.mark.parametrize("mask", LITERAL)
def test_large_literals(mask: str) -> None:
    check(f"mask = {mask}")


@pytest.mark.parametrize("name", TABLES)
def test_large_entries(name: str) -> None:
    wild = torch.tensor([*VALUES, 0, 3, -5]).repeat(7)[:70]
    values = wild[:2] if name == "lengths" else wild
    check(TABLES[name], t=values)
    check(TABLES[name], t=values // (1 << 50))


@pytest.mark.parametrize("mask", ["kv < n", "q >= kv and q - kv < n", f"sliding_window({MOST})"])
def test_no_window_keeps_the_closed_form(mask: str) -> None:
    captures = {"n": MOST} if "n)" not in mask and " n" in mask else {}
    attention = attndsl.compile(f"param n: int\nmask = {mask}" if captures else f"mask = {mask}")
    assert attention.tiles(300, 300, 64, 64, **captures).reason == "in closed form"


def test_ints_of_32_bits_need_no_guard() -> None:
    sparsity = lowered_of("param n: int\nmask = kv + n > q").sparsity
    for direction in (FORWARD, BACKWARD_KV):
        narrow = sparsity.loop(direction, 64, 64, False, False)
        wide = sparsity.loop(direction, 64, 64, False, False, frozenset({"n"}))
        assert narrow.within is None
        assert wide.within is not None
        assert len(wide.partial) == len(narrow.partial) + 1


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize(
    "text",
    [
        "param n: int\nmask = kv < n and kv + n > q",
        "param n: int\ntensor t[kv_len]: int\nmask = q - kv < n and t[q] + n >= t[kv]",
    ],
)
def test_calls_with_and_without_a_map_agree(backend: str, text: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 70, 16)
    attention = attndsl.compile(text, backend=backend)
    for value in (MOST, LEAST):
        captures = {"n": value, "t": torch.arange(70) // 9}
        if "tensor" not in text:
            del captures["t"]
        wanted = attndsl.compile(text, backend="reference")(x, x, x, **captures)
        tiles = attention.tiles(70, 70, 32, 32, **captures)
        torch.testing.assert_close(attention(x, x, x, **captures), wanted)
        torch.testing.assert_close(attention(x, x, x, tiles=tiles, **captures), wanted)
