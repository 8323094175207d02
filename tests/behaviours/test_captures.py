"""Flexible attention 2: captured tensors, learned or not, and masks made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attndsl


@pytest.fixture
def place(place):
    """Several tiles, which add to the same gradients."""
    return replace(place, length=39)


def _learned(shape, place, dtype):
    return torch.randn(shape, device=place.device).to(dtype).requires_grad_()


BIASES = {
    "q_kv": (
        "tensor bias[q_len, kv_len]: float; score = score + bias[q, kv]",
        lambda b, h, n: (n, n),
        lambda s, e: s + e.bias,
    ),
    "b_q_kv": (
        "tensor bias[batch, q_len, kv_len]: float; score = score + bias[b, q, kv]",
        lambda b, h, n: (b, n, n),
        lambda s, e: s + e.bias[:, None],
    ),
    "b_h_q_kv": (
        "tensor bias[batch, heads, q_len, kv_len]: float; score = score + bias[b, h, q, kv]",
        lambda b, h, n: (b, h, n, n),
        lambda s, e: s + e.bias,
    ),
    "relative": (
        "tensor bias[2 * q_len]: float; score = score + bias[(q - kv) + q_len]",
        lambda b, h, n: (2 * n,),
        lambda s, e: s + e.bias[e.q - e.kv + e.q.numel()],
    ),
    "rows": (
        "tensor bias[q_len]: float; score = score * bias[q]",
        lambda b, h, n: (n,),
        lambda s, e: s * e.bias[e.q],
    ),
    "columns": (
        "tensor bias[heads, kv_len]: float; score = score + bias[h, kv]",
        lambda b, h, n: (h, n),
        lambda s, e: s + e.bias[e.h, e.kv],
    ),
    "twice": (
        "tensor bias[kv_len]: float; mask = q >= kv; score = score * bias[kv] + tanh(bias[q])",
        lambda b, h, n: (n,),
        lambda s, e: (s * e.bias[e.kv] + torch.tanh(e.bias[e.q]), e.q >= e.kv),
    ),
}


@pytest.mark.few_when_interpreted(
    dtype=["fp32"], name=["b_h_q_kv", "relative", "rows", "columns", "twice"]
)
@pytest.mark.parametrize("name", BIASES)
def test_learned_biases(check, place, dtype, name):
    text, shape, dense = BIASES[name]
    batch, heads, length, _ = place.shape
    bias = _learned(shape(batch, heads, length), place, dtype)
    check(place, text, check.inputs(place, dtype, captures={"bias": bias}), dense)


@pytest.mark.few_when_interpreted(dtype=["fp32"])
def test_learned_scalar(check, place, dtype):
    scale = torch.tensor(0.7, device=place.device, requires_grad=True)
    inputs = check.inputs(place, dtype, captures={"scale_by": scale})
    text = "param scale_by: float; score = score * scale_by"
    check(place, text, inputs, lambda s, e: s * e.scale_by)


@pytest.mark.few_when_interpreted(dtype=["fp32"])
def test_int32_scalar(check, place, dtype):
    scale = torch.tensor(2, device=place.device, dtype=torch.int32)
    inputs = check.inputs(place, dtype, captures={"scale_by": scale})
    text = "param scale_by: int; score = score * scale_by"
    check(place, text, inputs, lambda s, e: s * e.scale_by)


@pytest.mark.few_when_interpreted(dtype=["fp32"])
def test_token_batch_and_head_scales_together(check, place, dtype):
    batch, heads, length, _ = place.shape
    captures = {
        "row": _learned(length, place, dtype),
        "lot": _learned(batch, place, dtype),
        "head": _learned(heads, place, dtype),
    }
    check(
        place,
        """
        tensor row[q_len]: float
        tensor lot[batch]: float
        tensor head[heads]: float
        score = score * row[q] * lot[b] * head[h]
        """,
        check.inputs(place, dtype, captures=captures),
        lambda s, e: s * e.row[e.q] * e.lot[e.b] * e.head[e.h],
    )


@pytest.mark.few_when_interpreted(dtype=["fp32"])
def test_bool_segments(check, place, dtype):
    segment = torch.arange(place.shape[2], device=place.device) % 3 == 0
    check(
        place,
        "tensor seg[kv_len]: bool; mask = seg[q] == seg[kv]",
        check.inputs(place, dtype, captures={"seg": segment}),
        lambda s, e: (s, e.seg[e.q] == e.seg[e.kv]),
    )


@pytest.mark.few_when_interpreted(dtype=["fp32"])
def test_bidirectional_prefix_of_each_batch(check, place, dtype):
    prefix = torch.randint(0, place.shape[2], (place.shape[0],), device=place.device)
    check(
        place,
        "tensor n[batch]: int; mask = q >= kv or (q <= n[b] and kv <= n[b])",
        check.inputs(place, dtype, captures={"n": prefix}),
        lambda s, e: (s, (e.q >= e.kv) | ((e.q <= e.n[e.b]) & (e.kv <= e.n[e.b]))),
    )


@pytest.mark.few_when_interpreted(dtype=["fp32"])
@pytest.mark.parametrize("width", [torch.int32, torch.int64])
def test_lengths_of_each_batch(check, place, dtype, width):
    lengths = torch.arange(place.shape[0], device=place.device).to(width) * 9
    check(
        place,
        "tensor length[batch]: int; mask = kv < length[b]",
        check.inputs(place, dtype, captures={"length": lengths}),
        lambda s, e: (s, e.kv < e.length[e.b]),
    )


@pytest.mark.few_when_interpreted(dtype=["fp32"])
def test_documents_with_local_causal_order(check, place, dtype):
    """Nested lookups: where a query's document begins."""
    length = place.shape[2]
    begins = torch.tensor([0, length // 5, length // 2, length - 3], device=place.device)
    segment = (torch.arange(length, device=place.device)[:, None] >= begins).sum(-1) - 1
    check(
        place,
        """
        tensor seg[kv_len]: int
        tensor offsets[documents]: int
        here = q - offsets[seg[q]]
        there = kv - offsets[seg[kv]]
        mask = seg[q] == seg[kv] and here >= there
        score = score - 0.25 * (here - there)
        """,
        check.inputs(place, dtype, captures={"seg": segment.int(), "offsets": begins}),
        lambda s, e: (
            s - 0.25 * ((e.q - e.offsets[e.seg[e.q]]) - (e.kv - e.offsets[e.seg[e.kv]])),
            (e.seg[e.q] == e.seg[e.kv]) & (e.q >= e.kv),
        ),
    )


@pytest.mark.few_when_interpreted(dtype=["fp32"])
@pytest.mark.parametrize("joined", ["and", "or"])
def test_neighbourhoods(check, place, dtype, joined):
    """A 32 x 64 grid on GPUs, 4 x 13 here; a window of 3."""
    width = 64 if place.device == "cuda" else 13

    def dense(s, e):
        rows = (e.q // width - e.kv // width).abs() <= 1
        columns = (e.q % width - e.kv % width).abs() <= 1
        return s, rows & columns if joined == "and" else rows | columns

    check(
        place,
        f"abs(q // {width} - kv // {width}) <= 1 {joined} abs(q % {width} - kv % {width}) <= 1",
        check.inputs(place, dtype),
        dense,
    )


def test_a_capture_that_is_no_leaf(check, place):
    """Its gradient goes on to what it was computed from."""
    inputs = check.inputs(place, torch.float32)
    text = "tensor gain[heads]: float; score = score * gain[h]"
    grads = []
    for backend in ("reference", place.backend):
        source = torch.linspace(0.5, 1.5, place.shape[1], device=place.device, requires_grad=True)
        attention = attndsl.compile(text, backend=backend)
        out = attention(inputs.q, inputs.k, inputs.v, gain=torch.exp(source))
        (out * inputs.grad_out).sum().backward()
        grads.append(source.grad)
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(grads[1], grads[0], atol=1e-2, rtol=1e-3)


def test_a_capture_reused_and_changed_between_calls(check, place):
    text = "tensor gain[heads]: float; score = score * gain[h]"
    attention = attndsl.compile(text, backend=place.backend)
    gain = torch.linspace(0.5, 1.5, place.shape[1], device=place.device)
    for values in (gain, gain, gain * 3):
        learned = values.clone().requires_grad_()
        inputs = check.inputs(place, torch.float32, captures={"gain": learned})
        check(place, text, inputs, lambda s, e: s * e.gain[e.h], attention=attention)


def test_gradients_of_one_capture_in_several_calls_add_up(check, place):
    text = "tensor gain[heads]: float; score = score * gain[h]"
    attention = attndsl.compile(text, backend=place.backend)
    gain = torch.linspace(0.5, 1.5, place.shape[1], device=place.device, requires_grad=True)
    inputs = check.inputs(place, torch.float32)
    outs = [attention(q, inputs.k, inputs.v, gain=gain) for q in (inputs.q, inputs.q * 2)]
    (both,) = torch.autograd.grad(outs, gain, [inputs.grad_out] * 2, retain_graph=True)
    single = [torch.autograd.grad(out, gain, inputs.grad_out)[0] for out in outs]
    torch.testing.assert_close(both, single[0] + single[1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("tensor t[kv_heads]: float; score = score * t[h]", (2,)),
        ("tensor t[batch]: float; mask = causal(); score = score * t[h] + t[h]", (2,)),
        ("tensor t[batch, heads]: float; score = score * t[h, b] * t[b, hkv]", (2, 4)),
    ],
)
def test_variables_on_dims_of_others_are_clamped(check, place, text, shape):
    """What lies behind the tensor in memory is no part of it."""
    inputs = check.inputs(place, torch.float32, batch=2, heads=4, kv_heads=2)
    size = torch.Size(shape).numel()
    expected = {}
    for backend in ("reference", place.backend):
        memory = torch.cat([torch.linspace(0.5, 1.5, size), torch.full((32,), 1e3)])
        memory = memory.to(place.device).requires_grad_()
        t = memory[:size].view(shape)
        out = attndsl.compile(text, backend=backend)(inputs.q, inputs.k, inputs.v, t=t)
        expected[backend] = (out, *torch.autograd.grad(out, memory, inputs.grad_out))
    for found, wanted in zip(expected[place.backend], expected["reference"], strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-3, rtol=1e-3)


def test_a_masked_pair_reads_nothing(check, place):
    """Indices of dead pairs lie outside; NaN at pairs that are dead reaches nothing."""
    length = place.shape[2]
    bias = torch.randn(length, length, device=place.device)
    bias[torch.ones_like(bias).triu(1).bool()] = torch.nan
    inputs = check.inputs(place, torch.float32, captures={"bias": bias.requires_grad_()})
    check(
        place,
        "tensor bias[q_len, kv_len]: float; mask = kv <= q; score = score + bias[q, kv]",
        inputs,
        lambda s, e: (s + torch.where(e.kv <= e.q, e.bias, 0.0), e.kv <= e.q),
    )


def test_indices_of_dead_pairs_may_lie_outside(check, place):
    near = torch.randn(8, device=place.device, requires_grad=True)
    check(
        place,
        "tensor near[8]: float; mask = 0 <= q - kv and q - kv < 8; score = score + near[q - kv]",
        check.inputs(place, torch.float32, captures={"near": near}),
        lambda s, e: (s + e.near[(e.q - e.kv).clamp(0, 7)], (e.q >= e.kv) & (e.q - e.kv < 8)),
    )


def test_what_compiles_anew(counted, device):
    """Other values never; another program does."""
    from attndsl.backends.base import Call
    from attndsl.pipeline import lower
    from attndsl.source import Source

    q, k, v = (torch.randn(1, 2, 32, 16, device=device) for _ in range(3))
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": 32, "kv_len": 32, "head_dim": 16}

    def call(text, gain):
        lowered = lower(Source(text), {})
        counted.forward(lowered, Call(q, k, v, 0.25, sizes, {"gain": gain}, {}))
        return counted.kernels_built

    text = "tensor gain[heads]: float; score = score * gain[h]"
    # GPUs may have several tile sizes compiled in search of one that does not spill.
    built = call(text, torch.ones(2, device=device))
    assert built > 0
    assert call(text, torch.zeros(2, device=device)) == built
    assert call(text.replace("gain[h]", "(gain[h])  # the same"), torch.ones(2, device=device)) == (
        built
    )
    assert call(text + " + 1", torch.ones(2, device=device)) > built


@pytest.mark.parametrize("function", ["sum", "mean", "cumsum", "amax"])
def test_reductions_over_a_capture_are_refused(function):
    text = f"tensor bias[q_len, kv_len]: float; score = score + {function}(bias)"
    with pytest.raises(attndsl.AttnDSLError) as caught:
        attndsl.compile(text)
    assert function in str(caught.value)
    assert "tensor" in str(caught.value)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("text", ["score = score * t[kv, q]", "score = score + t[h] * kv * 0.01"])
def test_a_gradient_of_many_pairs_is_rounded_once(backend, text):
    """One element gets what 40,000 pairs add, in the precision of q, not of the tensor."""
    operands = [torch.randn(1, 1, 200, 4, dtype=torch.float64) for _ in "qkv"]
    attn = attndsl.compile(f"tensor t[{'a, n' if 'kv, q' in text else 'n'}]: float\n{text}",
                           backend=backend)  # fmt: skip
    small = torch.full((1, 1) if "kv, q" in text else (1,), 0.3, dtype=torch.float32)
    found = []
    for t in (small, small.double()):
        out = attn(*operands, t=t.requires_grad_())
        found += torch.autograd.grad(out.square().sum(), t)
    assert found[0] == found[1].float()
