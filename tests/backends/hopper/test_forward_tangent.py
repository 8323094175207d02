"""The text of the kernel that makes results and tangents, run as Python."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernel_text import Run, slow
from support.mutation import drop, early, is_noticed, swap
from support.tangent_text import (
    CASES,
    CONFIG,
    PERSISTENT,
    SHAPES,
    WIDTH,
    close,
    expected,
    inputs_of,
    run_tangent,
)  # fmt: skip


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_results_and_tangents(name, shape):
    inputs = inputs_of(*SHAPES[shape])
    found = run_tangent(name, inputs, run=Run(shape))
    assert close(found, expected(name, inputs))


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_persistent_programs_compute_the_same(name, shape):
    inputs = inputs_of(*SHAPES[shape])
    once = run_tangent(name, inputs, run=Run(shape))
    for programs, wide in ((3, False), (7, SHAPES[shape][3] == WIDTH)):
        found = run_tangent(name, inputs, PERSISTENT, Run(programs, programs, wide=wide))
        assert all(map(torch.equal, found, once))


@pytest.mark.parametrize(
    ("name", "moving"),
    [("causal", "q"), ("causal", "k"), ("causal", "v"), ("causal", "qk"), ("cap", "v"),
     ("cap", "qv"), ("cap", "kv"), ("signs", "v")],
)  # fmt: skip
def test_what_does_not_move_is_not_read(name, moving):
    inputs = inputs_of(*SHAPES[0])
    found = run_tangent(name, inputs, CONFIG, Run(len(moving)), moving)
    assert close(found, expected(name, inputs, moving))
    again = run_tangent(name, inputs, PERSISTENT, Run(len(moving), 3), moving)
    assert all(map(torch.equal, again, found))


FORMS = {
    "one stage": replace(CONFIG, stages=1),
    "three stages": replace(CONFIG, stages=3),
    "three consumers": replace(CONFIG, block_m=24, consumers=3),
    "one consumer": replace(CONFIG, block_m=8, consumers=1),
    "early": replace(CONFIG, early=True),
    "persistent, one stage": replace(PERSISTENT, stages=1),
    "persistent, three stages": replace(PERSISTENT, stages=3),
    "persistent, three consumers": replace(PERSISTENT, block_m=24, consumers=3),
    "persistent, one consumer": replace(PERSISTENT, block_m=8, consumers=1),
    "persistent, early": replace(PERSISTENT, early=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    inputs = inputs_of(*SHAPES[0])
    for name, dtype in (("causal", torch.bfloat16), ("cap", torch.float16)):
        found = run_tangent(name, inputs, FORMS[form], Run(1, 3), dtype=dtype)
        assert close(found, expected(name, inputs))


@pytest.mark.parametrize("name", ["causal", "cap", "column", slow("window")])
def test_positions_and_scales(name):
    inputs = inputs_of(*SHAPES[1])
    for origins, scale in (((3, 5), 0.4), ((0, 9), -0.4)):
        found = run_tangent(name, inputs, run=Run(origins=origins), scale=scale)
        assert close(found, expected(name, inputs, origins=origins, scale=scale))


# What it must not do without: taken out of the text, the machine notices.
NEEDED = {
    "room for k": drop("producer_acquire(k, ...)"),
    "room for v": drop("producer_acquire(v, ...)"),
    "k has been read": drop("consumer_release(k, ...)"),
    "v has been read": drop("consumer_release(v, ...)"),
    "k has come": drop("consumer_wait(k, ...)"),
    "v has come": drop("consumer_wait(v, ...)"),
    "q has come": drop("consumer_wait(q, ...)"),
    "the first ones pass": drop("skip_tiles(...)", "consume_work", nth=1),
    "the last ones pass": drop("skip_tiles(...)", "consume_work", nth=2),
    "phases": swap("slot_of(tile_index, ...)", "Slot(tile_index % STAGES, 0)"),
    "the output is read": drop("tma_wait(...)", "store_outputs", nth=2),
    "the output is seen": drop("fence_async_shared()", "store_outputs", nth=2),
}
LEAVE_Q = "consumer_release(q, ...)"
NEEDED_WHERE_PERSISTENT = {
    "room for q": drop(LEAVE_Q),
    "q has been read": drop("producer_acquire(q, ...)"),
    "q is read to the end": early(
        LEAVE_Q, to="for FULL in gl.static_range(2): ...", within="consume_work"
    ),
    "phases of q": swap(
        "consumer_wait(q, _slot)", "consumer_wait(memory.q, type(_slot)(_slot.stage, 0))"
    ),
    "items before": swap("before + step", "step", "consume_work"),
    "PARTIAL tiles before": swap("tiles_before + visits.partial", "tiles_before", "consume_work"),
    "the output is read": drop("tma_wait(...)", "store_outputs", nth=1),
    "items are read": drop("acquire_item(...)"),
    "items are written": drop("await_item(...)", "consume", nth=2),
    "zero at the end": drop("gl.store(counter, ...)"),
}
NEEDED_IN_PLACE_OF_Q = {
    "the output is read": drop("tma_wait(...)", "store_outputs", nth=2),
    "room for q": drop("consumer_release(q, ...)", "store_outputs"),
}
ALL_NEEDED = {
    "one item": NEEDED,
    "persistent": NEEDED_WHERE_PERSISTENT,
    "in place of q": NEEDED_IN_PLACE_OF_Q,
}


@pytest.mark.parametrize(
    ("form", "name"), [(form, name) for form, needed in ALL_NEEDED.items() for name in needed]
)
def test_the_machine_notices(form, name):
    inputs = inputs_of(*SHAPES[0])
    out = run_tangent("causal", inputs)
    config = CONFIG if form == "one item" else PERSISTENT

    def differs(seed: int) -> bool:
        run = Run(seed, 2, ALL_NEEDED[form][name], wide=form == "in place of q")
        return not all(map(torch.equal, run_tangent("causal", inputs, config, run), out))

    assert is_noticed(differs, 39)
