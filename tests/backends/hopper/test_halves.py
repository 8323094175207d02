"""FULL tiles of the forward by halves: what a machine of tasks notices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.forward_text import FORMS, PERSISTENT, SMALL, inputs_of
from support.gluon_machine import altered

HALVED = "HALVED = tl.constexpr(True)"


USUAL = ("full", "causal", "sink", "signs")
FORMED = ("two consumers", "three stages", "three consumers", "early")
CASES = [
    pytest.param(name, form, marks=[pytest.mark.slow] * ((across + down) % 2))
    for across, name in enumerate(USUAL)
    for down, form in enumerate(FORMED)
]


@pytest.mark.parametrize(("name", "form"), CASES)
def test_halves_make_what_whole_tiles_make(run, name, form):
    config = PERSISTENT if form == "two consumers" else FORMS[form]
    for q_len, kv_len in ((40, 40), (17, 50)):
        inputs = inputs_of(name, q_len, kv_len, 2, 8)
        texts: list[str] = []

        def change(text: str, texts: list[str] = texts) -> str:
            texts.append(text)
            return altered(text, HALVED, "HALVED = tl.constexpr(False)")

        out, lse = run(name, inputs, config, 1, 3, change=change)
        found, found_lse = run(name, inputs, config, 2, 5)
        assert "def attend_by_halves" in texts[0]
        assert torch.allclose(found.float(), out.float(), atol=1e-3, rtol=1e-3)
        assert torch.allclose(found_lse, lse, atol=1e-4)


@pytest.mark.parametrize("name", ["window", "alibi", "cap", "documents", "dropout", "bias"])
def test_others_have_whole_tiles(run, name):
    def change(text: str) -> str:
        assert "HALVED = tl.constexpr(False)" in text
        return text

    run(name, inputs_of(name, 9, 9, 4, 8), PERSISTENT, change=change)
    run("causal", inputs_of("causal", 9, 9, 4, 8), FORMS["one stage"], change=change)


NEEDED = {
    "scores have come": ("score = warpgroup_mma_wait(2, deps=[scoring])", "score = scoring.value"),
    "k stays": ("mbarrier.arrive(k_empty.index(stage), count=1, pred=more)",
                "mbarrier.arrive(k_empty.index(stage), count=1)"),
    "k is left": ("slot_of(end - 1, STAGES)\n    mbarrier.arrive(k_empty.index(stage), count=1)",
                  "slot_of(end - 1, STAGES)"),
    "v is left": ("    mbarrier.arrive(v_empty.index(before), count=1)\n    for", "    for"),
    "v has come": ("        mbarrier.wait(v_full.index(stage), phase)\n", ""),
    "the next k has come": ("mbarrier.wait(k_full.index(next_stage), next_phase)", "pass"),
    "the other half": ("v.slice(SIDE, SIDE), adding", "v.slice(0, SIDE), adding"),
    "weights are used up": ("        if not anchored:\n            acc = add_last",
                            "        if True:\n            acc = add_last"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
def test_the_machine_notices(run, name):
    inputs = inputs_of("causal", 60, 60, 4, 8)
    out, lse = run("causal", inputs, SMALL)
    old, new = NEEDED[name]
    config = replace(PERSISTENT, block_m=24, consumers=3)

    def noticed(seed: int) -> bool:
        try:
            found = run(
                "causal", inputs, config, seed, 2, change=lambda text: altered(text, old, new)
            )
        except AssertionError:
            return True
        close = torch.allclose(found[0].float(), out.float(), atol=2e-3, rtol=2e-3)
        return not close or not torch.allclose(found[1], lse, atol=1e-3)

    assert any(map(noticed, range(1, 9)))
