"""Flexible attention 1: programs that change the score, forward and backward, in every dtype."""

from __future__ import annotations

import pytest
import torch


def _alibi(s, e):
    heads = e.h.numel()
    return s + (e.kv - e.q) * torch.exp2(-(e.h + 1.0) * 8 / heads)


PROGRAMS = {
    "identity": ("score", lambda s, e: s),
    "doubled": ("score * 2", lambda s, e: s * 2),
    "squared": ("score * score", lambda s, e: s * s),
    "causal": ("where(q >= kv, score, -inf)", lambda s, e: (s, e.q >= e.kv)),
    "inverse_causal": ("where(q <= kv, score, -inf)", lambda s, e: (s, e.q <= e.kv)),
    "relative": ("score + (q - kv)", lambda s, e: s + (e.q - e.kv)),
    "causal_relative": (
        "where(q >= kv, score + (q - kv), -inf)",
        lambda s, e: (s + (e.q - e.kv), e.q >= e.kv),
    ),
    "alibi": ("score + (kv - q) * exp2(-(h + 1) * 8 / heads)", _alibi),
    "trigonometric": (
        "sin(cos(score)) + tan(b)",
        lambda s, e: torch.sin(torch.cos(s)) + torch.tan(e.b.to(s.dtype)),
    ),
    "trigonometric_product": (
        "cos(score) * sin(score) + tan(b)",
        lambda s, e: torch.cos(s) * torch.sin(s) + torch.tan(e.b.to(s.dtype)),
    ),
    "silu": ("silu(score)", lambda s, e: torch.nn.functional.silu(s)),
    "integer_division": ("score - q // (1 + kv)", lambda s, e: s - e.q // (1 + e.kv)),
    "softcap": ("20 * tanh(score / 20)", lambda s, e: 20 * torch.tanh(s / 20)),
    "composed": (
        "score = score * 2; mask = kv <= q; score = score - (q - kv) / 8",
        lambda s, e: (s * 2 - (e.q - e.kv) / 8, e.kv <= e.q),
    ),
}


@pytest.mark.few_when_interpreted(dtype=["fp32"])
@pytest.mark.few_when_interpreted(name=["causal", "softcap"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_score_programs(check, place, dtype, name):
    text, dense = PROGRAMS[name]
    check(place, text, check.inputs(place, dtype), dense)


@pytest.mark.few_when_interpreted(dtype=["fp32"])
def test_score_times_a_captured_head_offset(check, place, dtype):
    heads = place.shape[1]
    offset = torch.randn(heads, device=place.device).to(dtype).requires_grad_()
    check(
        place,
        "tensor head_offset[heads]: float\nscore = score * head_offset[h]",
        check.inputs(place, dtype, captures={"head_offset": offset}),
        lambda s, e: s * e.head_offset[e.h],
    )


@pytest.mark.parametrize("scale", [0.5, 0.0, -0.25, 1e-3])
def test_scale(check, place, scale):
    inputs = check.inputs(place, torch.float32, options={"scale": scale})
    check(place, "q >= kv", inputs, lambda s, e: (s, e.q >= e.kv))


def test_grouped_heads(check, place, dtype):
    check(
        place,
        "score + hkv - 0.5 * h",
        check.inputs(place, dtype, heads=4, kv_heads=2, value_dim=24),
        lambda s, e: s + e.h // 2 - 0.5 * e.h,
    )


def test_offsets_shift_logical_positions(check, place):
    """One row block of a causal whole, by an offset, by a tensor offset, and by a position map."""
    options = (
        {"q_offset": 11, "kv_offset": 3},
        {"q_offset": torch.tensor(11, device=place.device), "kv_offset": 3},
        {
            "q_index": torch.arange(11, 28, device=place.device),
            "kv_index": torch.arange(3, 34, device=place.device),
        },
    )
    for option in options:
        inputs = check.inputs(place, torch.float32, q_len=17, kv_len=31, options=option)
        check(
            place,
            "mask = q >= kv; score = score + 0.125 * (kv - q)",
            inputs,
            lambda s, e: (s + 0.125 * (e.kv + 3 - e.q - 11), e.q + 11 >= e.kv + 3),
        )
