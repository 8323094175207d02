"""Gradients of biases from dS, which the Hopper backward stores: which, and that they are right."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.jobs import hopper_source, shares_of, why_portable

import attndsl
from attndsl.backends.base import Wants
from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.hopper.family import Hopper
from attndsl.backends.hopper.features.stored_ds import STORED_DS, empty_ds, no_tiles
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.runtime.program_store import default_cache

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 4, 2, 40, 24
SIZES = {"b": BATCH, "h": HEADS, "hkv": KV_HEADS, "q": Q_LEN, "kv": KV_LEN}
DIMS = {"b": "batch", "h": "heads", "hkv": "kv_heads", "q": "q_len", "kv": "kv_len"}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
T = frozenset({"t"})


def call_of(indices, use="score = score + {}", dim=64, dtype=BF16, own=FP32, **changes):
    """A program that looks ``t`` up by ``indices``, and a call of it."""
    lookup = f"t[{', '.join(indices)}]"
    text = f"tensor t[{', '.join(DIMS[index] for index in indices)}]: float; {use.format(lookup)}"
    lowered = attndsl.compile(text).lowered
    t = torch.zeros([SIZES[index] for index in indices], dtype=own)
    call = example_call(lowered, dim, dim, dtype, {"t": t})
    q = torch.zeros(BATCH, HEADS, Q_LEN, dim, dtype=dtype)
    k = torch.zeros(BATCH, KV_HEADS, KV_LEN, dim, dtype=dtype)
    return lowered, call._replace(q=q, k=k, v=k, **changes)


STORED = {
    "of each head": (("h", "q", "kv"), {}),
    "of each pair": (("b", "h", "q", "kv"), {"own": BF16}),
    "of each kv head": (("b", "hkv", "q", "kv"), {"own": FP16}),
    "turned": (("b", "h", "kv", "q"), {"own": BF16}),
    "four share an element": (("b", "q", "kv"), {"own": BF16}),
    "eight do, of more bits": (("q", "kv"), {}),
    "a mask that reads the score": (
        ("h", "q", "kv"), {"use": "mask = kv <= q or score > 3; score = score + {}"},
    ),
    "one order": (("h", "q", "kv"), {"deterministic": True}),
    "a part of a tensor": (
        ("h", "q", "kv"), {"q_offset": 3, "tensors": {"t": torch.zeros(HEADS, Q_LEN + 9, KV_LEN)}},
    ),
}  # fmt: skip
APART = {
    "too many share an element": (("q", "kv"), {"own": BF16}),
    "a factor": (("h", "q", "kv"), {"use": "score = score + 2 * {}"}),
    "a derivative": (("h", "q", "kv"), {"use": "score = tanh(score) + {}"}),
    "inside a function": (("h", "q", "kv"), {"use": "score = tanh(score + {})"}),
    "weights": (("h", "q", "kv"), {"use": "weights = sigmoid(score + {})"}),
    "dropout": (
        ("h", "q", "kv"), {"use": "score = score + {}; weights = dropout(softmax(score), 0.1)"},
    ),
    "twice": (("h", "q", "kv"), {"use": "score = score + {} + t[h, q, 0]"}),
    "fp16": (("h", "q", "kv"), {"dtype": FP16}),
    "wide heads": (("h", "q", "kv"), {"dim": 192}),
    "positions beyond": (("h", "q", "kv"), {"q_offset": 1}),
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
def test_what_is_stored(name):
    indices, changes = STORED[name]
    lowered, call = call_of(indices, **changes)
    wants = Wants(tensors=T)
    found = shares_of(lowered, call, wants)
    assert found.lines.features == ((STORED_DS.flag, T),)
    assert not found.lines.tensors
    assert [(share.kind, share.names) for share in found.shares] == [("stored", T)]
    assert why_portable(lowered, call, "backward", wants=found.lines) is None
    (job,) = Hopper().jobs(lowered, call, Task.BACKWARD, call.q, found.lines)
    facts = job.facts
    assert facts.features == (STORED_DS.flag,)
    assert facts.tensor_gradients == ()
    text = hopper_source(lowered, call, "backward", wants)
    assert "def store_ds(" in text
    assert "def stored(" in text
    for other in (("backward", Wants()), ("forward", Wants())):
        text = hopper_source(lowered, call, *other)
        assert "def store_ds(" not in text
        assert "def stored(" not in text


@pytest.mark.parametrize("name", APART)
def test_what_has_kernels_of_its_own(name):
    indices, changes = APART[name]
    lowered, call = call_of(indices, **changes)
    found = shares_of(lowered, call, Wants(tensors=T))
    assert found.lines.features == ()
    assert found.of_kind("stored") == ()


def test_tensors_share_what_is_stored():
    """One that alone would not be worth the memory takes part, and one with a factor does not."""
    text = """
        tensor t[heads, q_len, kv_len]: float
        tensor u[q_len, kv_len]: float
        tensor w[heads, q_len, kv_len]: float
        score = score + t[h, q, kv] + u[q, kv] + 2 * w[h, q, kv]
    """
    lowered = attndsl.compile(text).lowered
    _, call = call_of(("h", "q", "kv"))
    t = torch.zeros(HEADS, Q_LEN, KV_LEN)
    u = torch.zeros(Q_LEN, KV_LEN, dtype=BF16)
    call = call._replace(tensors={"t": t, "u": u, "w": t})
    found = shares_of(lowered, call, Wants(tensors=frozenset("tuw")))
    assert {own.names for own in found.of_kind("stored")} == {frozenset("t"), frozenset("u")}
    assert [own.names for own in found.of_kind("pairs")] == [frozenset("w")]


def test_calls_that_portable_kernels_run_store_nothing():
    backend = generated_backend(("hopper", "triton"), default_cache())
    lowered, call = call_of(("h", "q", "kv"))
    assert backend._plan(lowered, call, Wants(tensors=T)).lines.features
    odd = torch.zeros(BATCH, HEADS, Q_LEN, 65, dtype=BF16)[..., :64]
    found = backend._plan(lowered, call._replace(q=odd), Wants(tensors=T))
    assert not found.lines.features
    assert [own.names for own in found.of_kind("pairs")] == [T]


def test_room_for_whole_tiles():
    _, call = call_of(("h", "q", "kv"))
    config = Config(64, 16, 4, 2, 2, 240)
    stored = no_tiles(call, config)
    assert empty_ds(call, config).shape == (BATCH, HEADS, 32, 64)
    assert stored.shape == (BATCH, HEADS, 2, 1)
    assert not stored.any()


MASKS = {
    "none": "",
    "causal": "mask = causal(); ",
    "window": "mask = sliding_window(200); ",
    "documents": "tensor doc[batch, kv_len]: int; mask = doc[b, q] == doc[b, kv]; ",
    "rows without keys": "mask = kv <= q and q % 300 > 290; ",
}
KINDS = {"fp32": FP32, "bf16": BF16, "fp16": FP16}
ON_GPUS = [
    (("h", "q", "kv"), "fp32"), (("h", "q", "kv"), "bf16"), (("h", "q", "kv"), "fp16"),
    (("b", "h", "q", "kv"), "bf16"), (("b", "hkv", "q", "kv"), "fp32"),
    (("hkv", "q", "kv"), "fp32"), (("b", "q", "kv"), "fp32"), (("q", "kv"), "fp32"),
    (("b", "h", "kv", "q"), "fp32"), (("kv", "h", "q"), "bf16"),
]  # fmt: skip


def text_of(indices, mask):
    dims = ", ".join(DIMS[index] for index in indices)
    return f"tensor t[{dims}]: float; {MASKS[mask]}score = score + t[{', '.join(indices)}]"


def on_gpu(check, indices, own, mask, dim=64, lengths=(512, 640), turned=False):
    sizes = SIZES | dict(zip(("q", "kv"), lengths, strict=True))
    shape = [sizes[index] for index in indices]
    t = torch.randn(shape[::-1] if turned else shape, device="cuda").to(KINDS[own])
    captures = {"t": (t.permute(*reversed(range(t.dim()))) if turned else t).requires_grad_()}
    if mask == "documents":
        starts = torch.tensor([[70], [130]], device="cuda")
        captures["doc"] = torch.arange(max(lengths), device="cuda") // starts
    place = SimpleNamespace(backend="hopper", device="cuda", shape=(BATCH, HEADS, lengths[0], dim))
    inputs = check.inputs(
        place, BF16, kv_heads=KV_HEADS, kv_len=lengths[1], captures=captures, with_lse=True
    )
    check(place, text_of(indices, mask), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("indices", "own"), ON_GPUS)
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_what_is_told_apart(check, indices, own, mask):
    on_gpu(check, indices, own, mask)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", [(512, 640), (1000, 1333)], ids=["even", "ragged"])
def test_masks(check, mask, dim, lengths):
    on_gpu(check, ("h", "q", "kv"), "fp32", mask, dim, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("own", KINDS)
def test_strides(check, own):
    on_gpu(check, ("h", "q", "kv"), own, "causal", turned=True)


def call_on_gpu(indices, mask, length):
    """An output, the tensor that it depends on, and numbers for the output's gradient."""
    attention = attndsl.compile(text_of(indices, mask), backend="hopper")
    sizes = SIZES | {"q": length, "kv": length}
    t = torch.randn([sizes[i] for i in indices], device="cuda", requires_grad=True)
    q = torch.randn(BATCH, HEADS, length, 64, device="cuda", dtype=BF16)
    k, v = torch.randn(2, BATCH, KV_HEADS, length, 64, device="cuda", dtype=BF16)
    out = attention(q, k, v, t=t)
    do = torch.randn(out.numel() + 1, device="cuda", dtype=BF16)
    return out, t, do


