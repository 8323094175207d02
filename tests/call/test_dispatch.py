"""Which backend ``auto`` takes, by device and dtype."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.call import dispatch
from attndsl.call.dispatch import choose_backend
from attndsl.errors import BackendError, UnsupportedError

TEXT = """
tensor bias[heads, q_len, kv_len]: float
tensor sinks[heads]: float
param cap: float
mask = q >= kv or kv % 3 == 0
score = cap * tanh(score / cap) + bias[h, q, kv]
sink = sinks[h]
"""


def test_fp64_is_run_by_torch_operations_on_every_device():
    for device in ("cpu", "cuda", "cuda:1"):
        chosen, reason = choose_backend("auto", torch.device(device), False, torch.float64)
        assert chosen.name == "cpu"
        assert "fp64" in reason or device == "cpu"
    chosen, _ = choose_backend("auto", torch.device("cuda"), True, torch.float64)
    assert chosen.name == "reference"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_other_dtypes_still_want_kernels_on_gpus(dtype):
    """No backend stands in for another one that fails."""
    with pytest.raises(BackendError, match="cannot run on cuda"):
        choose_backend("auto", torch.device("cuda"), False, dtype)


@pytest.fixture
def as_on_gpus(monkeypatch):
    """CPU tensors get what CUDA's get; kernels are interpreted."""
    real = dispatch._default
    monkeypatch.setattr(
        dispatch, "_default", lambda device, dtype: real(torch.device("cuda", 99), dtype)
    )


def _inputs(dtype):
    q = torch.randn(1, 2, 5, 4, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(1, 1, 6, 4, dtype=dtype, requires_grad=True) for _ in range(2))
    bias = torch.randn(2, 5, 6, dtype=dtype, requires_grad=True)
    sinks = torch.randn(2, dtype=dtype, requires_grad=True)
    return q, k, v, bias, sinks, torch.tensor(3.0, dtype=dtype, requires_grad=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted there")
def test_calls_go_by_dtype(as_on_gpus):
    """One program, by kernels in fp32 and by torch operations in fp64."""
    attention = attndsl.compile(TEXT)

    def call(q, k, v, bias, sinks, cap):
        return attention(q, k, v, bias=bias, sinks=sinks, cap=cap)

    wide = _inputs(torch.float64)
    assert torch.autograd.gradcheck(call, wide, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, wide, fast_mode=True)
    narrow = [x.detach().float() for x in wide]
    torch.testing.assert_close(call(*narrow), call(*wide).float(), atol=1e-5, rtol=1e-5)
    names = {x.backend.name for x in attention._prepared.cache.values()}
    assert names == {"cpu", "triton"}
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*wide), call(*wide))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted there")
def test_kernels_asked_for_by_name_refuse_fp64():
    q = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="fp16, bf16 and fp32") as caught:
        attndsl.compile("causal()", backend="triton")(q, q, q)
    assert "backend='auto'" in caught.value.hint


def test_explain_says_what_runs_fp64(monkeypatch):
    monkeypatch.setattr(dispatch.CPUBackend, "name", "cpu")
    attention = attndsl.compile("causal()")
    assert "in fp64" not in attention.explain()
    monkeypatch.setattr(
        dispatch,
        "_default",
        lambda device, dtype: ("cpu" if dtype is torch.float64 else "reference", "a test says so"),
    )
    assert "  in fp64    cpu, whose torch operations run on all devices" in attention.explain()


def test_no_operation_of_the_tiled_backend_takes_a_device_for_granted():
    """Whatever is made without saying where comes to the meta device, and fails beside q."""
    text = f"{TEXT}weights = dropout(softmax(score), 0.3)".replace("sink = sinks[h]", "")
    text += "\ntensor a[heads, q_len, r]: float; tensor c[kv_heads, kv_len, r]: float"
    text = text.replace("score / cap", "(score + dot(a[h, q, :], c[hkv, kv, :])) / cap")
    text = text.replace("bias[h, q, kv]", "bias[h, q, kv] * sinks[h]")
    attention = attndsl.compile(text, backend="cpu")
    q, k, v, bias, sinks, cap = _inputs(torch.float64)
    a, c = (torch.randn(h, n, 2, dtype=torch.float64) for h, n in ((2, 5), (1, 6)))
    leaves = [q, k, v, bias, sinks, cap, a.requires_grad_(), c.requires_grad_()]
    seed = torch.tensor(3)
    with torch.device("meta"):
        captures = {"bias": bias, "sinks": sinks, "cap": cap, "a": a, "c": c}
        out, lse = attention(q, k, v, seed=seed, return_lse=True, **captures)
        grads = torch.autograd.grad(out.sum() + lse.sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in grads), leaves)
    assert {x.device.type for x in (out, lse, *grads, *second)} == {"cpu"}
