"""Kernels give a part of a call what they give the whole."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from support.parts import (
    PROGRAMS,
    RAGGED,
    SPLITS,
    Sizes,
    entries_of,
    make_case,
    part_of_whole,
    parts_of,
    ragged_of,
    results,
    whole_of,
)

import attndsl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from support.parts import Case

SMALL = Sizes(batch=1, heads=2, kv_heads=2, q_len=20, kv_len=24)
LARGE = Sizes(q_len=768, kv_len=460, head_dim=64)
TILE = 384
"""Rows at which tiles of all kernels begin. Of the whole and of its halves they have one size."""
OTHER_TILES = {"global", "diffusion", "tiles"}
"""Programs whose plans for rows from any number on have other kinds of tiles, or lists: kernels may
take tiles of other sizes, or in another order."""
REDUCED = {"positions"}
"""Programs with sines of positions, whose short reduction kernels take without an offset alone."""
REPEATED = {"slopes"}
"""Programs whose scores grow so far along the keys that Hopper's forward does work tiles again. It
repeats all rows of one, and a call of few rows has smaller work tiles."""
CANCELS = {("slopes", "slope"): 5.0}
"""Times the tolerance of bf16. dS of a row sums to nothing, and this gradient weighs it by up to
768: with the output alone rounded to bf16, it moved from 20,478 to 18,787 in fp64."""
SOME = {
    "lower right": ("all", False),
    "key heads": ("groups", False),
    "bias": ("rows", True),
    "bias of entries": ("groups", False),
    "neighbours": ("heads", False),
    "relative": ("all", False),
    "cells": ("all", False),
    "scattered": ("rows", False),
    "low rank": ("heads", True),
    "sink": ("keys", True),
    "dropout": ("rows", False),
    "dropped sigmoid": ("odd rows", False),
}
"""A split for each of some programs, and whether captures are given by shares."""


def has_same_bits(case: Case, split: str, name: str) -> bool:
    """Whether parts give the very bits of the whole: where kernels take the same tiles.

    Interpreted kernels need not: a product of numpy's has other bits for the same row in another
    place, on some processors.
    """
    if not case.q.is_cuda:
        return False
    products = case.lowered.contractions
    # Torch's own products of other shapes have other bits.
    by_kernels = products is None or products.wide is not None
    begins_with_tiles = split not in ("keys", "odd rows", "all")
    others = OTHER_TILES | REDUCED | (REPEATED if case.q.dtype is torch.bfloat16 else set())
    return by_kernels and begins_with_tiles and not (split == "rows" and name in others)


def check_parts(
    case: Case, split: str, shares: bool, tolerances: Mapping[str, float], block: int = 16,
    same: bool = False,
) -> None:  # fmt: skip
    """Parts give the whole's results within ``tolerances``: ``same``, the very bits of these."""
    leaves = case.leaves()
    whole = results(part_of_whole(whole_of(case), case, split), leaves)
    found = results(parts_of(case, split, shares, block), leaves)
    for name, value in whole.items():
        if same and name in ("out", "lse"):
            assert torch.equal(found[name], value), (name, shares)
        scale = max(1.0, float(value[value.isfinite()].abs().max()))
        tolerance = tolerances[name]
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        )


@pytest.mark.parametrize("name", SOME)
def test_some_parts_equal_the_whole(device, name):
    split, shares = SOME[name]
    sizes = replace(SMALL, kv_heads=1) if split == "groups" else SMALL
    case = make_case(name, "triton", torch.float32, sizes, device)
    tolerances = defaultdict(lambda: 2e-4)
    check_parts(case, split, shares, tolerances, same=has_same_bits(case, split, name))


@pytest.mark.gpu
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_parts_equal_the_whole_on_gpus(backend, name, split):
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    torch.manual_seed(0)
    case = make_case(name, backend, dtype, LARGE, "cuda")
    usual = 3e-2 if backend == "hopper" else 1e-3
    tolerances = defaultdict(lambda: usual)
    if backend == "hopper":
        tolerances |= {key: usual * times for (own, key), times in CANCELS.items() if own == name}
    same = has_same_bits(case, split, name)
    for shares in (False, True):
        check_parts(case, split, shares, tolerances, TILE, same)


def check_ragged(case: Case, offsets: list[int], lengths: list[int], tolerance: float) -> None:
    """Batch entries of their own positions and lengths give what they give one at a time."""
    starts, counts = (torch.tensor(x, device=case.q.device) for x in (offsets, lengths))
    found = results(ragged_of(case, starts, counts), case.leaves())
    for name, value in results(entries_of(case, starts, counts), case.leaves()).items():
        scale = max(1.0, float(value[value.isfinite()].abs().max()))
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance * scale, equal_nan=True
        )


@pytest.mark.parametrize("name", ["lengths", "buckets", "documents"])
def test_some_entries_have_their_own_lengths(device, name):
    sizes = Sizes(batch=2, heads=2, kv_heads=1, q_len=3, kv_len=40)
    case = make_case(name, "triton", torch.float32, sizes, device, RAGGED)
    check_ragged(case, [5, 34], [8, 37], 2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 300])
@pytest.mark.parametrize("name", RAGGED)
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_entries_have_their_own_lengths_on_gpus(backend, name, rows):
    sizes = Sizes(batch=4, q_len=rows, kv_len=1000, head_dim=64)
    dtype = torch.bfloat16 if backend == "hopper" else torch.float32
    torch.manual_seed(0)
    case = make_case(name, backend, dtype, sizes, "cuda", RAGGED)
    tolerance = 3e-2 if backend == "hopper" else 1e-3
    # Positions of rows are among the keys of their entry: the call looks up as far as tensors go.
    check_ragged(case, [5, 0, 700, 130], [8 + rows, 301, 1000, 130 + rows], tolerance)


@pytest.mark.parametrize("how", ["index", "tensor"])
def test_dropout_of_rows_that_tensors_place(device, how):
    rows = torch.tensor([3, 17, 0, 11]) if how == "index" else torch.arange(7, 11)
    options = {"q_index": rows} if how == "index" else {"q_offset": torch.tensor(7)}
    options = {name: value.to(device) for name, value in options.items()}
    case = make_case("dropout", "triton", torch.float32, SMALL, device)
    out, lse = whole_of(case)
    found = case.attention(
        case.q[:, :, rows], case.k, case.v, return_lse=True, q_len=20, seed=7, **options
    )
    wanted = results((out[:, :, rows], lse[:, :, rows]), case.leaves())
    for name, value in results(found, case.leaves()).items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_offset", [0, -3, 4])
@pytest.mark.parametrize(
    "text", ["kv % 3 != 1 and kv // 3 < 3", "causal_lower_right()", "score - 0.2 * (kv_len - kv)"]
)
def test_each_entry_has_its_own_lengths_and_offsets(device, text, kv_offset):
    torch.manual_seed(0)
    q = torch.randn(2, 2, 9, 16, device=device)
    k, v = (torch.randn(2, 2, 20, 16, device=device) for _ in range(2))
    lengths, starts = [20, 7], [3, -5]
    attention = attndsl.compile(text, backend="triton")
    out = attention(
        q, k, v, kv_offset=kv_offset, q_offset=torch.tensor(starts, device=device),
        kv_lengths=torch.tensor(lengths, device=device),
    )  # fmt: skip
    for b, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        alone = attention(
            q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length], q_offset=start,
            kv_offset=kv_offset,
        )  # fmt: skip
        torch.testing.assert_close(out[b : b + 1], alone, rtol=1e-5, atol=1e-5)