@pytest.mark.gpu
@pytest.mark.parametrize("indices", [("h", "q", "kv"), ("q", "kv")])
@pytest.mark.parametrize("mask", ["none", "causal"])
def test_the_same_bits_each_time(indices, mask):
    out, t, do = call_on_gpu(indices, mask, 1030)
    do = do[1:].clone().view_as(out)
    first, *others = (torch.autograd.grad(out, t, do, retain_graph=True)[0] for _ in range(20))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
def test_near_what_a_kernel_of_its_own_makes():
    """That has dS in fp32; here it has been rounded to bf16 once."""
    text = text_of(("h", "q", "kv"), "causal")
    t = torch.randn(HEADS, 1030, 1030, device="cuda", requires_grad=True)
    q, k, v, do = torch.randn(4, BATCH, HEADS, 1030, 64, device="cuda", dtype=BF16)
    expected, found = (
        torch.autograd.grad(attndsl.compile(text, backend=name)(q, k, v, t=t), t, do)[0]
        for name in ("triton", "hopper")
    )
    distance = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert distance <= 2.0**-8


@pytest.mark.gpu
def test_a_gradient_at_any_address():
    out, t, do = call_on_gpu(("h", "q", "kv"), "none", 256)
    (usual,) = torch.autograd.grad(out, t, do[1:].clone().view_as(out), retain_graph=True)
    (found,) = torch.autograd.grad(out, t, do[1:].view_as(out))
    assert torch.equal(found, usual)


@pytest.mark.gpu
def test_a_part_of_a_tensor_on_gpus(check):
    text = "tensor t[heads, m, n]: float; mask = causal(); score = score + t[h, q, kv]"
    place = SimpleNamespace(backend="hopper", device="cuda", shape=(BATCH, HEADS, 200, 64))
    t = torch.randn(HEADS, 230, 320, device="cuda", requires_grad=True)
    inputs = check.inputs(
        place, BF16, kv_heads=KV_HEADS, kv_len=300, captures={"t": t}, options={"q_offset": 16}
    )
    check(place, text, inputs)
