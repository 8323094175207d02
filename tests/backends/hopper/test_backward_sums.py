"""What the text of the Hopper backward leaves for gradients of biases and of distances."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.backward_text import (
    CASES,
    CONFIG,
    PERSISTENT,
    ROWS,
    SHAPES,
    WIDTH,
    attention_of,
    bias_of,
    inputs_of,
    run_text,
)  # fmt: skip
from support.gluon_machine import altered

from attndsl.backends.base import Slopes
from attndsl.backends.triton.library import STATISTICS_PADDING

if TYPE_CHECKING:
    from types import SimpleNamespace

    from attndsl.backends.triton.tiles import Config


@pytest.fixture
def run(gluon: SimpleNamespace) -> Any:
    """Runs the backward kernel of a program, see ``backward_text.run_text``."""
    return partial(run_text, gluon)


def slopes_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """dS (batch, heads, q_len, kv_len) of the program ``bias``."""
    q, k, v, do = (x.float() for x in tensors)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    rows, columns = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    score = q @ k.mT * WIDTH**-0.5 + bias_of(q.shape[1], rows, columns).float()
    weights = score.masked_fill(rows < columns, -torch.inf).softmax(-1)
    dweights = do @ v.mT
    return weights * (dweights - (weights * dweights).sum(-1, keepdim=True))


def run_with_slopes(
    run: Any, tensors: list[torch.Tensor], config: Config, seed: int, **more: Any
) -> torch.Tensor:
    """dS (batch, heads, q_len, kv_len) of the program ``bias``, zeros where none was stored."""
    (batch, heads, q_len, _), kv_len = tensors[0].shape, tensors[1].shape[2]
    counts = -(-kv_len // config.block_n), -(-q_len // ROWS)
    shape = (batch, heads, counts[0] * config.block_n, counts[1] * ROWS)
    slopes = Slopes(
        torch.full(shape, torch.nan, dtype=torch.float16),
        torch.zeros(batch, heads, *counts, dtype=torch.int8),
    )
    run("bias", tensors, config, seed, slopes=slopes, **more)
    some = slopes.stored.repeat_interleave(config.block_n, 2).repeat_interleave(ROWS, 3)
    found = slopes.values.masked_fill(some == 0, 0.0)
    return found[:, :, :kv_len, :q_len].mT.float()


@pytest.mark.parametrize("config", [CONFIG, PERSISTENT], ids=["usual", "persistent"])
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_gradients_of_scores_are_stored(run, config, shape):
    tensors = inputs_of(*SHAPES[shape])
    found = run_with_slopes(run, tensors, config, shape, programs=2)
    torch.testing.assert_close(found, slopes_of(tensors), atol=4e-3, rtol=4e-3)


NEEDED_TO_STORE = {
    "they have been read": (
        "    if PART == 0:\n        tma_wait(0)\n    meet()", "    meet()",
    ),
    "both have written": ("    meet()\n    slope_row", "    slope_row"),
    "heads": ("slope_row = (b * heads + h) *", "slope_row = b * heads *"),
    "what is stored": ("slope_tile = slope_row //", "slope_tile = own //"),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED_TO_STORE)
def test_the_machine_notices_what_is_stored(run, name):
    tensors = inputs_of(240, 40, 2)
    old, new = NEEDED_TO_STORE[name]

    def change(text: str) -> str:
        return altered(text, old, new)

    def noticed(seed: int) -> bool:
        try:
            found = run_with_slopes(run, tensors, CONFIG, seed, change=change)
        except AssertionError:
            return True
        return not torch.allclose(found, slopes_of(tensors), atol=1e-2)


def distances_by(
    run: Any, name: str, tensors: list[torch.Tensor], *more: Any, **changes: Any
) -> Any:
    """Sums of dS by distance, (heads, from minus all keys of whole tiles on)."""
    q_len, kv_tiles = tensors[0].shape[2], -(-tensors[1].shape[2] // CONFIG.block_n)
    step = STATISTICS_PADDING.value
    padded = -(-q_len // step) * step
    sums = torch.zeros(1, 2, kv_tiles, padded + kv_tiles * CONFIG.block_n)
    run(name, tensors, *more, distances=sums, **changes)
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
def test_sums_along_diagonals(run, name, shape):
    tensors = inputs_of(*SHAPES[shape])
    expected = distances_of(name, tensors)
    one_stage = replace(CONFIG, stages=1)
    for seed, config in enumerate((CONFIG, one_stage, PERSISTENT, PERSISTENT)):
        found = distances_by(run, name, tensors, config, seed, programs=1 + seed % 2)
        torch.testing.assert_close(found, expected, atol=0.02, rtol=4e-3)


ANNOUNCE = "mbarrier.arrive(ds_full.index(count & 1), count=1)"
NEEDED_TO_ADD = {
    "dS is there": [("    mbarrier.wait(ds_full.index(place), phase)\n", "")],
    "phases of dS": [("ds_full.index(place), phase", "ds_full.index(place), 0")],
    "dS is announced": [(ANNOUNCE, "pass")],
    "both have written": [
        (ANNOUNCE, "pass"), ("    meet()\n", f"    if PART == 0: {ANNOUNCE}\n    meet()\n"),
    ],
    "dS has been read": [
        ("            if count > done:\n                add_tile(count - 1, sums_before, ds_s",
         "            if count > done + 1:\n                add_tile(count - 2, sums_before, ds_s"),
    ],
    "the last tile": [("\n    if count > done:\n", "\n    if False:\n")],
    "heads": [("((b * heads + h) * kv_tiles + tile)", "(b * heads * kv_tiles + tile)")],
    "places": [("            sums_before = line + first", "            sums_before = line")],
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED_TO_ADD)
def test_the_machine_notices_sums_along_diagonals(run, name):
    several = [inputs_of(240, 40, 1), inputs_of(100, 90, 2)]
    usual = [distances_of("full", tensors) for tensors in several]

    def change(text: str) -> str:
        for old, new in NEEDED_TO_ADD[name]:
            text = altered(text, old, new)
        return text

    def noticed(seed: int) -> bool:
        try:
            found = [
                distances_by(run, "full", tensors, PERSISTENT, seed, change=change, programs=2)
                for tensors in several
            ]
        except AssertionError:
            return True
        return any(not torch.allclose(a, b, atol=0.05) for a, b in zip(found, usual, strict=True))

    assert any(map(noticed, range(1, 9)))
