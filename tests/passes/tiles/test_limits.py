"""isl's limit on operations ends a derivation with a reason, and leaves the process whole."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from support.brute import lowered_of

from attndsl.passes.tiles.tile_plan import DIRECTIONS, FORWARD

# Each derivation ends at another operation. The lists between them find a broken heap.
_DERIVE = """
import sys
from attndsl.passes.tiles import closed_form
from attndsl.passes.tiles.tile_plan import DIRECTIONS
from attndsl.pipeline import lower
from attndsl.source import Source

sparsity = lower(Source("mask = block_diffusion(13, 3)"), {}).sparsity
for limit in map(int, sys.argv[1:]):
    closed_form.MAX_OPERATIONS = limit
    closed_form.closed_segments.cache_clear()
    sparsity.loop(DIRECTIONS["backward_kv"], 7, 5, False, False)
    rest = [[None] * size for size in range(1500)]
print("whole")
"""


def test_the_limit_leaves_the_heap_whole() -> None:
    command = [sys.executable, "-c", _DERIVE, "50000", "100000", "200000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-500:]


@pytest.mark.parametrize(
    "mask",
    [
        "causal()", "causal_lower_right()", "sliding_window(1024)", "prefix_lm(1024)",
        "local_window(256)", "dilated(2048, 4)", "strided(512, 512)", "block_diagonal(1024)",
        "block_causal(1024)", "natten2d(128, 64, 13, 13)", "global_tokens(64)",
        "block_diffusion(4096, 64)", "sta2d(64, 64, 8, 1)",
        "abs(q // 128 - kv // 128) <= 6 and abs(q % 128 - kv % 128) <= 6",
        "q >= kv and (q - kv < 4096 or kv < 4)",
    ],
)  # fmt: skip
@pytest.mark.parametrize("tiles", [(128, 64), (64, 128), (128, 128)])
def test_usual_masks_have_a_closed_form_in_every_direction(
    mask: str, tiles: tuple[int, int]
) -> None:
    lowered = lowered_of(f"mask = {mask}")
    for direction in DIRECTIONS.values():
        loop = lowered.sparsity.loop(direction, *tiles, False, False)
        assert loop.listed is None, (direction.name, loop.listed)


@pytest.mark.parametrize(
    "mask",
    ["causal()", "sliding_window(1024)", "local_window(256)", "prefix_lm(1024)", "dilated(64, 4)"],
)
def test_offsets_leave_usual_masks_their_closed_form(mask: str) -> None:
    lowered = lowered_of(f"mask = {mask}")
    for direction in DIRECTIONS.values():
        assert lowered.sparsity.loop(direction, 128, 64, True, False).listed is None


_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
_HARD = {
    "nested": "(" * 8
    + "q - kv"
    + "".join(f") % {1000 - 7 * i} + q // {i + 2}" for i in range(8))
    + " > 5",
    "and": " and ".join(f"(q + {i}) % {p} <= (kv * {i + 1}) % {p}" for i, p in enumerate(_PRIMES)),
    "or": " or ".join(f"(q - kv) % {p} == 0" for p in _PRIMES),
    "large": "(q * 1048573 + kv * 1048571) % 1048559 < (q * 1048549 - kv * 1048517) % 1048507",
    "two": "((q // 100) % 12) < kv",
    "one": "q % 1000 < kv",
    "bits": "(((kv + h) >> 7) & 255) != ((kv + 32) % 6)",
    "offsets": "(kv % 3 - kv % 64) < q % 2414 or kv > q - kv",
    "factor": "kv % 5 <= q - kv * 927459",
}
"""Masks on which isl spent seconds or minutes in one call, in which nothing interrupts it."""


@pytest.mark.parametrize("name", _HARD)
def test_hard_masks_are_given_up_soon(name: str) -> None:
    lowered = lowered_of(f"mask = {_HARD[name]}")
    for shifted in (False, True):
        for direction in DIRECTIONS.values():
            begin = time.process_time()
            lowered.sparsity.loop(direction, 64, 128, shifted, False)
            assert time.process_time() - begin < 1.0, (direction.name, shifted)


def test_names_of_params_do_not_matter_to_bounds() -> None:
    lowered = lowered_of("param w99999999a: int\nmask = q - kv < w99999999a and q >= kv")
    assert lowered.sparsity.loop(FORWARD, 128, 64, False, False).listed is None
