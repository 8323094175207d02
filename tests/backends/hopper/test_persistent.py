"""Programs of many query tiles compute what those of one each do, bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.jobs import configs_of, job_of

import attndsl
from attndsl.backends.base import Backward, Call, Wants
from attndsl.backends.emit.facts import facts_of
from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.hopper.tile_sizes import CANDIDATES
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.kernels.target import machine_of
from attndsl.backends.log_sum import public_lse
from attndsl.pipeline import lower
from attndsl.runtime.program_store import default_cache
from attndsl.source import Source

TEXTS = {
    "full": "score",
    "causal": "causal()",
    "window": "sliding_window(200)",
    "prefix": "prefix_lm(150)",
    "documents": "tensor doc[q_len]: int\nmask = q >= kv and doc[q] == doc[kv]",
    "alibi": "mask = causal()\nscore = score + alibi()",
    "cap": "mask = causal()\nscore = softcap(score, 2.0)",
    "gain": "tensor gain[heads]: float\nmask = causal()\nscore = gain[h] * score",
    "signs": "mask = causal()\nscore = (1 - h) * score",
    "sink": "mask = causal()\nsink = 0.5",
    "nothing": "q < 0",
    "some rows": "q < 300 and q >= 100 and kv >= q",
}
SIZES = (
    (1, 1, 1, 1, 1),
    (1, 4, 4, 129, 127),
    (2, 8, 2, 1000, 1000),
    (2, 6, 3, 300, 700),
    (1, 8, 8, 2048, 2048),
    (3, 20, 1, 1500, 1500),
)
"""Batch, heads, kv heads, q_len, kv_len: fewer query tiles than processors, and many more."""


@pytest.mark.parametrize(
    ("text", "dim", "persistent"),
    [
        ("causal()", 64, True),
        ("sliding_window(9)", 128, True),
        ("score", 128, True),
        ("causal()", 256, False),
        ("mask = causal()\nscore = score + alibi()", 128, True),
        ("mask = causal()\nscore = score + alibi()", 16, False),
    ],
)
def test_which_are_persistent(text, dim, persistent):
    """``tune`` measures the others too. Head dim 16 stands for fp16."""
    lowered = lower(Source(text), {})
    dtype = torch.float16 if dim == 16 else torch.bfloat16
    facts = facts_of(lowered.program, example_call(lowered, dim, dim, dtype, {}))
    usual = configs_of(lowered, facts, "forward")
    assert {config.persistent for config in usual} == {persistent}

    def choices(name):
        job, machine = job_of(lowered, facts, name), machine_of("cuda:90")
        found = job.kernel.configs(job, machine)
        return (*found, *job.kernel.more_configs(found, job))

    found = choices("forward")
    others = tuple(replace(config, persistent=not persistent) for config in usual)
    assert found == (*usual, *others)
    assert len(set(map(str, found))) == len(found)
    backward = choices("backward_kv")
    assert backward[0].persistent == (dim <= 128)
    assert {config.persistent for config in backward} == {dim <= 128, False}
    if dim <= 128:
        tangents = configs_of(lowered, facts, "forward_tangent")
        assert tangents[0].persistent == (dim < 128)


def forwards(name: str, call: Call, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Output and log-sum-exp with a program a query tile, then thrice with persistent ones."""
    lowered = attndsl.compile(TEXTS[name]).lowered
    backend = generated_backend(("hopper", "triton"), default_cache())
    widest = max(call.q.shape[3], call.v.shape[3])
    config = CANDIDATES[Task.FORWARD][max(64, 1 << (widest - 1).bit_length())][number]
    found = []
    for persistent in (False, True):
        chosen = replace(config, persistent=persistent)
        backend.choose(lowered, call, "forward", None, None, "forward", chosen)
        for _ in range(1 + 2 * persistent):
            out, lse = backend.forward(lowered, call)
            found.append((out, public_lse(lse)))
    return found


