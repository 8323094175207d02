"""Gradients of biases from dS, which the Hopper backward stores: whose, and what is made of it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import attndsl
from attndsl.backends.base import Wants
from attndsl.backends.hopper.backend import HopperBackend, why_portable
from attndsl.backends.hopper.source import hopper_source
from attndsl.backends.hopper.stored import (
    among,
    empty_slopes,
    gradients_from,
    shares_of,
    slopes_shape,
)
from attndsl.backends.triton.cross import example_call
from attndsl.backends.triton.tiles import Config
from attndsl.runtime.programs import default_cache

BATCH, HEADS, KV_HEADS, Q_LEN, KV_LEN = 2, 4, 2, 40, 24
SIZES = {"b": BATCH, "h": HEADS, "hkv": KV_HEADS, "q": Q_LEN, "kv": KV_LEN}
DIMS = {"b": "batch", "h": "heads", "hkv": "kv_heads", "q": "q_len", "kv": "kv_len"}
BF16 = torch.bfloat16
T = frozenset({"t"})


def call_of(indices, use="score = score + {}", dim=64, dtype=BF16, own=BF16, **changes):
    """A program that looks ``t`` up by ``indices``, and a call of it."""
    lookup = f"t[{', '.join(indices)}]"
    text = f"tensor t[{', '.join(DIMS[index] for index in indices)}]: float; {use.format(lookup)}"
    lowered = attndsl.compile(text).lowered
    t = torch.zeros([SIZES[index] for index in indices], dtype=own)
    call = example_call(lowered, dim, dim, dtype, {"t": t})
    q = torch.zeros(BATCH, HEADS, Q_LEN, dim, dtype=dtype)
    k = torch.zeros(BATCH, KV_HEADS, KV_LEN, dim, dtype=dtype)
    return lowered, replace(call, q=q, k=k, v=k, **changes)


STORED = [("h", "q", "kv"), ("b", "h", "q", "kv"), ("b", "hkv", "q", "kv"), ("b", "h", "kv", "q")]
APART = {
    "too many share an element": (("q", "kv"), {}),
    "a kv head's in all batch entries": (("hkv", "q", "kv"), {}),
    "a factor": (("h", "q", "kv"), {"use": "score = score + 2 * {}"}),
    "a derivative": (("h", "q", "kv"), {"use": "score = tanh(score) + {}"}),
    "inside a function": (("h", "q", "kv"), {"use": "score = tanh(score + {})"}),
    "weights": (("h", "q", "kv"), {"use": "weights = sigmoid(score + {})"}),
    "more bits than dS has": (("h", "q", "kv"), {"own": torch.float32}),
    "fp16": (("h", "q", "kv"), {"dtype": torch.float16, "own": torch.float16}),
    "wide heads": (("h", "q", "kv"), {"dim": 192}),
    "one order": (("h", "q", "kv"), {"deterministic": True}),
    "positions beyond": (("h", "q", "kv"), {"q_offset": 1}),
}


@pytest.mark.parametrize("indices", STORED)
def test_what_is_stored(indices):
    lowered, call = call_of(indices)
    wants = Wants(tensors=T)
    found = shares_of(lowered, call, wants)
    assert found.lines.tensors == T
    assert found.pairs == ()
    assert why_portable(lowered, call, "backward", wants=found.lines) is None
    special = HopperBackend(default_cache())._special(lowered, call, (call.q,), found.lines)
    assert special.stores_slopes
    assert special.tensor_gradients == ()
    text = hopper_source(lowered, call, "backward", wants)
    assert "slopes_desc, [" in text
    assert "slopes_desc" not in hopper_source(lowered, call, "backward", Wants())
    assert "slopes_desc" not in hopper_source(lowered, call, "forward", Wants())


@pytest.mark.parametrize("name", APART)
def test_what_has_kernels_of_its_own(name):
    indices, changes = APART[name]
    lowered, call = call_of(indices, **changes)
    assert among(lowered, call, T) == frozenset()
    found = shares_of(lowered, call, Wants(tensors=T))
    assert found.lines.tensors == frozenset()


def test_calls_that_portable_kernels_run_store_nothing():
    backend = HopperBackend(default_cache())
    lowered, call = call_of(("h", "q", "kv"))
    assert backend._shared_out(lowered, call, Wants(tensors=T)).lines.tensors == T
    odd = torch.zeros(BATCH, HEADS, Q_LEN, 65, dtype=BF16)[..., :64]
    for other in (replace(call, q=odd), replace(call, deterministic=True)):
        found = backend._shared_out(lowered, other, Wants(tensors=T))
        assert found.lines.tensors == frozenset()
        assert [own.tensors for own in found.pairs] == [T]


@pytest.mark.parametrize("indices", [*STORED, ("q", "kv")])
def test_gradients_are_sums_of_dS(indices):
    lowered, call = call_of(indices)
    config = Config(64, 16, 4, 2, 2, 240)
    assert slopes_shape(call, config) == (BATCH, HEADS, 32, 64)
    slopes = torch.randn(slopes_shape(call, config)).double()
    (found,) = gradients_from(slopes, lowered, call, T).values()
    pairs = slopes[:, :, :KV_LEN, :Q_LEN].mT.unflatten(1, (KV_HEADS, 2))
    whole = "bkgij"
    kept = {"b": "b", "h": "kg", "hkv": "k", "q": "i", "kv": "j"}
    letters = "".join(kept[index] for index in indices)
    expected = torch.einsum(f"{whole}->{letters}", pairs)
    expected = expected.reshape([SIZES[index] for index in indices])
    assert found.dtype is BF16
    torch.testing.assert_close(found.double(), expected, atol=0.05, rtol=0.01)


def test_tiles_that_are_left_out_are_zeros():
    lowered, call = call_of(("h", "q", "kv"), "mask = causal(); score = score + {}")
    assert not empty_slopes(lowered, call, Config(64, 16, 4, 2)).any()


@pytest.mark.gpu
@pytest.mark.parametrize("indices", STORED)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", [(512, 640), (1000, 1333)], ids=["even", "ragged"])
@pytest.mark.parametrize("mask", ["", "mask = causal(); ", "mask = kv <= q or q % 300 > 290; "])
def test_kernels(check, indices, dim, lengths, mask):
    lookup, dims = f"t[{', '.join(indices)}]", ", ".join(DIMS[index] for index in indices)
    text = f"tensor t[{dims}]: float; {mask}score = score + {lookup}"
    sizes = SIZES | dict(zip(("q", "kv"), lengths, strict=True))
    t = torch.randn([sizes[index] for index in indices], device="cuda").to(BF16).requires_grad_()
    place = SimpleNamespace(backend="hopper", device="cuda", shape=(BATCH, HEADS, 0, dim))
    inputs = check.inputs(
        place, BF16, kv_heads=KV_HEADS, q_len=lengths[0], kv_len=lengths[1], captures={"t": t},
        with_lse=True,
    )  # fmt: skip
    check(place, text, inputs)


@pytest.mark.gpu
def test_a_gradient_at_any_address(check):
    attention = attndsl.compile(
        "tensor t[heads, q_len, kv_len]: float; score = score + t[h, q, kv]", backend="hopper"
    )
    t = torch.randn(4, 256, 256, device="cuda", dtype=BF16, requires_grad=True)
    q, k, v = torch.randn(3, 2, 4, 256, 64, device="cuda", dtype=BF16)
    out = attention(q, k, v, t=t)
    do = torch.randn(out.numel() + 1, device="cuda", dtype=BF16)
    (usual,) = torch.autograd.grad(out, t, do[1:].clone().view_as(out), retain_graph=True)
    (found,) = torch.autograd.grad(out, t, do[1:].view_as(out))
    assert torch.equal(found, usual)
