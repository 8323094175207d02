"""Lists of tiles whose sizes are no powers of two, as three warpgroups have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.brute import call_of, lowered_of, true_kinds

from attndsl.backends.emit.facts import facts_of
from attndsl.backends.emit.loops import row_width
from attndsl.backends.emit.tile_list_text import has_undecided
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.kernel import Job
from attndsl.backends.kernels.modules import Modules
from attndsl.backends.kernels.tile_lists import find_kinds, list_arguments
from attndsl.backends.triton.kernels import KERNELS
from attndsl.runtime.program_store import default_cache


def lists_of_size(modules, lowered, facts, device, block_m, block_n, parts=1):
    """The kernels that list tiles of a forward."""
    forward = next(kernel for kernel in KERNELS if kernel.name == "forward")
    forward = replace(forward, parts_of_lists=lambda job, config: parts)
    config = Config(block_m, block_n, 4, 1)
    return modules.tile_lists(Job(forward, lowered, facts), config, device)


@pytest.mark.parametrize(
    "text",
    [
        "tensor seg[kv_len]: int\nmask = q >= kv and seg[q] == seg[kv]",
        "tensor seg[kv_len]: bool\nmask = seg[q] == seg[kv]",
        "tensor seg[kv_len]: int\nmask = ((q ^ kv) & 32) == 0 and seg[kv] < 3",
    ],
)
@pytest.mark.parametrize("sizes", [(48, 16), (32, 24), (16, 32)])
def test_kinds_found_are_those_of_brute_force(device, text, sizes):
    lowered = lowered_of(text)
    length = 203
    seg = torch.arange(length) // 40
    if "bool" in text:
        seg = seg % 3 == 0
    call = call_of(lowered, length, length, seg=seg)
    wanted = true_kinds(lowered, call, *sizes)
    q = torch.empty(1, 1, length, 1, device=device)
    call = call._replace(q=q, k=q, v=q, tensors={"seg": seg.to(device)})
    modules = Modules(default_cache())
    facts = facts_of(lowered.program, call)
    found = find_kinds(
        lists_of_size(modules, lowered, facts, torch.device(device), *sizes),
        lowered.sparsity, facts, call, 0,
    ).cpu()  # fmt: skip
    assert not (wanted[found == 0] != 0).any()
    assert not (wanted[found == 2] != 2).any()
    if lowered.sparsity.evaluate:
        assert torch.equal(found, wanted)
    else:
        assert (found == wanted).float().mean() > 0.8


CELLS = {
    "map": "tensor map[heads, 9, 8]: bool\nmask = map[h, q // 24, kv // 32]",
    "cells smaller than tiles": "tensor map[heads, 26, 16]: bool\nmask = map[h, q // 8, kv // 16]",
    "not from multiples": (
        "tensor map[heads, 30, 30]: bool\nmask = map[h, (q + 5) // 16, (kv + 3) // 8]"
    ),
    "a list of each query": (
        "tensor map[heads, q_len, 5]: bool\nmask = q >= kv and map[h, q, kv // 64]"
    ),
    "beside others": (
        "tensor map[heads, 30, 30]: bool\n"
        "mask = (q - kv < 40 and q >= kv) or (kv < 100 and map[h, q // 16, kv // 16])"
    ),
    "not": "tensor map[heads, 30, 30]: bool\nmask = q >= kv and not map[h, q // 16, kv // 16]",
}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("sizes", [(48, 16), (32, 24), (16, 32)])
@pytest.mark.parametrize("place", ["none", "offsets", "tensor", "index"])
def test_conditions_are_evaluated_by_cells(device, name, sizes, place):
    """Kinds are exact, and no pair is evaluated where one condition decides."""
    lowered = lowered_of(CELLS[name])
    length = 203
    (decl,) = lowered.program.tensors
    shape = [2, *(length if dim.value == "q_len" else dim.value for dim in decl.dims[1:])]
    given = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.3
    given[:, :4] = True
    call, places = call_of(lowered, length, length, heads=2, map=given), {}
    if place != "none" and "q_len" not in CELLS[name]:
        places = {
            "offsets": {"q_offset": 7, "kv_offset": 2},
            "tensor": {"q_offset": torch.tensor(7)},
            "index": {"q_index": torch.arange(length).flip(0)},
        }[place]
    wanted = true_kinds(lowered, call._replace(**places), *sizes)
    q = torch.empty(1, 2, length, 1, device=device)
    places = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in places.items()}
    call = call._replace(q=q, k=q, v=q, tensors={"map": given.to(device)}, **places)
    facts = facts_of(lowered.program, call)
    own = torch.device(device)
    kernels = lists_of_size(Modules(default_cache()), lowered, facts, own, *sizes)
    if name in ("map", "cells smaller than tiles"):
        assert not has_undecided(lowered.sparsity)
    else:
        assert has_undecided(lowered.sparsity)
    found = find_kinds(kernels, lowered.sparsity, facts, call, 0).cpu()
    assert len(set(wanted.unique().tolist())) > 1
    assert torch.equal(found, wanted)


PARTS = ((32, 1), (32, 2), (48, 3), (256, 2))
"""Rows of a tile, and into how many parts they fall."""


@pytest.mark.parametrize(
    ("length", "block_m", "parts"),
    [
        *((203, *each) for each in PARTS),
        (600, 48, 3),
        *(pytest.param(600, *each, marks=pytest.mark.slow) for each in PARTS if each != (48, 3)),
    ],
)
def test_lists_tell_of_parts_of_rows(device, block_m, parts, length):
    """Which of a tile's PARTIAL key tiles are the first and the last that a part's rows visit."""
    block_n = 2
    lowered = lowered_of("tensor seg[kv_len]: int\nmask = q >= kv and seg[q] == seg[kv]")
    seg = torch.arange(length) // 60
    call = call_of(lowered, length, length, seg=seg)
    q = torch.empty(1, 1, length, 1, device=device)
    call = call._replace(q=q, k=q, v=q, tensors={"seg": seg.to(device)})
    modules = Modules(default_cache())
    facts = facts_of(lowered.program, call)
    own = torch.device(device)
    of_size = lists_of_size(modules, lowered, facts, own, block_m, block_n, parts)
    wanted = find_kinds(of_size, lowered.sparsity, facts, call, 0)[0, 0].cpu()
    tile_rows, tile_list, *_ = list_arguments(of_size, lowered.sparsity, facts, call, 0)
    tile_rows, tile_list = tile_rows[0, 0].cpu(), tile_list[0, 0].cpu()
    assert tile_rows.shape == (-(-length // block_m), row_width(parts))
    along, whole = wanted.shape[1], length // block_n
    some_tell = False
    for own, found in enumerate(tile_rows.tolist()):
        kinds = wanted[own * parts : (own + 1) * parts]
        full = (kinds == 2).all(0) & (torch.arange(along) < whole)
        partial = ((kinds != 0).any(0) & ~full).nonzero().flatten()
        assert found[:2] == [int(full.sum()), len(partial)]
        assert tile_list[own, : found[0]].tolist() == full.nonzero().flatten().tolist()
        assert tile_list[own].flip(0)[: found[1]].tolist() == partial.tolist()
        for part in range(parts if parts > 1 else 0):
            first, behind = found[4 + 2 * part : 6 + 2 * part]
            there = (kinds[part : part + 1, partial] != 0).any(0).nonzero().flatten().tolist()
            assert [first, behind] == ([there[0], there[-1] + 1] if there else [along, 0])
            some_tell |= bool(there) and behind - first < len(partial)
    assert some_tell == (parts > 1)


def test_lists_of_other_tile_sizes_are_others(device):
    """By what kept lists are found: all that the kernels depend on, and the same each time."""
    text = "tensor seg[kv_len]: int\nmask = q >= kv and seg[q] == seg[kv]"
    lowered = lowered_of(text)
    call = call_of(lowered, 64, 64, seg=torch.arange(64) // 20)
    q = torch.empty(1, 1, 64, 1, device=device)
    call = call._replace(q=q, k=q, v=q, tensors={"seg": call.tensors["seg"].to(device)})
    facts, modules = facts_of(lowered.program, call), Modules(default_cache())

    def place(*sizes, of=lowered):
        return lists_of_size(modules, of, facts, torch.device(device), *sizes).place()

    sizes = [(32, 16), (16, 32), (32, 32), (64, 32, 2), (32, 32, 2)]
    places = [place(*each) for each in sizes]
    places.append(place(32, 16, of=lowered_of(text.replace(">=", ">"))))
    assert len(set(places)) == len(places)
    assert place(32, 16) == places[0]
