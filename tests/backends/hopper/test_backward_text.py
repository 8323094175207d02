"""The backward kernels' text, run as Python: gradients, and what warpgroups owe one another."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.backward_text import (
    CASES,
    CONFIG,
    DROPPING,
    PERSISTENT,
    SHAPES,
    Stored,
    attention_of,
    inputs_of,
    run_backward,
)  # fmt: skip
from support.kernel_text import Run
from support.mutation import drop, early, is_noticed, swap


@pytest.mark.parametrize(
    ("name", "shape", "wide"),
    [
        pytest.param(*case.values, wide, marks=case.marks)
        for case in CASES
        for wide in (False, True)
        # The wide backward has no dropout.
        if not (wide and case.values[0] in DROPPING)
    ],
)
def test_gradients(name, shape, wide):
    tensors = inputs_of(*SHAPES[shape])
    leaves = [x.float().requires_grad_() for x in tensors[:3]]
    out, _ = attention_of(name, *leaves)
    expected = torch.autograd.grad(out, leaves, tensors[3].float(), allow_unused=True)
    for peeled, seed in ((True, 1), (False, 2)):
        found = run_backward(name, tensors, replace(CONFIG, peeled=peeled), Run(seed, wide=wide))
        for value, wanted in zip(found, expected, strict=True):
            scale = 1 + float(wanted.abs().max())
            torch.testing.assert_close(value, wanted, atol=4e-3 * scale, rtol=0)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("name", "shape"), [("causal", 0), ("sigmoid", 1), ("table", 0)])
def test_gradients_stored_in_fp32(name, shape, wide):
    tensors = inputs_of(*SHAPES[shape])
    for config in (CONFIG,) if wide else (CONFIG, PERSISTENT):
        run, stored = Run(0, 1, wide=wide), Stored(torch.float32)
        usual = run_backward(name, tensors, config, run)
        found = run_backward(name, tensors, config, run, stored)
        assert torch.equal(found[0], usual[0])
        for one, other in zip(found[1:], usual[1:], strict=True):
            assert torch.equal(one.half().float(), other)
            assert not torch.equal(one, other)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_persistent_programs_compute_the_same(name, shape):
    tensors = inputs_of(*SHAPES[shape])
    usual = run_backward(name, tensors, CONFIG)
    for programs in (1, 2):
        found = run_backward(name, tensors, PERSISTENT, Run(programs, programs))
        torch.testing.assert_close(found[0], usual[0], atol=1e-4, rtol=1e-4)
        # Sums of dQ are in no fixed order.
        assert all(map(torch.equal, found[1:], usual[1:]))


NEEDED = {
    "room for q": (False, drop("consumer_release_by(q, ...)")),
    "room for dO": (False, drop("consumer_release_by(do, ...)")),
    "phases of q": (False, drop("consumer_wait(q, ...)")),
    "both halves of dS": (False, drop("sync_consumers()")),
    "both halves of dS, wide": (True, drop("sync_consumers()", "add_query_tile")),
    "the slopes are there": (True, drop("wait_for_p()")),
}


def differ(found: list[torch.Tensor], usual: list[torch.Tensor], least: float = 1e-3) -> bool:
    """No number where one has not come differs too."""
    return not all(torch.allclose(a, b, atol=least) for a, b in zip(found, usual, strict=True))


@pytest.mark.parametrize("name", NEEDED)
def test_the_machine_notices(name):
    wide, change = NEEDED[name]
    tensors = inputs_of(140, 40, 1)
    usual = run_backward("full", tensors, CONFIG, Run(1, wide=wide))

    def differs(seed: int) -> bool:
        run = Run(seed, 1, change, wide)
        return differ(run_backward("full", tensors, CONFIG, run), usual)

    assert is_noticed(differs, 6)


NEEDED_AGAIN = {
    "room for keys": drop("consumer_release(k, ...)"),
    "keys have been read": drop("producer_acquire(k, ...)"),
    "phases of k": drop("consumer_wait(k, ...)"),
    "phases of v": drop("consumer_wait(v, ...)"),
    "items are read": drop("acquire_item(...)"),
    "items are written": drop("await_item(...)", "consume", nth=2),
    "query tiles go on": swap("tile_index = tiles_before", "tile_index = 0", "consume_work"),
    "zero at the end": drop("gl.store(counter, ...)"),
    "bits are there": drop("consumer_wait(kept, ...)"),
}


@pytest.mark.parametrize("name", NEEDED_AGAIN)
def test_the_machine_notices_in_persistent_programs(name):
    # Many query tiles, and items so short that the producer is ahead by whole items.
    several = [inputs_of(140, 90, 1), inputs_of(30, 90, 2)]
    program = "dropout" if "bits" in name else "causal"
    usual = [run_backward(program, tensors, CONFIG, Run(1)) for tensors in several]

    def differs(seed: int) -> bool:
        run = Run(seed, 2, NEEDED_AGAIN[name])
        found = [run_backward(program, tensors, PERSISTENT, run) for tensors in several]
        return any(map(differ, found, usual))

    assert is_noticed(differs, 6)


LEAVE = "consumer_release(bias, ...)"
NEEDED_FOR_PAIRS = {
    "tiles have come": drop("consumer_wait(bias, ...)"),
    "phases": swap("slot_of_bias(PART, tile_index)", "slot_of_bias(PART, 0)", "read_bias"),
    "room for tiles": drop(LEAVE),
    "tiles have been read": drop("producer_acquire(bias, ...)"),
    "read before they go": early(LEAVE, to="pair_parts = read_bias(...)"),
    "heads": swap("(h, *_place)", "(0 * h, *_place)", "places_of_bias"),
}


@pytest.mark.parametrize("name", NEEDED_FOR_PAIRS)
@pytest.mark.parametrize("form", ["usual", "wide", "persistent"])
def test_the_machine_notices_tiles_of_pairs(name, form):
    tensors, wide = inputs_of(140, 90, 2), form == "wide"
    usual = run_backward("bias", tensors, CONFIG, Run(1))
    config = PERSISTENT if form == "persistent" else CONFIG

    def differs(seed: int) -> bool:
        run = Run(seed, 2, NEEDED_FOR_PAIRS[name], wide)
        return differ(run_backward("bias", tensors, config, run), usual, 1e-2)

    assert is_noticed(differs, 6)


@pytest.mark.parametrize(("wide", "persistent"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("name", ["full", "causal", "window", "cap", "alibi", "sigmoid", "bias"])
def test_heads_apart_sum_to_what_heads_together_do(name, wide, persistent):
    """Work tiles of one query head each, whose gradients of keys are summed over heads."""
    tensors = inputs_of(70, 37, 1)
    usual = run_backward(name, tensors, CONFIG, Run(1, wide=wide))
    config, run = CONFIG, Run(1, 3, wide=wide)
    if persistent:
        config, run = PERSISTENT, Run(2, 3)
    found = run_backward(name, tensors, config, run, Stored(apart=True))
    for one, other in zip(found, usual, strict=True):
        torch.testing.assert_close(one, other, atol=2e-3, rtol=2e-3)
