"""Masks that are not quasi-affine: no live pair in an EMPTY tile, no dead one in a FULL one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.brute import call_of, lowered_of, true_kinds

from attndsl.backends.tiled.tile_kinds import grid_of, kinds_by_bounds, kinds_by_segments, resample
from attndsl.passes.tiles.sparsity import EVALUATION, SCORES, SETS, SUMMARIES
from attndsl.passes.tiles.tile_plan import DIRECTIONS, EMPTY, FULL

LENGTH = 150
CASES = {
    "documents": "tensor t[kv_len]: int\nmask = t[q] == t[kv]",
    "causal documents": "tensor t[kv_len]: int\nmask = q >= kv and t[q] == t[kv]",
    "thresholds": "tensor f[kv_len]: float\nmask = f[q] + 0.25 > f[kv] * 1.5",
    "exponentials": "tensor f[kv_len]: float\nmask = exp(f[q]) - tanh(f[kv]) > 1.0",
    "flags": "tensor g[kv_len]: bool\nmask = g[q] or not g[kv]",
    "float distances": "mask = float(q - kv) * 0.5 < 7.25",
}
BY_ENTRY = {
    "lengths": "tensor n[batch]: int\nmask = kv < n[b]",
    "prefixes": "tensor n[batch]: int\nmask = q >= kv or (q <= n[b] and kv <= n[b])",
    "windows by head": "tensor n[heads]: int\nmask = abs(q - kv) < n[h]",
    "every other head": "mask = q >= kv or h % 2 == 0",
    "a flag a batch entry": "tensor n[batch]: bool\nmask = q >= kv or n[b]",
}
EVALUATED = {
    "bits": "mask = ((q ^ kv) & 48) == 0",
    "morton": "mask = (q & 21) == (kv & 21) and ((q | kv) & 64) == 0",
    "gather": "tensor m[q_len, kv_len]: bool\nmask = m[q, kv]",
    "gather of a difference": "tensor r[2 * kv_len]: int\nmask = r[q - kv + kv_len] > 2",
    "product": "mask = q * kv % 7 == 0 and q >= kv",
    "power": "mask = (q - kv) ** 2 < 400",
    "local in documents": "tensor t[kv_len]: int\ntensor o[9]: int\n"
    "mask = t[q] == t[kv] and q - o[t[q]] >= kv - o[t[kv]] and q - kv < 20",
    "division by a param": "param w: int\nmask = q // w == kv // w and (q % w) >= (kv % w)",
}


def _captures(text: str, seed: int, sort: bool) -> dict[str, torch.Tensor | int]:
    torch.manual_seed(seed)
    ids = torch.randint(0, 9, (LENGTH,))
    made: dict[str, torch.Tensor | int] = {
        "t": ids.sort().values if sort else ids,
        "o": torch.randint(0, LENGTH, (9,)),
        "f": torch.randn(LENGTH).sort().values if sort else torch.randn(LENGTH),
        "g": torch.rand(LENGTH) < 0.1,
        "m": torch.rand(LENGTH, LENGTH) < 0.01,
        "r": torch.randint(0, 9, (2 * LENGTH,)),
        "w": 13,
    }
    shape = (2,) if "[batch]" in text else (3,)
    made["n"] = torch.randint(1, LENGTH, shape)
    return made


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_summaries_are_sound(name: str, sort: bool) -> None:
    lowered = lowered_of(CASES[name])
    assert not lowered.sparsity.evaluate
    empty = 0
    for seed, (block_m, block_n) in enumerate([(16, 16), (32, 64), (128, 16)]):
        call = call_of(
            lowered, LENGTH, LENGTH, batch=2, heads=3, **_captures(CASES[name], seed, sort)
        )
        found = kinds_by_bounds(lowered.sparsity, grid_of(call, block_m, block_n))
        wanted = true_kinds(lowered, call, block_m, block_n)
        assert not ((found == EMPTY) & (wanted != EMPTY)).any()
        assert not ((found == FULL) & (wanted != FULL)).any()
        empty += int((found == EMPTY).sum())
    if sort and name in ("documents", "causal documents", "thresholds"):
        assert empty > 0


def test_sorted_documents_are_exact() -> None:
    lowered = lowered_of(CASES["documents"])
    call = call_of(lowered, LENGTH, LENGTH, t=torch.arange(LENGTH) // 31)
    found = kinds_by_bounds(lowered.sparsity, grid_of(call, 16, 16))
    assert torch.equal(found, true_kinds(lowered, call, 16, 16))


@pytest.mark.parametrize("name", BY_ENTRY)
def test_entries_of_tables_are_parameters_of_closed_forms(name: str) -> None:
    lowered = lowered_of(BY_ENTRY[name])
    captures = _captures(BY_ENTRY[name], 0, False)
    if "bool" in BY_ENTRY[name]:
        captures["n"] = torch.tensor([True, False])
    call = call_of(lowered, LENGTH, LENGTH, batch=2, heads=3, **captures)
    grid = grid_of(call, 32, 16)
    wanted = true_kinds(lowered, call, 32, 16)
    for direction in DIRECTIONS.values():
        loop = lowered.sparsity.loop(direction, 32, 16, False, False)
        assert loop.listed is None
        found = kinds_by_segments(loop, direction, lowered.sparsity, grid)
        assert torch.equal(found, wanted), direction.name


@pytest.mark.parametrize("name", EVALUATED)
def test_evaluated_masks_are_exact(name: str) -> None:
    lowered = lowered_of(EVALUATED[name])
    assert lowered.sparsity.evaluate
    call = call_of(lowered, LENGTH, LENGTH, **_captures(EVALUATED[name], 0, False))
    for block_m, block_n in [(16, 16), (64, 32)]:
        found = kinds_by_bounds(lowered.sparsity, grid_of(call, block_m, block_n))
        assert torch.equal(found, true_kinds(lowered, call, block_m, block_n))


def test_nan_decides_nothing() -> None:
    lowered = lowered_of("tensor f[kv_len]: float\nmask = f[q] > f[kv] or not (f[kv] <= 0.0)")
    values = torch.randn(LENGTH)
    values[::7] = torch.nan
    values[3], values[80] = torch.inf, -torch.inf
    call = call_of(lowered, LENGTH, LENGTH, f=values)
    found = kinds_by_bounds(lowered.sparsity, grid_of(call, 4, 4))
    wanted = true_kinds(lowered, call, 4, 4)
    assert not ((found == EMPTY) & (wanted != EMPTY)).any()
    assert not ((found == FULL) & (wanted != FULL)).any()


def test_a_mask_of_scores_leaves_its_tiles_partial() -> None:
    lowered = lowered_of("mask = q >= kv and score > 0.5")
    call = call_of(lowered, 64, 64)
    found = kinds_by_bounds(lowered.sparsity, grid_of(call, 16, 16))[0, 0]
    assert torch.equal(found, torch.ones(4, 4, dtype=torch.int8).tril())


def test_atoms_say_which_way_they_took() -> None:
    lowered = lowered_of(
        "tensor t[kv_len]: int\n"
        "mask = q >= kv and t[q] == t[kv] and ((q ^ kv) & 4) == 0 and score < 9.0"
    )
    ways = [atom.way for atom in lowered.sparsity.atoms]
    assert ways == [SETS, SUMMARIES, EVALUATION, SCORES]
    assert all(bool(a.reason) == (a.way != SETS) for a in lowered.sparsity.atoms)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([0, 0, 1, 2]), min_size=24, max_size=24),
    st.sampled_from([(1, 1), (2, 3), (3, 2), (4, 8), (5, 1)]),
    st.sampled_from([(1, 1), (2, 3), (3, 2), (7, 4)]),
)
def test_resampled_kinds_are_sound(
    values: list[int], old: tuple[int, int], new: tuple[int, int]
) -> None:
    # Pairs of old tiles: PARTIAL ones are live in their first pair only.
    kinds = torch.tensor(values, dtype=torch.int8).reshape(1, 1, 4, 6)
    lengths = 4 * old[0] - (old[0] > 1), 6 * old[1] - (old[1] > 1)
    pairs = torch.zeros(4 * old[0], 6 * old[1], dtype=torch.bool)
    for i in range(4):
        for j in range(6):
            tile = pairs[i * old[0] : (i + 1) * old[0], j * old[1] : (j + 1) * old[1]]
            tile[:] = kinds[0, 0, i, j] == FULL
            tile[0, 0] = kinds[0, 0, i, j] != EMPTY
    pairs = pairs[: lengths[0], : lengths[1]]
    found = resample(kinds, old, new, lengths)[0, 0]
    for i in range(found.shape[0]):
        for j in range(found.shape[1]):
            tile = pairs[i * new[0] : (i + 1) * new[0], j * new[1] : (j + 1) * new[1]]
            assert found[i, j] != EMPTY or not tile.any()
            assert found[i, j] != FULL or tile.all()
