"""Lists of tiles whose sizes are no powers of two, as three warpgroups have them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from brute import call_of, lowered_of, true_kinds

from attndsl.backends.triton.backend import TritonBackend
from attndsl.backends.triton.specialise import specialise
from attndsl.backends.triton.tile_lists import find_kinds
from attndsl.runtime.programs import default_cache


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
    call = replace(call, q=q, k=q, v=q, tensors={"seg": seg.to(device)})
    kernels = TritonBackend(default_cache())._kernels
    special = specialise(lowered.program, call)
    found = find_kinds(
        kernels.tile_lists(lowered, special, torch.device(device), *sizes),
        lowered.sparsity, special, call, 0,
    ).cpu()  # fmt: skip
    assert not (wanted[found == 0] != 0).any()
    assert not (wanted[found == 2] != 2).any()
    if lowered.sparsity.evaluate:
        assert torch.equal(found, wanted)
    else:
        assert (found == wanted).float().mean() > 0.8
