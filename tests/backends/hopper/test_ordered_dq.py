"""Work tiles of a backward that take turns: sums of dQ are the same bit for bit, and none hangs."""

from __future__ import annotations

import pytest
import torch
from support.backward_text import (
    CASES,
    PERSISTENT,
    ROWS,
    SHAPES,
    Stored,
    inputs_of,
    run_backward,
)  # fmt: skip
from support.gluon_operations import Operations
from support.kernel_text import Run
from support.mutation import drop, is_noticed, swap

import attndsl
from attndsl.backends.base import StoredDS
from attndsl.call.dispatch import choose_backend
from attndsl.foundation.caches import CACHES, Reason

CLOSED = [case for case in CASES if "table" not in case.values[0]]
"""Cases whose tiles have formulas."""


def in_turn(name, tensors, run, config=PERSISTENT):
    """Gradients, and how many work tiles have added to the sums of each query tile."""
    turns = torch.zeros(tensors[0].shape[1], -(-tensors[0].shape[2] // ROWS), dtype=torch.int32)
    return run_backward(name, tensors, config, run, Stored(turns=turns)), turns


@pytest.mark.parametrize(("name", "shape"), CLOSED)
def test_the_bits_are_the_same_whoever_is_faster(name, shape):
    tensors = inputs_of(*SHAPES[shape])
    usual = run_backward(name, tensors, PERSISTENT)
    first, counts = in_turn(name, tensors, Run(1, 1))
    for value, wanted in zip(first, usual, strict=True):
        torch.testing.assert_close(value, wanted, atol=1e-4, rtol=1e-4)
    for seed, programs in ((2, 2), (3, 5)):
        found, again = in_turn(name, tensors, Run(seed, programs))
        assert all(map(torch.equal, found, first))
        assert torch.equal(again, counts)


def test_without_turns_the_machine_adds_in_any_order():
    """The order matters for the bits here, so that the tests above say something."""
    tensors = inputs_of(140, 90, 1)
    found = [run_backward("causal", tensors, PERSISTENT, Run(seed, 5))[0] for seed in range(3)]
    assert not all(torch.equal(found[0], other) for other in found[1:])


def test_stored_slopes_are_those_without_turns():
    tensors = inputs_of(140, 90, 1)
    tiles = -(-90 // PERSISTENT.block_n), -(-140 // ROWS)

    def run_with(seed, turns):
        values = torch.zeros(1, 2, tiles[0] * PERSISTENT.block_n, tiles[1] * ROWS).half()
        slopes = StoredDS(values, torch.zeros(1, 2, *tiles, dtype=torch.int8))
        stored = Stored(slopes=slopes, turns=turns)
        return run_backward("bias", tensors, PERSISTENT, Run(seed, 1 + seed % 4), stored), slopes

    usual, plain = run_with(0, None)
    for seed in range(3):
        counts = torch.zeros(2, tiles[1], dtype=torch.int32)
        found, slopes = run_with(seed, counts)
        assert counts.sum() == slopes.stored.sum() > 0
        assert torch.equal(slopes.stored, plain.stored)
        assert torch.equal(slopes.values, plain.values)
        torch.testing.assert_close(found[0], usual[0], atol=1e-4, rtol=1e-4)


NEEDED = {
    "consumers wait": drop("consumer_wait(turns, ...)"),
    "phases": swap(
        "consumer_wait(memory.turns, _slot)",
        "consumer_wait(memory.turns, type(_slot)(_slot.stage, 0))",
    ),
    "the producer waits": drop("await_turn(...)"),
    "turns are taken": drop("take_turn(...)", "follow_turns"),
    "turns are passed on": drop("pass_turn(...)", "follow_turns"),
    "not before they were taken": swap(
        "turns.data.index(tile_index & 1)", "turns.data.index((tile_index - 1) & 1)", "follow_turns"
    ),
    "the last turns of a program": drop("finish_turns(...)", "produce"),
    "the last turns before a work tile of nothing": drop("finish_turns(...)", "load_work"),
    "consumers are done at the end": drop("producer_acquire(q, ...)", "finish_turns"),
    "nothing is passed on twice": drop("clear_turns(...)", "finish_turns"),
    "work tiles are drawn in their order": swap(
        "place_of_item(_item, _tiles, _heads, _together, True, _last)",
        "place_of_item(_item, _tiles, _heads, _together, True, not _last)",
    ),
    "all are drawn": swap("work_tiles + gl.num_programs(0) - 1", "work_tiles - 1", "draw_in_turn"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_the_machine_notices(name):
    # Many query tiles, and work tiles of none behind others of one.
    several = [inputs_of(140, 90, 1), inputs_of(30, 90, 2)]
    usual = [in_turn("causal", tensors, Run(1, 1)) for tensors in several]

    def differs(seed):
        run = Run(seed, 1 + seed % 4, NEEDED[name])
        found = [in_turn("causal", tensors, run) for tensors in several]
        return any(
            not (all(map(torch.equal, one, other)) and torch.equal(counts, others))
            for (one, counts), (other, others) in zip(found, usual, strict=True)
        )

    assert is_noticed(differs, 8)


def test_the_machine_notices_additions_that_nobody_waits_for(monkeypatch):
    """As where the count is passed on without a release."""
    tensors = inputs_of(140, 90, 1)
    usual, _ = in_turn("causal", tensors, Run(1, 1))

    def count(self, pointer):
        pointer.data[int(pointer.offset)] += 1
        self.machine.pause()

    monkeypatch.setattr(Operations, "count_turn", count)
    found = [in_turn("causal", tensors, Run(seed, 5))[0] for seed in range(4)]
    assert not all(torch.equal(usual[0], other[0]) for other in found)


ON_GPU = {
    "full": "score",
    "causal": "causal()",
    "window": "sliding_window(300)",
    "reverse": "kv >= q",
    "cap": "mask = causal()\nscore = softcap(score, 20.0)",
    "dropout": "mask = causal()\nweights = dropout(softmax(score), 0.2)",
    "gain": "tensor t[heads]: float\nmask = causal()\nscore = score * t[h]",
    "columns": "tensor t[kv_len]: float\nscore = score + t[kv]",
    "slopes": "tensor t[heads]: float\nmask = causal()\nscore = score - t[h] * (q - kv)",
    "bias": (
        "tensor t[heads, q_len, kv_len]: float\nmask = sliding_window(300)\n"
        "score = score + t[h, q, kv]"
    ),
    "distances": (
        "tensor t[heads, n]: float\nmask = causal()\nscore = score + t[h, min(abs(q - kv), n - 1)]"
    ),
}
DIMS = {
    "gain": lambda heads, q_len, kv_len: (heads,),
    "columns": lambda heads, q_len, kv_len: (kv_len,),
    "slopes": lambda heads, q_len, kv_len: (heads,),
    "bias": lambda heads, q_len, kv_len: (heads, q_len, kv_len),
    "distances": lambda heads, q_len, kv_len: (heads, 99),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("sizes", [(2, 4, 4, 2048, 2048), (1, 4, 2, 1000, 3001)])
@pytest.mark.parametrize("name", ON_GPU)
def test_the_bits_are_the_same_in_100_runs(name, sizes, dim):
    batch, heads, kv_heads, q_len, kv_len = sizes

    def rows(number, length):
        return torch.randn(batch, number, length, dim, device="cuda", dtype=torch.bfloat16)

    leaves = [rows(heads, q_len), rows(kv_heads, kv_len), rows(kv_heads, kv_len)]
    given = {"seed": 7} if name == "dropout" else {}
    if name in DIMS:
        own = 0.1 * torch.rand(DIMS[name](heads, q_len, kv_len), device="cuda")
        given["t"] = own.bfloat16() if name == "bias" else own
        leaves.append(given["t"])
    q, k, v = [x.requires_grad_() for x in leaves][:3]
    attention, do = attndsl.compile(ON_GPU[name]), rows(heads, q_len)
    plain = torch.autograd.grad(attention(q, k, v, **given), leaves, do)
    out = attention(q, k, v, deterministic=True, **given)
    backend, _ = choose_backend("auto", q.device, False, q.dtype)
    CACHES.invalidate(Reason.KERNELS)
    first = torch.autograd.grad(out, leaves, do, retain_graph=True)
    assert any(layout.facts.takes_turns for layout in backend._layouts.values())
    # Other kernels may make gradients of captures, which are differences of large sums.
    for found, other, error in zip(first, plain, (4e-3, 4e-3, 4e-3, 2e-2), strict=False):
        difference = torch.linalg.vector_norm(found.float() - other.float())
        assert difference < error * torch.linalg.vector_norm(other.float())
    for _ in range(99):
        again = torch.autograd.grad(out, leaves, do, retain_graph=True)
        assert all(map(torch.equal, again, first))