def call_of(
    name: str, sizes: tuple[int, ...], dim: int, value_dim: int, dtype: torch.dtype
) -> Call:
    batch, heads, kv_heads, q_len, kv_len = sizes

    def random(heads: int, length: int, width: int) -> torch.Tensor:
        return torch.randn(batch, heads, length, width, device="cuda", dtype=dtype)

    captures = {
        "documents": {"doc": (torch.arange(q_len, device="cuda") // 90).int()},
        "gain": {"gain": torch.rand(heads, device="cuda") + 0.5},
    }.get(name, {})
    numbers = (batch, heads, kv_heads, q_len, kv_len, dim)
    names = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")
    q, k = random(heads, q_len, dim), random(kv_heads, kv_len, dim)
    v = random(kv_heads, kv_len, value_dim)
    return Call(q, k, v, dim**-0.5, dict(zip(names, numbers, strict=True)), captures)


def same(found: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    """Persistent programs find the same each time; others too, but for bf16 weights.

    These may be relative to another maximum, and so be rounded otherwise.
    """
    (out, lse), *persistent = found
    again, again_lse = persistent[0]
    if out.dtype is torch.bfloat16:
        torch.testing.assert_close(again, out, atol=1e-2, rtol=1.6e-2, equal_nan=True)
        torch.testing.assert_close(again_lse, lse, atol=1e-4, rtol=1e-5)
    else:
        persistent = found
    return all(
        torch.equal(x, y) for each in persistent for x, y in zip(persistent[0], each, strict=True)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", TEXTS)
def test_programs(name, dim, sizes):
    assert same(forwards(name, call_of(name, sizes, dim, dim, torch.bfloat16), 0))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (72, 40), (256, 128), (192, 128)])
@pytest.mark.parametrize("name", ["full", "causal", "documents"])
def test_head_dims(name, dims):
    assert same(forwards(name, call_of(name, SIZES[2], *dims, torch.float16), 0))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dim", "number"),
    [(dim, n) for dim, found in CANDIDATES[Task.FORWARD].items() for n in range(len(found))],
)
@pytest.mark.parametrize("name", ["full", "causal", "documents", "cap"])
def test_configs(name, dim, number):
    assert same(forwards(name, call_of(name, SIZES[5], dim, dim, torch.bfloat16), number))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("dim", "number"),
    [(dim, n) for dim in (64, 128) for n in range(len(CANDIDATES[Task.BACKWARD][dim]))],
)
@pytest.mark.parametrize("name", ["full", "causal", "window", "documents", "gain", "nothing"])
def test_backwards(name, dim, number, sizes):
    call, lowered = (
        call_of(name, sizes, dim, dim, torch.bfloat16),
        attndsl.compile(TEXTS[name]).lowered,
    )
    backend = generated_backend(("hopper", "triton"), default_cache())
    config = CANDIDATES[Task.BACKWARD][dim][number]
    out, lse = backend.forward(lowered, call)
    grad_out, wants = (
        torch.randn_like(out),
        Wants(tensors=frozenset({"gain"} & call.tensors.keys())),
    )
    found = []
    for persistent in (False, True):
        chosen = replace(config, persistent=persistent)
        backend.choose(lowered, call, "backward", grad_out, wants, "backward_kv", chosen)
        found += [
            backend.backward(lowered, call, Backward(out, lse, grad_out, None, wants))
            for _ in range(1 + 2 * persistent)
        ]
    for each in found[1:]:
        assert torch.equal(each.k, found[0].k)
        assert torch.equal(each.v, found[0].v)
        assert each.tensors.keys() == found[0].tensors.keys()
        assert all(torch.equal(each.tensors[x], found[0].tensors[x]) for x in each.tensors)
        # Sums of dQ are in no fixed order.
        torch.testing.assert_close(each.q, found[0].q, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_graphs_and_streams():
    """Launches of graphs and of other streams count for themselves."""
    lowered = attndsl.compile("causal()").lowered
    backend = generated_backend(("hopper", "triton"), default_cache())
    call = call_of("causal", SIZES[4], 128, 128, torch.bfloat16)
    config = replace(CANDIDATES[Task.FORWARD][128][0], persistent=True)
    backend.choose(lowered, call, "forward", None, None, "forward", config)
    expected, _ = backend.forward(lowered, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept, _ = backend.forward(lowered, call)
        twice, _ = backend.forward(lowered, call)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    for _ in range(20):
        found = []
        graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(backend.forward(lowered, call)[0])
        torch.cuda.synchronize()
        assert all(torch.equal(each, expected) for each in (kept, twice, *found))
