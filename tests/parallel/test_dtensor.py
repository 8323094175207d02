"""Calls of DTensors equal those of one process."""

from __future__ import annotations

import pytest
import torch
from support.dtensor_cases import CASES, run_all

from attndsl.parallel.dtensor import part_along

ON_GPUS = [
    "alibi", "soft_cap", "learned_slopes", "a_parameter", "sinks", "dropout", "groups",
    "fewer_key_heads", "batch", "pair_bias", "params", "compiled", "refusals", "context_parallel",
    "sequence_in_a_graph",
]  # fmt: skip
"""Each program takes seconds to compile there, and each kind of part again."""


def test_four_processes(tmp_path):
    """All cases in four processes; two of them in a row are another mesh.

    One test: workers that share out several would start the processes once each.
    """
    found = run_all(4, tmp_path, list(CASES))
    assert set(found) == set(CASES)
    assert {name: why for name, why in found.items() if why} == {}


def test_what_a_process_has_is_by_torchs_rule():
    for size in range(12):
        whole = torch.arange(size)
        for rank in range(4):
            ranks = whole.chunk(4)
            wanted = ranks[rank].tolist() if rank < len(ranks) and size else []
            assert list(part_along(size, (2, 4), (1, rank), (1,))) == wanted
        for place in ((0, 0), (0, 2), (1, 1), (1, 2)):
            some = part_along(size, (2, 3), place, (0, 1))
            first = part_along(size, (2, 3), place, (0,))
            inner = [list(x) for x in whole[first.start : first.stop].chunk(3)]
            wanted = inner[place[1]] if place[1] < len(inner) and first else []
            assert list(some) == wanted


@pytest.mark.gpu
@pytest.mark.several_gpus
def test_two_gpus(tmp_path):
    """In bf16, over NCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    failures = run_all(2, tmp_path, ON_GPUS, gpus=True)
    assert not any(failures.values()), "\n".join(failures.values())
