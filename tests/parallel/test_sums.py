"""Gradients of a rank's keys, added up from those of calls and of other ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attndsl.parallel import eager_exchange
from attndsl.parallel.comm_plan import RowRun, _whole

ROWS = 24


class Sent(NamedTuple):
    """Stands in for what has come: rows by rank."""

    rows: dict[int, list[torch.Tensor]]

    def arrived(self) -> dict[int, list[torch.Tensor]]:
        return self.rows


def runs(low=0, high=ROWS):
    return st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted).map(tuple)


def grads_of(some, heads=2):
    """Gradients of the keys of each run, fp32; (1, heads, number, 3)."""
    generator = torch.Generator().manual_seed(len(some))
    return [(run, torch.randn(1, heads, run[1] - run[0], 3, generator=generator)) for run in some]


def total_of(grads, heads=2):
    found = torch.zeros(1, heads, ROWS, 3)
    for (start, stop), grad in grads:
        found[:, :, start:stop] += grad
    return found


@settings(deadline=None)
@given(st.lists(runs(), max_size=5), runs(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_each_row_is_the_sum_of_all_that_have_it(some, run, dtype):
    grads = grads_of(some)
    wanted = total_of(grads)[:, :, run[0] : run[1]].to(dtype)
    room = torch.full_like(wanted, torch.nan)
    eager_exchange._put(grads, run, room)
    assert torch.equal(room, wanted)


@settings(deadline=None)
@given(
    st.lists(runs(), max_size=3),
    st.dictionaries(st.integers(0, 3), st.lists(runs(), max_size=2), max_size=3),
    st.sampled_from([1, 2]), st.booleans(),
)  # fmt: skip
def test_what_calls_and_ranks_have_computed_is_added_up(some, sent, group, together):
    rows, heads = ROWS // 2, 2
    held = ((6, 18),) if together else ((2, 7), (13, 20))
    sends = [tuple((a // 2, b // 2) for a, b in sent.get(rank, ())) for rank in range(4)]
    table = SimpleNamespace(
        rank=1, group=group, share=1 % group, rows=rows, held=held, sends=sends, travels=True
    )
    grads = grads_of(some)
    positions = torch.cat([torch.arange(*run) for run in held])
    wanted = torch.zeros(1, heads * group, rows, 3)
    share = wanted[:, table.share * heads :][:, :heads]
    share += total_of(grads)[:, :, positions]
    arrived = {}
    for rank in sorted(sent):
        parts = grads_of(sends[rank])
        arrived[rank] = [torch.cat([torch.zeros(1, heads, 0, 3), *(x for _, x in parts)], 2)] * 2
        place = wanted[:, rank % group * heads :][:, :heads]
        for (start, stop), grad in parts:
            place[:, :, start:stop] += grad
    sums = eager_exchange.FetchedGradients(table, None)
    sums._trip = Sent(arrived)
    for keys, grad in grads:
        sums.add(RowRun(0, 0, 0, keys, -1, 0), (grad, grad.clone()))
    like = [torch.empty(1, heads, 0, 3)] * 2
    for found in sums.returned(like, torch.bfloat16):
        assert found.dtype is torch.bfloat16
        torch.testing.assert_close(found, wanted.bfloat16(), atol=0.04, rtol=0.02)


def test_a_call_that_sees_most_keys_of_a_rank_has_them_all():
    assert _whole([(1024, 9216)], (2048, 9216)) == (1024, 9216)
    assert _whole([(1024, 9216)], (4096, 9216)) == (4096, 9216)
    assert _whole([(1024, 9216)], (0, 9216)) == (0, 9216)
    assert _whole([(0, 1024), (2048, 9216)], (2048, 8192)) == (2048, 8192)
    assert _whole([(1024, 9216)], (0, 0)) == (0, 0)
    assert _whole([(2560, 5120)], (3072, 5120)) == (2560, 5120)
    assert _whole([(2600, 5120)], (3072, 5120)) == (3072, 5120)
