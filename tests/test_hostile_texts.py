"""Hard texts: every stage of each ends soon and in little memory, in a result or a refusal."""

from __future__ import annotations

import sys

import pytest
from support.hostile import STAGES, TEXTS, is_bounded, run_alone, warm_up

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks, and asks Linux for memory")
SAMPLE = {
    "nested mods": ("explain", "triton forward"),
    "mods of mods": ("explain", "tiles", "triton backward"),
    "and of mods": ("tiles",),
    "or of mods": ("explain", "hopper backward"),
    "params mods": ("explain",),
    "big constants": ("triton backward",),
    "squares": ("names", "triton backward"),
    "70 dims": ("triton forward",),
    "min int": ("show", "explain at lengths"),
    "long sum": ("show",),
    "points": ("explain",),
    "defs mask": ("explain at lengths",),
    "huge floats": ("cpu backward",),
}


@pytest.fixture(scope="module")
def _warm() -> None:
    warm_up()


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("name", SAMPLE)
def test_what_was_once_unbounded_is_bounded(name: str) -> None:
    for stage in SAMPLE[name]:
        found = run_alone(stage, TEXTS[name])
        assert is_bounded(found), (stage, found)


@pytest.mark.slow
@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("name", TEXTS)
def test_every_stage_is_bounded(name: str) -> None:
    found = {stage: run_alone(stage, TEXTS[name]) for stage in STAGES}
    assert {stage: each for stage, each in found.items() if not is_bounded(each)} == {}


def test_there_are_many_texts() -> None:
    assert len(TEXTS) >= 60
    assert all(len(text) <= 1 << 14 for text in TEXTS.values())
