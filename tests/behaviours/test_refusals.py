"""Flexible attention 8: gradients of the wrong kind, and scores that do not matter."""

from __future__ import annotations

import pytest
import torch

import attndsl


@pytest.mark.parametrize(
    "text", ["score = 0.5 * (q - kv)", "score = score * 0", "mask = q >= kv; score = 1.0"]
)
def test_scores_that_do_not_matter_give_zero_gradients(check, place, text):
    inputs = check.inputs(place, torch.float32)
    found = check.run(attndsl.compile(text, backend=place.backend), inputs.to(torch.float32))
    assert (found["q"] == 0).all()
    assert (found["k"] == 0).all()
    assert found["v"].abs().max() > 0


def test_a_mask_alone_has_zero_gradient_for_what_it_reads(check, place):
    """A float tensor that requires grad and only decides which pairs are live."""
    level = torch.zeros(place.shape[1], device=place.device, requires_grad=True)
    inputs = check.inputs(place, torch.float32, captures={"level": level})
    text = "tensor level[heads]: float; mask = level[h] < 0.5 or q >= kv"
    found = check.run(attndsl.compile(text, backend=place.backend), inputs.to(torch.float32))
    assert (found["level"] == 0).all()
    assert found["q"].abs().max() > 0


def test_int_captures_have_no_gradient(check, place):
    inputs = check.inputs(place, torch.float32)
    attention = attndsl.compile(
        "tensor gain[heads]: int; score = score * gain[h]", backend=place.backend
    )
    floats = torch.ones(place.shape[1], device=place.device, requires_grad=True)
    with pytest.raises(attndsl.AttnDSLError, match="gain") as caught:
        attention(inputs.q, inputs.k, inputs.v, gain=floats)
    assert "int" in str(caught.value)
    out = attention(inputs.q.requires_grad_(), inputs.k, inputs.v, gain=floats.detach().int())
    assert out.requires_grad


def test_bool_captures_refuse_floats(check, place):
    inputs = check.inputs(place, torch.float32)
    attention = attndsl.compile("tensor seg[kv_len]: bool; mask = seg[kv]", backend=place.backend)
    with pytest.raises(attndsl.AttnDSLError, match="seg"):
        attention(
            inputs.q, inputs.k, inputs.v, seg=torch.ones(inputs.k.shape[2], device=place.device)
        )


def test_int_params_refuse_learned_scalars(check, place):
    inputs = check.inputs(place, torch.float32)
    attention = attndsl.compile("param n: int; mask = kv < n", backend=place.backend)
    learned = torch.tensor(3.0, device=place.device, requires_grad=True)
    with pytest.raises(attndsl.AttnDSLError, match=r"\bn\b"):
        attention(inputs.q, inputs.k, inputs.v, n=learned)


def test_triton_refuses_fp64_by_name(device):
    q = torch.zeros(1, 1, 8, 16, dtype=torch.float64, device=device)
    attention = attndsl.compile("score", backend="triton")
    with pytest.raises(attndsl.AttnDSLError, match="float64"):
        attention(q, q, q)


@pytest.mark.parametrize("checked", [True, False])
def test_lookups_out_of_range(check, checked):
    """An error in checked mode, clamped otherwise."""
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    near = torch.arange(4.0)
    text = "tensor near[4]: float; mask = q >= kv; score = score + near[q - kv]"
    attention = attndsl.compile(text, backend="reference", checked=checked)
    if checked:
        with pytest.raises(attndsl.AttnDSLError) as caught:
            attention(q, k, v, near=near)
        assert "'near' is looked up at 4 in dim 0, of size 4" in str(caught.value)
    else:
        steps = torch.arange(8)
        bias = near[(steps[:, None] - steps).clamp(0, 3)]
        bias = bias.masked_fill(steps[:, None] < steps, -torch.inf)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, bias)
        torch.testing.assert_close(attention(q, k, v, near=near), expected)
