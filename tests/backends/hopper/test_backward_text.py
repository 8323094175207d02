"""The backward kernels' text, run as Python: gradients, and what warpgroups owe one another."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.backward_text import (
    CASES,
    CONFIG,
    DROPPING,
    PERSISTENT,
    SHAPES,
    attention_of,
    inputs_of,
    run_text,
)  # fmt: skip
from support.gluon_machine import altered

if TYPE_CHECKING:
    from types import SimpleNamespace


@pytest.fixture
def run(gluon: SimpleNamespace) -> Any:
    """Runs the backward kernel of a program, see ``backward_text.run_text``."""
    return partial(run_text, gluon)


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
def test_gradients(run, name, shape, wide):
    tensors = inputs_of(*SHAPES[shape])
    leaves = [x.float().requires_grad_() for x in tensors[:3]]
    out, _ = attention_of(name, *leaves)
    expected = torch.autograd.grad(out, leaves, tensors[3].float(), allow_unused=True)
    for peeled, seed in ((True, 1), (False, 2)):
        found = run(name, tensors, replace(CONFIG, peeled=peeled), seed, wide)
        for value, wanted in zip(found, expected, strict=True):
            scale = 1 + float(wanted.abs().max())
            torch.testing.assert_close(value, wanted, atol=4e-3 * scale, rtol=0)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("name", "shape"), [("causal", 0), ("sigmoid", 1), ("table", 0)])
def test_gradients_stored_in_fp32(run, name, shape, wide):
    tensors = inputs_of(*SHAPES[shape])
    for config in (CONFIG,) if wide else (CONFIG, PERSISTENT):
        usual = run(name, tensors, config, wide=wide)
        found = run(name, tensors, config, wide=wide, kind=torch.float32)
        assert torch.equal(found[0], usual[0])
        for one, other in zip(found[1:], usual[1:], strict=True):
            assert torch.equal(one.half().float(), other)
            assert not torch.equal(one, other)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_persistent_programs_compute_the_same(run, name, shape):
    tensors = inputs_of(*SHAPES[shape])
    usual = run(name, tensors, CONFIG)
    for programs in (1, 2):
        found = run(name, tensors, PERSISTENT, programs, programs=programs)
        torch.testing.assert_close(found[0], usual[0], atol=1e-4, rtol=1e-4)
        # Sums of dQ are in no fixed order.
        assert all(map(torch.equal, found[1:], usual[1:]))


NEEDED = {
    "room for q": (False, "    leave(q_empty.index(stage), LEAVE_EACH)", "    pass"),
    "room for dO": (False, "    leave(do_empty.index(stage), LEAVE_EACH)", "    pass"),
    "phases of q": (False, "mbarrier.wait(q_full.index(stage), phase)", "pass"),
    "both halves of dS": (False, "    meet()\n", "    pass\n"),
    "both halves of dS, wide": (True, "    meet()\n    making_q", "    pass\n    making_q"),
    "the slopes are there": (True, "        await_announced()\n", "        pass\n"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_the_machine_notices(run, name):
    wide, old, new = NEEDED[name]
    tensors = inputs_of(140, 40, 1)
    usual = run("full", tensors, CONFIG, 1, wide)

    def change(text: str) -> str:
        return altered(text, old, new)

    def noticed(seed: int) -> bool:
        try:
            found = run("full", tensors, CONFIG, seed, wide, change)
        except AssertionError:
            return True
        return any(not torch.allclose(a, b, atol=1e-3) for a, b in zip(found, usual, strict=True))

    assert any(map(noticed, range(1, 7)))


NEEDED_AGAIN = {
    "room for keys": ("        mbarrier.arrive(kv_empty, count=1)\n", "        pass\n"),
    "keys have been read": ("mbarrier.wait(kv_empty, (turn & 1) ^ 1)", "pass"),
    "phases of k": ("mbarrier.wait(k_full, turn & 1)", "pass"),
    "phases of v": ("mbarrier.wait(v_full, turn & 1)", "pass"),
    "items are read": ("mbarrier.wait(item_empty, (turn & 1) ^ 1)", "pass"),
    "items are written": ("            mbarrier.wait(item_full, turn & 1)", ""),
    "query tiles go on": ("    count = done\n    before", "    count = 0\n    before"),
    "zero at the end": ("gl.store(COUNTER, 0)", "pass"),
    "bits are there": ("mbarrier.wait(kept_full.index(stage), phase)", "pass"),
}


@pytest.mark.parametrize("name", NEEDED_AGAIN)
def test_the_machine_notices_in_persistent_programs(run, name):
    old, new = NEEDED_AGAIN[name]
    # Many query tiles, and items so short that the producer is ahead by whole items.
    several = [inputs_of(140, 90, 1), inputs_of(30, 90, 2)]
    program = "dropout" if "bits" in name else "causal"
    usual = [run(program, tensors, CONFIG, 1) for tensors in several]

    def change(text: str) -> str:
        return altered(text, old, new)

    def noticed(seed: int) -> bool:
        try:
            found = [
                run(program, tensors, PERSISTENT, seed, change=change, programs=2)
                for tensors in several
            ]
        except AssertionError:
            return True
        return any(
            not torch.allclose(a, b, atol=1e-3)
            for some, others in zip(found, usual, strict=True)
            for a, b in zip(some, others, strict=True)
        )

    assert any(map(noticed, range(1, 7)))


LEAVE = "mbarrier.arrive(pairs_empty.index(PART), count=1)"
WAIT = "mbarrier.wait(pairs_full.index(PART), count & 1)"
NEEDED_FOR_PAIRS = {
    "tiles have come": [(f"    {WAIT}", "    pass")],
    "phases": [(WAIT, "mbarrier.wait(pairs_full.index(PART), 0)")],
    "room for tiles": [(LEAVE, "pass")],
    "tiles have been read": [("mbarrier.wait(pairs_empty.index(part), (count & 1) ^ 1)", "pass")],
    "read before they go": [
        (LEAVE, "pass"), ("    pair_parts = read_pairs(", f"    {LEAVE};pair_parts = read_pairs("),
    ],
    "heads": [("tma_load(pair0_desc, [h, ", "tma_load(pair0_desc, [0 * h, ")],
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED_FOR_PAIRS)
@pytest.mark.parametrize("form", ["usual", "wide", "persistent"])
def test_the_machine_notices_tiles_of_pairs(run, name, form):
    tensors, wide = inputs_of(140, 90, 2), form == "wide"
    usual = run("bias", tensors, CONFIG, 1)

    def change(text: str) -> str:
        for old, new in NEEDED_FOR_PAIRS[name]:
            text = altered(text, old, new)
        return text

    def noticed(seed: int) -> bool:
        config = PERSISTENT if form == "persistent" else CONFIG
        try:
            found = run("bias", tensors, config, seed, wide, change, 2)
        except AssertionError:
            return True
        # No number either where it has not come.
        return not all(torch.allclose(a, b, atol=1e-2) for a, b in zip(found, usual, strict=True))

    assert any(map(noticed, range(1, 7)))
