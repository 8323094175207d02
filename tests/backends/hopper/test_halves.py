"""FULL tiles of the forward by halves: what a machine of tasks notices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.forward_text import FORMS, PERSISTENT, SMALL, inputs_of, run_forward
from support.kernel_text import Run
from support.mutation import drop, is_noticed, number_of, swap

USUAL = ("full", "causal", "sink", "signs")
FORMED = ("two consumers", "three stages", "three consumers", "early")
CASES = [
    pytest.param(name, form, marks=[pytest.mark.slow] * ((across + down) % 2))
    for across, name in enumerate(USUAL)
    for down, form in enumerate(FORMED)
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_halves_make_what_whole_tiles_make(name, form):
    config = PERSISTENT if form == "two consumers" else FORMS[form]
    for q_len, kv_len in ((40, 40), (17, 50)):
        inputs = inputs_of(name, q_len, kv_len, 2, 8)
        texts: list[str] = []

        def change(text: str, texts: list[str] = texts) -> str:
            texts.append(text)
            return text

        out, lse = run_forward(name, inputs, config, Run(1, 3, flags={"HALVED": False}))
        found, found_lse = run_forward(name, inputs, config, Run(2, 5, change))
        assert number_of(texts[0], "attend_by_halves(...)")
        assert torch.allclose(found.float(), out.float(), atol=1e-3, rtol=1e-3)
        assert torch.allclose(found_lse, lse, atol=1e-4)


@pytest.mark.parametrize("name", ["window", "alibi", "cap", "documents", "dropout", "bias"])
def test_others_have_whole_tiles(name):
    def change(text: str) -> str:
        assert not number_of(text, "attend_by_halves(...)")
        return text

    run_forward(name, inputs_of(name, 9, 9, 4, 8), PERSISTENT, Run(change=change))
    run_forward("causal", inputs_of("causal", 9, 9, 4, 8), FORMS["one stage"], Run(change=change))


HALVES = "attend_by_halves"
NEEDED = {
    "scores have come": swap("warpgroup_mma_wait(2, deps=[scoring])", "scoring.value"),
    "k stays": swap("consumer_release(_channel, _slot, more)", "consumer_release(_channel, _slot)"),
    "k is left": drop("consumer_release(k, ...)", HALVES, nth=2),
    "v is left": drop("consumer_release(v, ...)", HALVES, nth=1),
    "v has come": drop("consumer_wait(v, ...)", HALVES, nth=2),
    "the next k has come": drop("consumer_wait(k, ...)", HALVES, nth=2),
    "the other half": swap("v_tile.slice(SIDE, SIDE)", "v_tile.slice(0, SIDE)"),
    "weights are used up": swap("not uses_fixed_max", "True", "consume_work"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_the_machine_notices(name):
    inputs = inputs_of("causal", 60, 60, 4, 8)
    out, lse = run_forward("causal", inputs, SMALL)
    config = replace(PERSISTENT, block_m=24, consumers=3)

    def differs(seed: int) -> bool:
        found = run_forward("causal", inputs, config, Run(seed, 2, NEEDED[name]))
        close = torch.allclose(found[0].float(), out.float(), atol=2e-3, rtol=2e-3)
        return not close or not torch.allclose(found[1], lse, atol=1e-3)

    assert is_noticed(differs, 8)
