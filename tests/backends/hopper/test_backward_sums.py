"""What the text of the Hopper backward leaves for gradients of biases and of distances."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from support import backward_text
from support.backward_text import (
    CASES,
    CONFIG,
    PERSISTENT,
    ROWS,
    SHAPES,
    WIDTH,
    Stored,
    attention_of,
    bias_of,
    inputs_of,
    run_backward,
)  # fmt: skip
from support.kernel_text import Run
from support.mutation import drop, early, is_noticed, swap

from attndsl.backends.base import StoredDS
from attndsl.backends.device.library import STATISTICS_PADDING

if TYPE_CHECKING:
    from attndsl.backends.kernels.config import Config


def slopes_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """dS (batch, heads, q_len, kv_len) of the program ``bias``."""
    q, k, v, do = (x.float() for x in tensors)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    score = q @ k.mT * WIDTH**-0.5 + bias_of(q.shape[1], rows, columns).float()
    weights = score.masked_fill(rows < columns, -torch.inf).softmax(-1)
    dweights = do @ v.mT
    return weights * (dweights - (weights * dweights).sum(-1, keepdim=True))


def run_with_slopes(tensors: list[torch.Tensor], config: Config, run: Run) -> torch.Tensor:
    """dS (batch, heads, q_len, kv_len) of the program ``bias``, zeros where none was stored."""
    (batch, heads, q_len, _), kv_len = tensors[0].shape, tensors[1].shape[2]
    counts = -(-kv_len // config.block_n), -(-q_len // ROWS)
    shape = (batch, heads, counts[0] * config.block_n, counts[1] * ROWS)
    slopes = StoredDS(
        torch.full(shape, torch.nan, dtype=torch.float16),
        torch.zeros(batch, heads, *counts, dtype=torch.int8),
    )
    run_backward("bias", tensors, config, run, Stored(slopes=slopes))
    some = slopes.stored.repeat_interleave(config.block_n, 2).repeat_interleave(ROWS, 3)
    found = slopes.values.masked_fill(some == 0, 0.0)
    return found[:, :, :kv_len, :q_len].mT.float()


@pytest.mark.parametrize("config", [CONFIG, PERSISTENT], ids=["usual", "persistent"])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_gradients_of_scores_are_stored(config, shape):
    tensors = inputs_of(*SHAPES[shape])
    found = run_with_slopes(tensors, config, Run(shape, 2))
    torch.testing.assert_close(found, slopes_of(tensors), atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("config", [CONFIG, PERSISTENT], ids=["usual", "persistent"])
def test_gradients_of_dead_scores_are_zero_whatever_rows_have(config, monkeypatch):
    """As programs are that tensors bound the keys of."""
    clean = [x.abs() for x in inputs_of(128, 48, 2)]
    rows = backward_text.statistics("bias", clean)
    monkeypatch.setattr(backward_text, "statistics", lambda name, tensors: rows)
    q, k, v, do = (x.clone() for x in clean)
    # The machine takes NaN for what has yet to come. Of numbers above 0 infinities make none.
    v[:, :, 30] = torch.inf
    found = run_with_slopes([q, k, v, do], config, Run(1, 2, flags={"SPARES_DEAD": True}))
    wanted = slopes_of(clean)
    causal = torch.arange(128)[:, None] >= torch.arange(48)
    assert (found.masked_select(~causal) == 0.0).all()
    spoilt = torch.zeros(128, 48, dtype=torch.bool)
    spoilt[30:, 30] = True
    assert torch.equal(found.isinf(), spoilt.expand_as(found))
    torch.testing.assert_close(found[:, :, ~spoilt], wanted[:, :, ~spoilt], atol=4e-3, rtol=4e-3)


NEEDED_TO_STORE = {
    "they have been read": drop("tma_wait(...)", "add_query_tile"),
    "both have written": drop("sync_consumers()", "add_query_tile"),
    "heads": swap(
        "number = head.b * sizes.heads + head.h", "number = head.b * sizes.heads", "store_ds"
    ),
    "what is stored": swap("row // _tile", "keys.first // _tile", "store_ds"),
}


@pytest.mark.parametrize("name", NEEDED_TO_STORE)
def test_the_machine_notices_what_is_stored(name):
    tensors = inputs_of(240, 40, 2)

    def differs(seed: int) -> bool:
        found = run_with_slopes(tensors, CONFIG, Run(seed, 1, NEEDED_TO_STORE[name]))
        return not torch.allclose(found, slopes_of(tensors), atol=1e-2)

    assert is_noticed(differs, 6)


def distances_by(name: str, tensors: list[torch.Tensor], config: Config, run: Run) -> torch.Tensor:
    """Sums of dS by distance, (heads, from minus all keys of whole tiles on)."""
    q_len, kv_tiles = tensors[0].shape[2], -(-tensors[1].shape[2] // CONFIG.block_n)
    step = STATISTICS_PADDING.value
    padded = -(-q_len // step) * step
    sums = torch.zeros(1, 2, kv_tiles, padded + kv_tiles * CONFIG.block_n)
    run_backward(name, tensors, config, run, Stored(distances=sums))
    return sums[0].sum(1)


def distances_of(name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    """As :func:`distances_by`, by torch."""
    q, k, v, do = (x.float() for x in tensors)
    added = torch.zeros(1, 2, q.shape[2], k.shape[2], requires_grad=True)
    out, _ = attention_of(name, q, k, v, added)
    (slopes,) = torch.autograd.grad(out, added, do)
    first = -(-k.shape[2] // CONFIG.block_n) * CONFIG.block_n
    step = STATISTICS_PADDING.value
    found = torch.zeros(2, -(-q.shape[2] // step) * step + first)
    for distance in range(1 - k.shape[2], q.shape[2]):
        lines = slopes[0].diagonal(-distance, 1, 2)
        found[:, first + distance] = lines.sum(-1)
    return found


SUMMED = ("full", "causal", "window", "some rows", "nothing", "alibi", "bias", "table")


@pytest.mark.parametrize(("name", "shape"), [case for case in CASES if case.values[0] in SUMMED])
def test_sums_along_diagonals(name, shape):
    tensors = inputs_of(*SHAPES[shape])
    expected = distances_of(name, tensors)
    one_stage = replace(CONFIG, stages=1)
    for seed, config in enumerate((CONFIG, one_stage, PERSISTENT, PERSISTENT)):
        found = distances_by(name, tensors, config, Run(seed, 1 + seed % 2))
        torch.testing.assert_close(found, expected, atol=0.02, rtol=4e-3)


ANNOUNCE = "producer_commit(ds, ...)"
NEEDED_TO_ADD = {
    "dS is there": drop("consumer_wait(memory.ds, ...)"),
    "phases of dS": swap(
        "consumer_wait(memory.ds, _slot)", "consumer_wait(memory.ds, _slot._replace(phase=0))"
    ),
    "dS is announced": drop(ANNOUNCE),
    "both have written": early(f"if PART == 0: {ANNOUNCE}", to="sync_consumers()"),
    "dS has been read": swap(
        "if tile_index > tiles_before: add_tile(tile_index - 1, *_sums)",
        "if tile_index > tiles_before + 1: add_tile(tile_index - 2, *_sums)",
        nth=1,
    ),
    "the last tile": swap("tile_index > tiles_before", "False", "load_work", nth=2),
    "heads": swap("(head.b * sizes.heads + head.h) * kv_tiles", "head.b * sizes.heads * kv_tiles"),
    "places": swap("sums_before = line + first", "sums_before = line"),
}


@pytest.mark.parametrize("name", NEEDED_TO_ADD)
def test_the_machine_notices_sums_along_diagonals(name):
    several = [inputs_of(240, 40, 1), inputs_of(100, 90, 2)]
    usual = [distances_of("full", tensors) for tensors in several]

    def differs(seed: int) -> bool:
        run = Run(seed, 2, NEEDED_TO_ADD[name])
        found = [distances_by("full", tensors, PERSISTENT, run) for tensors in several]
        return any(not torch.allclose(a, b, atol=0.05) for a, b in zip(found, usual, strict=True))

    assert is_noticed(differs, 8)
