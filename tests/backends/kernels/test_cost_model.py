"""Estimates of the work of a pair, and the tile sizes that follow from them."""

from __future__ import annotations

import pytest
import torch
from support.cross import PORTABLE

from attndsl.backends.base import Wants
from attndsl.backends.emit.facts import facts_of, with_forms, with_gradients
from attndsl.backends.kernels.config import Config, is_hopeless
from attndsl.backends.kernels.cost_model import work_of_pair
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Job
from attndsl.backends.kernels.target import machine_of, parse_target
from attndsl.backends.triton import tiles
from attndsl.backends.triton.captures import distance_sums, pair_gradients
from attndsl.backends.triton.tiles import Widths
from attndsl.pipeline import lower
from attndsl.source import Source

SHARED = 232448
TILES = {
    "forward": tiles.FORWARD,
    "backward_kv": tiles.BACKWARD_KV,
    "backward_q": tiles.BACKWARD_Q,
    "distances": distance_sums.TILES,
    "pairs": pair_gradients.TILES,
}


def _work(
    text: str,
    backward: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    wants: Wants | None = None,
) -> int:
    lowered = lower(Source(text), {})
    facts = facts_of(lowered.program, example_call(lowered, 64, 64, dtype, {}))
    facts = with_forms(facts, lowered.program, parse_target("cuda:90"))
    return work_of_pair(lowered, with_gradients(facts, wants or Wants()), backward)


def test_rows_and_heads_are_not_the_work_of_pairs() -> None:
    assert _work("score = score") == 0
    assert _work("tensor t[heads]: float\nscore = score\nsink = exp(t[h])") == 0
    assert _work("mask = q >= kv") == 1
    assert _work("score = score + sin(float(q - kv))") < _work("score = score + sin(score)")
    of_rows = _work("score = score * sin(float(q))")
    assert 0 < of_rows < _work("score = score * sin(float(q - kv))")


def test_fast_forms_take_less() -> None:
    text = "score = 3.0 * tanh(score / 3.0)"
    assert _work(text) < _work(text, dtype=torch.float32)


def test_derivatives_count_in_a_backward() -> None:
    text = "param c: float\nscore = c * sin(score)"
    forward, backward = _work(text), _work(text, backward=True)
    assert backward > forward + 50
    assert _work(text, True, wants=Wants(params=frozenset({"c"}))) >= backward


def test_divisions_of_64_bits_take_more() -> None:
    text = "param n: int\nmask = {} % n < 3"
    assert _work(text.format("(q * kv)")) > _work(text.format("(q - kv)")) + 40


@pytest.mark.parametrize("width", [16, 64, 128, 256, 512])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("name", TILES)
def test_much_work_makes_small_tiles(name: str, width: int, element_bytes: int) -> None:
    kernel = TILES[name]
    widths = Widths(width, width, element_bytes)
    few = kernel.candidates(widths, SHARED, of_pair=10)
    assert few == kernel.candidates(widths, SHARED)
    many = kernel.candidates(widths, SHARED, of_pair=300)
    assert max(config.elements for config in many) <= 8
    if kernel is tiles.FORWARD:
        some = kernel.candidates(widths, SHARED, of_pair=100)
        assert max(config.elements for config in some) <= 32


@pytest.mark.parametrize(("width", "value"), [(16, 128), (128, 16), (16, 256)])
def test_narrow_products_of_fp32_are_not_shared_by_too_many_warps(width: int, value: int) -> None:
    # Triton 3.6 on an H200: dK was wrong, or the kernel failed, with 64 keys and eight warps.
    for kernel in (tiles.FORWARD, tiles.BACKWARD_KV, tiles.BACKWARD_Q):
        for config in kernel.candidates(Widths(width, value, 4), SHARED):
            rows = config.block_n if kernel is tiles.BACKWARD_KV else config.block_m
            assert config.warps < 8 or rows >= 128


def test_what_is_not_tried_after_a_kernel_that_spilled() -> None:
    spilled = Config(64, 128, 8, 3)
    assert is_hopeless(Config(64, 128, 8, 2), spilled)
    assert is_hopeless(Config(128, 128, 8, 3), spilled)
    assert not is_hopeless(Config(64, 64, 4, 2), spilled)
    assert not is_hopeless(Config(64, 128, 8, 3, peeled=False), spilled)


def test_kernels_that_are_shown_have_the_tiles_of_those_that_run() -> None:
    lowered = lower(Source("score = score + sin(score) + cos(score); mask = q >= kv"), {})
    facts = facts_of(lowered.program, example_call(lowered, 64, 64, torch.bfloat16, {}))
    machine, widths = machine_of("cuda:90"), Widths(64, 64, 2)
    own = {"forward": tiles.FORWARD, "backward_kv": tiles.BACKWARD_KV}
    for name, kernel in (own | {"backward_q": tiles.BACKWARD_Q}).items():
        job = Job(PORTABLE[name], lowered, facts).on(machine)
        assert job.work_of_pair > 100
        found = kernel.candidates(widths, SHARED, job.work, job.work_of_pair)
        assert job.kernel.configs(job, machine) == found
