"""Masks, scores and weights as arrays are those of calls."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.inspection import dense_evaluation

B, H, G, LQ, LK, D = 2, 4, 2, 19, 33, 8
PROGRAMS = {
    "plain": "score",
    "causal": "causal_lower_right()",
    "documents": "tensor doc[batch, kv_len]: int; mask = q >= kv and doc[b, q] == doc[b, kv]",
    "scores": "mask = score > 0.1; score = softcap(score, 3.0)",
    "lines": (
        "mask = causal() and kv != 3; score = score + alibi(); score = where(kv == 1, score, -inf)"
    ),
    "bias": "tensor bias[heads, q_len, kv_len]: float; score = score + bias[h, q, kv]",
    "sink": "tensor logit[heads]: float; mask = causal(); sink = logit[h]",
    "sigmoid": "tensor t[kv_heads]: float; mask = causal(); weights = sigmoid(score * t[hkv])",
    "rows": "tensor u[q_len, r]: float; tensor w[heads, kv_len, r]: float\n"
    "mask = causal(); score = score + dot(u[q, :], w[h, kv, :])",
    "dropped": "param p: float; mask = causal(); weights = dropout(softmax(score), p)",
    "dropped own": "param p: float; weights = dropout(relu(score), p)",
}


def captures_of(attention, generator):
    """Values for the declared dims, by name."""
    sizes = {"batch": B, "heads": H, "kv_heads": G, "q_len": LQ, "kv_len": LK, "r": 3}
    found = {}
    for tensor in attention.tensors:
        shape = [sizes[dim] for dim in tensor.dims]
        value = torch.randn(shape, generator=generator)
        found[tensor.name] = (value > 0.5).int().cumsum(-1) if tensor.dtype == "int" else value
    return found | {param.name: 0.4 for param in attention.params}


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, H, LQ, D), (B, G, LK, D), (B, G, LK, D))
    return [torch.randn(shape, generator=generator) for shape in shapes], generator


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weights_are_those_of_the_call(name, dtype, inputs):
    attention = attndsl.compile(PROGRAMS[name])
    q, k, v = (x.to(dtype) for x in inputs[0])
    given = captures_of(attention, inputs[1])
    seed = {"seed": 7} if "dropped" in name else {}
    weights = attention.weights(q, k, **seed, **given)
    work = torch.promote_types(dtype, torch.float32)
    assert (weights.dtype, weights.shape) == (work, (B, H, LQ, LK))
    found = (weights @ v.to(work).repeat_interleave(H // G, 1)).to(dtype)
    near = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    wanted = attention(q, k, v, **seed, **given)
    torch.testing.assert_close(found, wanted, atol=near, rtol=near)


@pytest.mark.parametrize("name", ["plain", "causal", "scores", "lines", "bias", "sink", "rows"])
def test_scores_give_the_weights_and_the_mask(name, inputs):
    attention = attndsl.compile(PROGRAMS[name])
    q, k, v = inputs[0]
    given = captures_of(attention, inputs[1])
    scores = attention.scores(q, k, **given)
    _, lse = attention(q, k, v, return_lse=True, **given)
    weights = attention.weights(q, k, **given)
    rows = lse > -torch.inf  # Others see no key.
    torch.testing.assert_close((scores - lse[..., None]).exp()[rows], weights[rows])
    assert not weights[~rows].any()
    if name != "scores":
        live = attention.mask(LQ, LK, heads=H, batch=B, kv_heads=G, **given)
        assert torch.equal(live, scores > -torch.inf)


def test_raw_scores_have_no_program(inputs):
    attention = attndsl.compile(PROGRAMS["bias"])
    q, k, _ = inputs[0]
    raw = attention.scores(q, k, raw=True, scale=0.3)
    torch.testing.assert_close(raw, 0.3 * q @ k.repeat_interleave(2, 1).mT)
    other = attention.scores(q, k, bias=torch.zeros(H, LQ, LK), scale=0.3)
    assert torch.equal(raw, other)


@pytest.mark.parametrize("text", ["causal()", "natten2d(8, 8, 3, 5)", PROGRAMS["documents"]])
def test_masks_are_those_of_tiles_of_one_pair(text):
    attention = attndsl.compile(text)
    given = {"doc": torch.arange(64).expand(2, -1) // 9} if "doc" in text else {}
    live = attention.mask(64, 64, heads=3, **given)
    assert live.shape == (2 if given else 1, 3, 64, 64)
    assert live.dtype is torch.bool
    kinds = attention.tiles(64, 64, 1, 1, heads=3, **given).kinds
    assert torch.equal(live, (kinds == 2).expand(live.shape))


CHOSEN = [
    {"rows": slice(3, 11)},
    {"rows": -1, "h": 2},
    {"b": 1, "h": slice(1, 3)},
    {"h": slice(1, None), "rows": slice(-4, None)},
    {"rows": slice(5, 5)},
    {"b": slice(7, 9)},
]


@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("name", PROGRAMS)
def test_some_pairs_are_those_of_all(name, chosen, inputs):
    attention = attndsl.compile(PROGRAMS[name])
    q, k, _ = inputs[0]
    given = captures_of(attention, inputs[1])
    index = tuple(
        slice(part, None if part == -1 else part + 1) if isinstance(part, int) else part
        for part in (chosen.get(name, slice(None)) for name in ("b", "h", "rows"))
    )
    for whole, part in (
        (attention.scores(q, k, **given), attention.scores(q, k, **chosen, **given)),
        (attention.weights(q, k, seed=3, **given),
         attention.weights(q, k, seed=3, **chosen, **given)),
    ):  # fmt: skip
        torch.testing.assert_close(part, whole[index])
        assert torch.equal(part == 0, whole[index] == 0)
    if name != "scores":
        whole, part = (
            attention.mask(LQ, LK, B, H, kv_heads=G, **which, **given) for which in ({}, chosen)
        )
        assert torch.equal(part, whole[index])


PARTS = [
    {"q_offset": 12, "kv_offset": 3},
    {"q_offset": torch.tensor([4, 11])},
    {"kv_lengths": torch.tensor([20, 33], dtype=torch.int32), "q_offset": torch.tensor([1, 14])},
    {"heads": 8, "kv_heads": 4, "h_offset": 4, "q_len": 64, "q_offset": 40},
    {"q_index": torch.arange(LQ).flip(0), "batch": 6, "b_offset": 2},
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "text",
    [
        "causal_lower_right() and kv + h != 5",
        "param p: float; score = score + alibi(); mask = causal()\n"
        "weights = dropout(softmax(score), p)",
    ],
)
def test_parts_of_calls(text, part, inputs):
    attention = attndsl.compile(text)
    q, k, v = inputs[0]
    given = {"p": 0.3, "seed": 5} if "dropout" in text else {}
    weights = attention.weights(q, k, **given, **part)
    wanted = attention(q, k, v, **given, **part)
    torch.testing.assert_close(weights @ v.repeat_interleave(2, 1), wanted)
    some = attention.weights(q, k, **given, **part, b=1, h=slice(1, 4), rows=slice(4, 9))
    torch.testing.assert_close(some, weights[1:, 1:, 4:9])
    sizes = {name: part[name] for name in ("heads", "kv_heads", "q_len", "batch") if name in part}
    location = {name: x for name, x in part.items() if name not in sizes}
    live = attention.mask(LQ, LK, B, H, kv_heads=G, whole_sizes=sizes, **location)
    scores = attention.scores(q, k, **part)
    assert torch.equal(live, scores > -torch.inf)


def test_dropout_is_off_without_a_seed(inputs):
    attention = attndsl.compile(PROGRAMS["dropped"])
    q, k, _ = inputs[0]
    weights = attention.weights(q, k)  # Nothing reads p.
    assert torch.equal(weights, attndsl.compile("causal()").weights(q, k))
    dropped = attention.weights(q, k, p=0.5, seed=1)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * weights[kept])
    with pytest.raises(ArgumentError, match="the call lacks 'p'"):
        attention.weights(q, k, seed=1)
    with pytest.raises(ArgumentError, match=r"is 1\.5"):
        attention.weights(q, k, p=1.5, seed=1)


def test_they_are_differentiable(inputs):
    attention = attndsl.compile(
        "tensor gain[heads]: float; tensor s[heads]: float; mask = causal() and kv != 2\n"
        "score = gain[h] * sqrt(score * score + 0.1 * abs(q - kv)); sink = s[h]"
    )
    (q, k, v), generator = inputs
    leaves = [x.requires_grad_() for x in (q, k, torch.ones(H), torch.zeros(H))]
    v = v.repeat_interleave(2, 1)
    call = attention(q, k, v[:, ::2], gain=leaves[2], s=leaves[3])
    grad = torch.randn(call.shape, generator=generator)
    wanted = torch.autograd.grad(call, leaves, grad)
    out = attention.weights(q, k, gain=leaves[2], s=leaves[3]) @ v
    found = torch.autograd.grad(out, leaves, grad)
    for each, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(each, exact, atol=1e-4, rtol=1e-4)
    scores = attention.scores(q, k, gain=leaves[2])
    (slope,) = torch.autograd.grad(scores[scores > -torch.inf].sum(), leaves[2])
    assert slope.isfinite().all()
    assert not attention.mask(LQ, LK).requires_grad


def test_long_calls_are_looked_at_in_parts(inputs, monkeypatch):
    attention = attndsl.compile(PROGRAMS["sink"])
    q, k, _ = inputs[0]
    whole = [attention.scores(q, k), attention.weights(q, k, logit=torch.zeros(H))]
    monkeypatch.setattr(dense_evaluation, "_PAIRS_AT_ONCE", 1000)
    torch.testing.assert_close(attention.scores(q, k), whole[0])
    torch.testing.assert_close(attention.weights(q, k, logit=torch.zeros(H)), whole[1])
    live = attention.mask(1 << 20, 1 << 20, rows=slice(1 << 19, (1 << 19) + 3))
    assert live.sum().item() == 3 * (1 << 19) + 1 + 2 + 3


def test_what_is_too_large_is_refused(inputs):
    attention = attndsl.compile("causal()")
    q = torch.empty(1).expand(1, 8, 1 << 16, 1)
    with pytest.raises(ArgumentError) as caught:
        attention.weights(q, q)
    assert "8 x 65536 x 65536 pairs would take 137438953472 bytes" in caught.value.message
    assert "rows=slice(0, 64), h=0" in caught.value.hint
    assert attention.weights(q, q, h=0, rows=slice(0, 8)).shape == (1, 1, 8, 1 << 16)
    with pytest.raises(ArgumentError, match="the mask of 1 x 1 x 65536 x 65536 pairs"):
        attention.mask(1 << 16, 1 << 16, heads=8)
    with pytest.raises(ArgumentError, match="max_bytes is 100"):
        attention.mask(20, 20, max_bytes=100)
    # One in memory for all heads, so that it is no larger for more of them.
    assert attention.mask(20, 20, 100, 100, max_bytes=400).shape == (100, 100, 20, 20)
    with pytest.raises(ArgumentError, match="max_bytes is '1 GB'"):
        attention.mask(20, 20, max_bytes="1 GB")


def test_refusals(inputs):
    attention = attndsl.compile(PROGRAMS["scores"])
    q, k, _ = inputs[0]
    with pytest.raises(UnsupportedError, match=r"look at scores\(q, k"):
        attention.mask(LQ, LK)
    with pytest.raises(ArgumentError, match="mask\\(\\) takes lengths"):
        attention.mask(q, k)
    for chosen, words in (
        ({"rows": slice(0, 9, 2)}, "rows is a slice with steps of 2"),
        ({"h": H}, "h is 4, and there are 4 query heads"),
        ({"b": "first"}, "b is 'first'"),
        ({"nonsense": 3}, "no tensor or run-time param 'nonsense'"),
    ):
        with pytest.raises(ArgumentError, match=words):
            attention.scores(q, k, **chosen)
    with pytest.raises(attndsl.AttnDSLError, match="k has batch 1"):
        attention.weights(q, k[:1])
    both = attndsl.compile("weights = relu(score); sink = 1.0")
    with pytest.raises(UnsupportedError, match="have none"):
        both.weights(q, k)


def test_autocast_is_that_of_calls(inputs):
    attention = attndsl.compile("causal()")
    q, k, _ = inputs[0]
    with torch.autocast("cpu", torch.bfloat16):
        weights = attention.weights(q, k)
    assert weights.dtype is torch.float32
    assert torch.equal(weights, attention.weights(q.bfloat16(), k.bfloat16()))


def test_captures_given_to_compile_and_named_like_options(inputs):
    q, k, _ = inputs[0]
    attention = attndsl.compile(
        "tensor rows[heads]: float; score = score + rows[h] + c[h]", c=torch.ones(H)
    )
    found = attention.scores(q, k, captures={"rows": torch.ones(H)}, rows=0)
    torch.testing.assert_close(found, attention.scores(q, k, raw=True)[:, :, :1] + 2)
