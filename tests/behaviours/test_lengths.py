"""Flexible attention 3: lengths that are no multiple of anything, and kernels that serve many."""

from __future__ import annotations

import pytest
import torch

LENGTHS = (1, 3, 4, 8, 23, 37, 143, 256, 277, 312, 587, 1030, 2047)
CAUSAL = "mask = q >= kv; score = score + (kv - q) / 64"


def _causal(s, e):
    return s + (e.kv - e.q) / 64, e.q >= e.kv


def _affordable(place, *lengths):
    affordable = 700 if place.backend == "reference" else 160
    if place.device == "cpu" and max(lengths) > affordable:
        pytest.skip("takes too long without a GPU")


@pytest.mark.few_when_interpreted(length=[23, 143])
@pytest.mark.parametrize("length", LENGTHS)
def test_odd_lengths(check, place, length):
    _affordable(place, length)
    dtype = torch.float32 if place.device == "cpu" else torch.float16
    few = 1 if place.device == "cpu" else None
    inputs = check.inputs(place, dtype, q_len=length, batch=few, heads=few)
    check(place, CAUSAL, inputs, _causal)


@pytest.mark.parametrize("length", [1, 37, 100])
def test_odd_lengths_without_a_mask(check, place, length):
    inputs = check.inputs(place, torch.float32, q_len=length, batch=1, with_lse=True)
    check(place, "score * 1.5", inputs, lambda s, e: s * 1.5)


@pytest.mark.few_when_interpreted(dtype=["fp32"])
@pytest.mark.parametrize("sizes", [(26, 52), (1, 60), (60, 1), (17, 31), (1024, 2048), (1, 2047)])
def test_other_length_of_q_than_of_k(check, place, dtype, sizes):
    _affordable(place, *sizes)
    q_len, kv_len = sizes
    check(place, CAUSAL, check.inputs(place, dtype, q_len=q_len, kv_len=kv_len), _causal)


@pytest.mark.few_when_interpreted(dims=[(9, 9), (72, 96)])
@pytest.mark.parametrize(
    "dims", [(8, 8), (9, 9), (21, 13), (40, 24), (72, 96), (128, 64), (203, 32)]
)
def test_head_dims(check, place, dims):
    dim, value_dim = dims
    dtype = torch.float32 if place.device == "cpu" else torch.bfloat16
    length = 24 if place.device == "cpu" else 300
    inputs = check.inputs(place, dtype, q_len=length, dim=dim, value_dim=value_dim)
    check(place, CAUSAL, inputs, _causal)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 8), (8, 0), (0, 0)])
def test_zero_lengths(check, place, q_len, kv_len):
    import attndsl

    inputs = check.inputs(place, torch.float32, q_len=q_len, kv_len=kv_len, with_lse=True)
    attention = attndsl.compile(CAUSAL, backend=place.backend)
    found = check.run(attention, inputs.to(torch.float32))
    assert found["out"].shape == inputs.grad_out.shape
    assert (found["out"] == 0).all()
    assert (found["lse"] == -torch.inf).all()
    for name in "qkv":
        assert found[name].shape == getattr(inputs, name).shape
        assert (found[name] == 0).all()


def test_one_program_over_shapes_of_equal_work(counted, device):
    """(B, S), (2B, S/2), (4B, S/4): at most one kernel more than the first shape's."""
    from attndsl.backends.base import Call
    from attndsl.pipeline import lower
    from attndsl.source import Source

    lowered = lower(Source(CAUSAL), {})
    built = []
    for batch, length in ((1, 64), (2, 32), (4, 16)):
        q, k, v = (torch.randn(batch, 2, length, 16, device=device) for _ in range(3))
        sizes = {
            "batch": batch,
            "heads": 2,
            "kv_heads": 2,
            "q_len": length,
            "kv_len": length,
            "head_dim": 16,
        }
        out, _ = counted.forward(lowered, Call(q, k, v, 0.25, sizes))
        causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        steps = torch.arange(length, device=device)
        bias = ((steps - steps[:, None]) / 64).masked_fill(~causal, -torch.inf)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, scale=0.25)
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
        built.append(counted.kernels_built)
    assert built[0] >= 1
    assert built[-1] - built[0] <= 1
