"""Consumers of the forward leave out tiles that none of their rows attend to."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.forward_text import FORMS, PAIRS, PERSISTENT, SMALL, TEXTS, inputs_of, run_forward
from support.kernel_text import Run
from support.mutation import before, drop, is_noticed, swap

from attndsl.backends.emit.facts import facts_of
from attndsl.backends.hopper.features.tile_skipping import own_tiles, parts_of_lists
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.passes.tiles.sparsity import Sparsity
from attndsl.passes.tiles.tile_plan import FORWARD
from attndsl.pipeline import lower
from attndsl.source import Source

if TYPE_CHECKING:
    from attndsl.backends.kernels.config import Config

THREE = FORMS["three consumers"]


def worked(name: str, inputs: Any, config: Config, skips: bool) -> tuple[int, Any, Any]:
    """How many tiles consumers computed scores of, the output and the log-sum-exp."""
    seen: list[int] = []

    def change(text: str) -> str:
        return before("score = warpgroup_mma_wait(...)", "noted(1)")(text)

    flags = {} if skips else {"SKIPS": False}
    out, lse = run_forward(name, inputs, config, Run(1, 3, change, noted=seen.append, flags=flags))
    return len(seen), out, lse


@pytest.mark.parametrize(
    ("name", "config", "q_len", "kv_len", "items", "fewer"),
    [
        # Of 24 rows and 8 keys: the first 8 rows have 2 tiles less, the next 8 have 1.
        ("causal", THREE, 48, 48, 2, 2 * 3),
        # The last item's 8 rows have 7 tiles; the others' consumers take one each.
        ("causal", THREE, 56, 56, 3, 2 * 3 + 2 * (7 - 1)),
        ("full", THREE, 8, 40, 1, 2 * (5 - 1)),
        ("full", THREE, 24, 40, 1, 0),
        # Without a maximum to follow: rows 24 to 29 alone have keys, from their own on.
        ("cap and sink", replace(SMALL, block_m=24, consumers=3), 48, 48, 2, 3 + 2 * 2),
        ("causal", SMALL, 32, 32, 2, 2),
        ("nothing", THREE, 24, 24, 1, 0),
        # Of 13 keys a document. Rows 0-7, 8-15, 16-23 have tiles 0; 0-1; 1-2 of 0-2, all PARTIAL,
        # rows 24-31, 32-39, 40-47 tiles 1-3; 3-4; 4-5 of 1-5.
        ("documents", THREE, 48, 48, 2, 2 + 1 + 1 + 2 + 3 + 3),
        ("documents", SMALL, 16, 16, 1, 1),
        # All tiles are FULL, and all rows of some consumers are padding: they take one each.
        ("first document", THREE, 8, 40, 1, 2 * (5 - 1)),
        ("first document", PERSISTENT, 8, 16, 1, 2 - 1),
    ],
)
def test_tiles_are_left_out(name, config, q_len, kv_len, items, fewer):
    inputs = inputs_of(name, q_len, kv_len, 2, 8)
    all_tiles, out, lse = worked(name, inputs, config, skips=False)
    some_tiles, found, found_lse = worked(name, inputs, config, skips=True)
    assert -(-q_len // config.block_m) == items
    assert all_tiles - some_tiles == 8 * fewer
    assert torch.allclose(found.float(), out.float(), atol=1e-3, rtol=1e-3)
    assert torch.allclose(found_lse, lse, atol=1e-4)


NEEDED = {
    "the first ones pass": drop("skip_tiles(...)", "consume_work", nth=1),
    "the last ones pass": drop("skip_tiles(...)", "consume_work", nth=2),
    "room for v": drop("consumer_release(v, ...)", "skip_tiles"),
    "which is the last": swap("gl.where(own_full > 0, tiles, ended)", "tiles"),
    "whose weights are first": swap(
        "tile_index = tiles_before + begin_partial", "tile_index = tiles_before"
    ),
    "whether they attend": swap("there & rows_have(*_tile)", "there & ~rows_have(*_tile)"),
}


@pytest.mark.parametrize("name", NEEDED)
def test_the_machine_notices(name):
    inputs = inputs_of("causal", 56, 56, 4, 8)
    out, lse = run_forward("causal", inputs, SMALL)

    def differs(seed: int) -> bool:
        found = run_forward("causal", inputs, THREE, Run(seed, 2, NEEDED[name]))
        close = torch.allclose(found[0].float(), out.float(), atol=2e-3, rtol=2e-3)
        return not close or not torch.allclose(found[1], lse, atol=1e-3)

    assert is_noticed(differs, 6)


@pytest.mark.parametrize("config", [PERSISTENT, THREE], ids=["two", "three"])
@pytest.mark.parametrize("name", ["causal", "window", "alibi"])
def test_rows_of_any_length(name, config):
    for q_len, kv_len in ((1, 9), (17, 40), (41, 30)):
        inputs = inputs_of(name, q_len, kv_len, 4, 8)
        _, out, lse = worked(name, inputs, config, skips=False)
        _, found, found_lse = worked(name, inputs, config, skips=True)
        assert torch.allclose(found.float(), out.float(), atol=1e-3, rtol=1e-3)
        assert torch.allclose(found_lse, lse, atol=1e-4)


@pytest.mark.parametrize("mask", [TEXTS["documents"], "abs(q * q - kv) < 9"])
def test_the_parts_of_lists_need_no_plan(monkeypatch, mask):
    lowered = lower(Source(mask), {})
    facts = facts_of(lowered.program, example_call(lowered, 64, 64, torch.bfloat16, {}))
    config = replace(THREE, block_m=192, block_n=128)
    assert own_tiles(lowered, facts, Task.FORWARD, config).parts == 3
    monkeypatch.setattr(Sparsity, "loop", None)
    assert parts_of_lists(lowered, facts, Task.FORWARD, config) == 3
    assert parts_of_lists(lowered, facts, Task.FORWARD_TANGENT, config) == 3
    assert parts_of_lists(lowered, facts, Task.BACKWARD, config) == 1
    tiles = replace(facts, pair_tiles=(PAIRS["bias"],))
    assert parts_of_lists(lowered, tiles, Task.FORWARD, config) == 1


@pytest.mark.parametrize(
    ("mask", "block_m", "skips"),
    [
        ("causal()", 192, True), ("causal()", 128, False), ("causal()", 256, True),
        ("sliding_window(1000)", 192, True), ("prefix_lm(700)", 192, True),
        ("kv % 5 < 3", 192, False), ("q % 640 < 64", 192, True),
    ],
)  # fmt: skip
def test_plans_tell_whether_rows_skip(mask, block_m, skips):
    sparsity = lower(Source(mask), {}).sparsity
    loop = sparsity.loop_of_rows(block_m, 64, 128, shifted=False, indexed=False)
    assert (loop is not None) == skips
    assert loop is None or loop == sparsity.loop(FORWARD, 64, 128, shifted=False, indexed=False)
