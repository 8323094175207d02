"""Gradients by distance from the Hopper backward: whose, and what is made of its sums."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.jobs import hopper_source, shares_of, why_portable

import attndsl
from attndsl.backends.base import CallGradients, Wants
from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.hopper.family import Hopper
from attndsl.backends.hopper.features.diagonals import DIAGONALS, collect, empty_sums
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.runtime.program_store import default_cache

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 4, 2, 40, 24
BF16 = torch.bfloat16
TEXTS = {
    "relative": "tensor t[heads, n]: float; mask = causal(); score = score + t[h, q - kv + kv_len]",
    "slopes": "tensor t[heads]: float; mask = causal(); score = score - t[h] * (q - kv)",
    "buckets": "tensor t[buckets, heads]: float; "
    "score = score + t[min(int(floor(log2(abs(q - kv) + 1.0))), 4), h]",
    "param": "param t: float; score = score + t * (kv - q)",
    "beside columns": "tensor t[heads]: float; tensor c[heads, kv_len]: float; "
    "score = score - t[h] * abs(q - kv) + c[h, kv]",
    "with a sink": "tensor t[n]: float; tensor z[heads]: float; "
    "score = score + t[clamp(q - kv, -30, 30) + 30]; sink = z[h]",
    "window": "tensor t[heads, n]: float; mask = abs(q - kv) < 70; "
    "score = score + t[h, q - kv + kv_len]",
}
APART = {
    "a derivative": ("score = tanh(score) + t[q - kv + kv_len]", {}),
    "a factor": ("score = 2 * score + t[q - kv + kv_len]", {}),
    "weights": ("weights = sigmoid(score + t[q - kv + kv_len])", {}),
    "dropout": ("score = score + t[q - kv]; weights = dropout(softmax(score), 0.1)", {}),
    "fp16": ("score = score + t[q - kv + kv_len]", {"dtype": torch.float16}),
    "wide heads": ("score = score + t[q - kv + kv_len]", {"dim": 192}),
    "one order": ("score = score + t[q - kv + kv_len]", {"deterministic": True}),
    "positions": ("score = score + t[q - kv + kv_len]", {"q_index": torch.arange(Q_LEN)}),
    "too many keys": ("score = score + t[q - kv + kv_len]", {"kv_len": 20000}),
}


def captures_of(name, lengths=(Q_LEN, KV_LEN), device="cpu"):
    shapes = {
        "relative": {"t": (HEADS, sum(lengths))},
        "slopes": {"t": (HEADS,)},
        "buckets": {"t": (5, HEADS)},
        "param": {"t": ()},
        "beside columns": {"t": (HEADS,), "c": (HEADS, lengths[1])},
        "with a sink": {"t": (61,), "z": (HEADS,)},
        "window": {"t": (HEADS, sum(lengths))},
    }[name]
    return {
        name: (0.3 * torch.rand(shape, device=device)).requires_grad_()
        for name, shape in shapes.items()
    }


def call_of(text, captures, dim=64, dtype=BF16, kv_len=KV_LEN, **changes):
    lowered = attndsl.compile(text).lowered
    tensors = {decl.name: captures[decl.name] for decl in lowered.program.tensors}
    call = example_call(lowered, dim, dim, dtype, {})
    q = torch.zeros(BATCH, HEADS, Q_LEN, dim, dtype=dtype)
    k = torch.zeros(BATCH, KV_HEADS, kv_len, dim, dtype=dtype)
    sizes = {**call.sizes, "q_len": Q_LEN, "kv_len": kv_len}
    changes = {"tensors": tensors, "sizes": sizes} | changes
    return lowered, call._replace(q=q, k=k, v=k, **changes)


def wants_of(lowered):
    program = lowered.program
    return Wants(
        tensors=frozenset(decl.name for decl in program.tensors),
        params=frozenset(decl.name for decl in program.params),
    )


@pytest.mark.parametrize("name", TEXTS)
def test_what_the_backward_adds_up(name):
    lowered, call = call_of(TEXTS[name], captures_of(name))
    wants = wants_of(lowered)
    found = shares_of(lowered, call, wants)
    others = found.lines.tensors | found.lines.params
    assert found.lines.features == ((DIAGONALS.flag, {"t"}),)
    assert others == {"beside columns": {"c"}}.get(name, frozenset())
    assert not found.shares
    assert why_portable(lowered, call, "backward", wants=found.lines) is None
    (job,) = Hopper().jobs(lowered, call, Task.BACKWARD, call.q, found.lines)
    facts = job.facts
    assert facts.features == (DIAGONALS.flag,)
    assert {*facts.tensor_gradients, *facts.param_gradients} == others
    text = hopper_source(lowered, call, "backward", wants)
    assert "def add_tile(" in text
    assert "add_diagonals(sums" in text
    assert "def add_tile(" not in hopper_source(lowered, call, "backward", Wants())
    assert "def add_tile(" not in hopper_source(lowered, call, "forward", Wants())


@pytest.mark.parametrize("name", APART)
def test_what_has_a_kernel_of_its_own(name):
    text, changes = APART[name]
    lowered, call = call_of(f"tensor t[n]: float; {text}", {"t": torch.zeros(99)}, **changes)
    found = shares_of(lowered, call, Wants(tensors=frozenset("t")))
    assert found.lines.tensors == frozenset()
    assert found.lines.features == ()


def test_calls_that_portable_kernels_run_have_their_shares():
    backend = generated_backend(("hopper", "triton"), default_cache())
    lowered, call = call_of(TEXTS["slopes"], captures_of("slopes"))
    wants = Wants(tensors=frozenset("t"))
    assert backend._plan(lowered, call, wants).lines.features == ((DIAGONALS.flag, {"t"}),)
    odd = torch.zeros(BATCH, HEADS, Q_LEN, 65, dtype=BF16)[..., :64]
    for other in (call._replace(q=odd), call._replace(deterministic=True)):
        found = backend._plan(lowered, other, wants)
        assert found.lines.tensors == frozenset()
        assert found.lines.features == ()
        assert [share.names for share in found.of_kind("distances")] == [{"t"}]


@pytest.mark.parametrize("name", ["relative", "slopes", "buckets"])
def test_gradients_are_of_sums(name):
    captures = captures_of(name)
    lowered, call = call_of(TEXTS[name], captures, q_offset=3)
    config = Config(64, 16, 4, 2, 2, 240)
    sums = empty_sums(call, config)
    assert sums.shape == (BATCH, HEADS, 2, 128 + 32)
    assert not sums.any()
    sums[..., 1:] = torch.randn(sums[..., 1:].shape)
    # Distances that pairs have.
    sums[..., : 32 + 1 - KV_LEN] = 0
    sums[..., 32 + Q_LEN :] = 0
    nothing = CallGradients(q=None, k=None, v=None)
    buffers = {"DISTANCE_SUMS": sums}
    found = collect(lowered, call, frozenset("t"), buffers, nothing).tensors["t"]
    distance = torch.arange(sums.shape[3]) - 32 + 3
    whole = sums.sum(2)
    inside = (distance >= 4 - KV_LEN) & (distance < Q_LEN + 3)
    bucket = (distance.abs() + 1.0).log2().floor().int().clamp(max=4)
    term = {
        "relative": lambda t: t[:, (distance + KV_LEN).clamp(0, Q_LEN + KV_LEN - 1)],
        "slopes": lambda t: -t[:, None] * distance,
        "buckets": lambda t: t[bucket].mT,
    }[name]
    total = (term(captures["t"]) * whole * inside).sum()
    (expected,) = torch.autograd.grad(total, captures["t"])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)


LENGTHS = {"even": (512, 640), "ragged": (1000, 1333), "one tile": (50, 100), "long": (3000, 3000)}


def inputs_on_gpu(check, name, lengths, dim, **options):
    place = SimpleNamespace(backend="hopper", device="cuda", shape=(BATCH, HEADS, 0, dim))
    captures = captures_of(name, lengths, "cuda")
    if name == "param":
        # The error of one number is not evened out by others.
        captures = {"t": captures["t"].detach()}
    inputs = check.inputs(
        place, BF16, kv_heads=KV_HEADS, q_len=lengths[0], kv_len=lengths[1], captures=captures,
        **options,
    )  # fmt: skip
    return place, inputs


@pytest.mark.gpu
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_kernels(check, name, dim, lengths):
    _, inputs = inputs_on_gpu(check, name, LENGTHS[lengths], dim, with_lse=True)
    golden, ref, found = (
        check.run(attndsl.compile(TEXTS[name], backend=backend), inputs.to(dtype))
        for backend, dtype in (("reference", torch.float64), ("reference", BF16), ("hopper", BF16))
    )
    # Where few elements add up all pairs of a row, the rounding of rowsum(dO * O) shows, as in the
    # kernel of its own: of slopes 2.6 times what that of the operands makes.
    slack = 2.0 if name in ("slopes", "param", "beside columns", "with a sink") else 1.0
    spread = check.spread_of(TEXTS[name], inputs, BF16)
    check.close(golden, ref, found, BF16, slack, spread)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["relative", "window"])
@pytest.mark.parametrize("dim", [64, 128])
def test_kernels_at_an_offset(check, name, dim):
    place, inputs = inputs_on_gpu(check, name, (700, 900), dim, options={"q_offset": 100})
    check(place, TEXTS[name], inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["relative", "buckets", "window"])
@pytest.mark.parametrize("dim", [64, 128])
def test_sums_are_the_same_each_time(name, dim):
    attention = attndsl.compile(TEXTS[name], backend="hopper")
    captures = captures_of(name, (2000, 2000), "cuda")
    q, do = torch.randn(2, BATCH, HEADS, 2000, dim, device="cuda", dtype=BF16)
    k, v = torch.randn(2, BATCH, KV_HEADS, 2000, dim, device="cuda", dtype=BF16)
    out = attention(q, k, v, **captures)
    found = [torch.autograd.grad(out, captures["t"], do, retain_graph=True)[0] for _ in range(10)]
    assert found[0].any()
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_sums_are_those_of_the_kernel_of_its_own(dim):
    """fp32 sums of the same dS, which is rounded to bf16 in one of them."""
    captures = captures_of("relative", (3000, 3000), "cuda")
    attention = attndsl.compile(TEXTS["relative"], backend="hopper")
    portable = attndsl.compile(TEXTS["relative"], backend="triton")
    q, do = torch.randn(2, BATCH, HEADS, 3000, dim, device="cuda", dtype=BF16)
    k, v = torch.randn(2, BATCH, KV_HEADS, 3000, dim, device="cuda", dtype=BF16)
    found, expected = (
        torch.autograd.grad(own(q, k, v, **captures), captures["t"], do)[0]
        for own in (attention, portable)
    )
    error = (found - expected).abs().max() / expected.abs().max()
    assert error < 0.01
