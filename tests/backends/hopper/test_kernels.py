"""Tile sizes and stages that Hopper's kernels have, best first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from support.jobs import job_of

from attndsl.backends.base import Call, Wants
from attndsl.backends.emit.facts import PairTile, facts_of
from attndsl.backends.hopper.family import Hopper
from attndsl.backends.hopper.tile_sizes import looks_up_many_keys
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.kernels.target import machine_of
from attndsl.pipeline import lower
from attndsl.source import Source

if TYPE_CHECKING:
    from attndsl.backends.kernels.config import Config

ALL = Wants(True, True, True, frozenset(), frozenset())


def call_of(length: int, head_dim: int) -> Call:
    q = torch.empty(2, 4, length, head_dim, dtype=torch.bfloat16)
    k, v = torch.empty(2, 2, 2, length, head_dim, dtype=torch.bfloat16)
    sizes = {"batch": 2, "heads": 4, "kv_heads": 2, "q_len": length, "kv_len": length}
    return Call(q, k, v, 0.125, {**sizes, "head_dim": head_dim}, {}, {})


MAP = "tensor blocks[heads, a, c]: bool\nmask = blocks[h, q // {}, kv // {}]"
SMALL, LARGE = (128, 128, 3), (192, 128, 3)
FORWARDS = [
    ("score", 64, {2: LARGE, 128: LARGE, 197: SMALL, 384: LARGE, 512: SMALL, 577: SMALL,
                   1024: SMALL, 2048: LARGE, 8192: LARGE}),
    ("causal()", 64, {128: LARGE, 1536: SMALL, 3072: SMALL, 4096: LARGE}),
    ("sliding_window(1024)", 64, {8192: SMALL}),
    ("sliding_window(280)", 64, {8192: (64, 64, 3)}),
    ("sliding_window(280)", 40, {8192: SMALL}),
    ("mask = sliding_window(280); score = softcap(score, 50.0)", 64, {8192: (64, 64, 3)}),
    ("sliding_window(4096)", 64, {16384: LARGE}),
    ("score", 72, {577: (128, 64, 4), 1024: (192, 64, 3), 4096: (192, 64, 3)}),
    ("causal()", 96, {577: (128, 128, 2), 4096: (192, 64, 3)}),
    ("score", 128, {256: (128, 64, 4), 1024: (128, 64, 4), 2048: (128, 128, 2)}),
    ("mask = causal(); weights = dropout(softmax(score), 0.1)", 64, {512: (128, 128, 3)}),
    ("weights = sigmoid(score)", 128, {512: (128, 128, 2)}),
    ("score", 256, {512: (128, 64, 2)}),
    (MAP.format(64, 64), 128, {4096: (64, 64, 3)}),
    (MAP.format(64, 32), 64, {4096: (64, 64, 3)}),
    (MAP.format(192, 192), 128, {4096: (64, 64, 3)}),
    (MAP.format(128, 64), 128, {4096: (128, 64, 3)}),
    (MAP.format(128, 128), 128, {4096: (128, 128, 2)}),
    (MAP.format(1, 128), 128, {4096: (128, 128, 2)}),
    (MAP.format(128, 128), 64, {4096: (128, 128, 3)}),
    (MAP.format(1, 64), 128, {4096: (128, 64, 3)}),
    (MAP.format(64, 64), 256, {4096: (128, 64, 2)}),
    ("mask = q // 64 == kv // 64", 128, {4096: (128, 64, 3)}),
]  # fmt: skip


def test_maps_of_pairs_have_tiles_of_many_keys():
    lowered = lower(Source("tensor t[q_len, kv_len]: bool\nmask = causal() and t[q, kv]"), {})
    facts = facts_of(lowered.program, example_call(lowered, 128, 128, torch.bfloat16, {}))
    tile = PairTile("t", ("q", "kv"), (), "i8")
    assert not looks_up_many_keys(facts, lowered.sparsity)
    for head_dim, many in ((96, False), (112, True), (128, True), (192, False)):
        own = replace(facts, pair_tiles=(tile,), head_dim=head_dim, value_dim=head_dim)
        assert looks_up_many_keys(own, lowered.sparsity) == many
    bias = PairTile("bias", ("q", "kv"), (), "bf16")
    for tiles in ((bias,), (tile, bias)):
        assert not looks_up_many_keys(replace(facts, pair_tiles=tiles), lowered.sparsity)


BACKWARDS = [
    ("score", 64, {160: 64, 197: 64, 256: 128, 320: 64, 512: 128, 577: 128}),
    ("causal()", 64, {200: 128}),
    ("score", 128, {197: 64, 1024: 64}),
]


@pytest.mark.parametrize(
    ("text", "head_dim", "length", "tiles"),
    [(text, dim, *one) for text, dim, found in FORWARDS for one in found.items()],
)
def test_forwards_have_the_tiles_that_suit_their_lengths(text, head_dim, length, tiles):
    first = _first_config(text, head_dim, length, Task.FORWARD)
    assert (first.block_m, first.block_n, first.stages) == tiles
    assert first.persistent == (head_dim <= 128 and first.consumers > 1)
    # Of one consumer there are two programs at a time or three, which share 64k registers.
    assert (first.most_registers in (80, 128)) == (first.consumers == 1) == (first.block_m == 64)


@pytest.mark.parametrize(
    ("heads", "q_len", "head_dim", "few"),
    [(8, 64, 96, True), (8, 33, 64, True), (8, 65, 64, False), (8, 16, 64, False),
     (2, 64, 64, False), (8, 64, 192, False)],
)  # fmt: skip
def test_few_rows_of_many_heads_have_tiles_of_one_consumer(heads, q_len, head_dim, few):
    """More rows than the decode family takes, of which no head has more than 64."""
    machine, lowered = machine_of("cuda:90"), lower(Source("causal()"), {})
    call = call_of(1000, head_dim)
    call = call._replace(q=torch.empty(2, heads, q_len, head_dim, dtype=torch.bfloat16))
    (job,) = Hopper().jobs(lowered, call, Task.FORWARD, None, None)
    first = job.kernel.configs(job.on(machine), machine)[0]
    assert job.facts.few_rows == few == (first.consumers == 1)


def test_heads_are_apart_where_work_tiles_are_few_and_gradients_are_small():
    lowered = lower(Source("score"), {})

    def apart(batch, heads, kv_heads, kv_len, head_dim=64):
        q = torch.empty(batch, heads, 64, head_dim, dtype=torch.bfloat16, device="meta")
        k = torch.empty(batch, kv_heads, kv_len, head_dim, dtype=torch.bfloat16, device="meta")
        call = call_of(64, head_dim)._replace(q=q, k=k, v=k)
        (job,) = Hopper().jobs(lowered, call, Task.BACKWARD, None, ALL)
        return job.facts.heads_apart

    assert apart(1, 64, 8, 1024)
    assert not apart(1, 8, 8, 1024)
    assert not apart(2, 64, 8, 1024)
    assert apart(1, 8, 1, 8448, 128)
    assert not apart(1, 128, 1, 8448, 128)


DOCUMENTS = "tensor doc[kv_len]: int\nmask = q >= kv and doc[q] == doc[kv]"


@pytest.mark.parametrize(
    ("text", "batch", "length", "few"),
    [(DOCUMENTS, 2, 256, True), (DOCUMENTS, 2, 257, False), (DOCUMENTS, 66, 256, True),
     (DOCUMENTS, 67, 256, False), ("causal()", 2, 256, False), ("score", 2, 256, False)],
)  # fmt: skip
@pytest.mark.parametrize("task", [Task.FORWARD, Task.BACKWARD])
def test_few_tiles_are_not_listed(text, batch, length, few, task):
    machine, lowered = machine_of("cuda:90"), lower(Source(text), {})
    tensors = example_call(lowered, 64, 64, torch.bfloat16, {}).tensors
    call = call_of(length, 64)._replace(tensors=tensors)
    call = call._replace(**{name: getattr(call, name)[:1].expand(batch, -1, -1, -1)
                            for name in "qkv"})  # fmt: skip
    wanted = ALL if task is Task.BACKWARD else None
    (job,) = Hopper().jobs(lowered, call, task, None, wanted)
    config = job.kernel.configs(job.on(machine), machine)[0]
    plan = job.plan(config)
    assert job.facts.few_tiles == few
    assert (plan.listed is None) == (few or text != DOCUMENTS)
    if few:
        # What is left of the mask still says which tiles are EMPTY, and none is FULL.
        assert plan.partial
        assert not plan.full
    compile(job.text(config, machine), "module", "exec")


@pytest.mark.parametrize(
    ("text", "head_dim", "length", "rows"),
    [(text, dim, *one) for text, dim, found in BACKWARDS for one in found.items()],
)
def test_backwards_have_the_tiles_that_suit_their_lengths(text, head_dim, length, rows):
    assert _first_config(text, head_dim, length, Task.BACKWARD).block_m == rows


def _first_config(text: str, head_dim: int, length: int, task: Task) -> Config:
    machine, lowered = machine_of("cuda:90"), lower(Source(text), {})
    tensors = example_call(lowered, head_dim, head_dim, torch.bfloat16, {}).tensors
    call = call_of(length, head_dim)._replace(tensors=tensors)
    wanted = ALL if task is Task.BACKWARD else None
    (job,) = Hopper().jobs(lowered, call, task, None, wanted)
    return job.kernel.configs(job.on(machine), machine)[0]


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("param n: int; param m: int; tensor t[heads, n]: float; "
         "score = score + t[h, t5_bucket(kv - q, n, m)]", 64),
        ("param n: int; param m: int; tensor t[heads, n]: float; mask = causal(); "
         "score = score + t[h, t5_bucket_causal(q - kv, n, m)]", 64),
        ("tensor t[heads, 32]: float; score = score + t[h, t5_bucket(q - kv, 32, 128)]", 128),
        ("param cap: float; score = softcap(score, cap)", 128),
        ("param w: int; mask = causal() and q - kv < w", 128),
    ],
)  # fmt: skip
def test_long_scores_with_params_begin_with_few_keys(text, columns):
    """Larger tiles spill there, and take three compilations to find that out."""
    machine, lowered = machine_of("cuda:90"), lower(Source(text), {})
    tensors = {decl.name: torch.zeros(2, 32) for decl in lowered.program.tensors}
    params = {decl.name: 32.0 if decl.name == "cap" else 32 for decl in lowered.program.params}
    for head_dim, expected in ((64, 128), (128, columns)):
        call = call_of(4096, head_dim)
        call = call._replace(tensors=tensors, params=params)
        (job,) = Hopper().jobs(lowered, call, Task.FORWARD, None, None)
        assert job.kernel.configs(job.on(machine), machine)[0].block_n == expected


@pytest.mark.parametrize(
    ("text", "both"),
    [
        ("mask = global_tokens(64) or local_window(128)", False),
        ("param n: int; param w: int; mask = block_diffusion(n, w)", False),
        ("causal()", False),
        ("score = tanh(score)", True),
        ("mask = causal(); score = softcap(score, 30.0)", True),
    ],
)
def test_tiles_without_a_mask_have_a_loop_of_their_own_where_masks_take_long(text, both):
    """A backward with one loop does a mask's work in all tiles."""
    machine, lowered = machine_of("cuda:90"), lower(Source(text), {})
    params = {decl.name: 64 for decl in lowered.program.params}
    call = call_of(1024, 128)._replace(params=params)
    job = job_of(lowered, facts_of(lowered.program, call), "backward_kv")
    found = {config.peeled for config in job.kernel.configs(job, machine)}
    assert found == ({True, False} if both else {True})


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    ("text", "columns"),
    [
        ("param n: int; param w: int; mask = block_diffusion(n, w)", 64),
        ("param a: int; param c: int; param t: int; mask = sta3d(a, c, t, 2, 2, 2)", 64),
        ("param n: int; mask = natten2d(n, n, 7, 7)", 128),
        (f"mask = {' + '.join(f'sin(q * kv / {n}.0)' for n in range(5, 11))} > 0.5", None),
        ("mask = log(1.0 + q + kv) > 0.5; score = log(1.0 + abs(score)) + log(2.0 + abs(score))",
         None),
        ("mask = log(1.0 + abs(score)) + log(2.0 + abs(score)) > 0.5", None),
    ],
)  # fmt: skip
def test_forwards_with_long_masks_have_few_keys(text, columns, head_dim):
    """A mask is no work of FULL tiles, so that it may take longer than a score."""
    machine, lowered = machine_of("cuda:90"), lower(Source(text), {})
    params = {decl.name: 64 for decl in lowered.program.params}
    call = call_of(1024, head_dim)._replace(params=params)
    why = Hopper().why_not(lowered, call, Task.FORWARD, None, None)
    assert (why is None) == (columns is not None), why
    if columns is None:
        assert "this much work per pair" in why
        return
    (job,) = Hopper().jobs(lowered, call, Task.FORWARD, None, None)
    found = job.kernel.configs(job.on(machine), machine)
    most = 64 if head_dim == 256 else columns
    assert max(config.block_n for config in found) == most
    assert head_dim < 256 or {config.stages for config in found} == {2}
