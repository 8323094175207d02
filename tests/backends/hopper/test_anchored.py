"""Weights relative to a maximum that is not followed to the end, and what is computed again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.jobs import configs_of, plan_loop, text_of
from support.mutation import number_of

import attndsl
from attndsl.backends.emit.facts import facts_of, with_forms
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.target import parse_target

CONFIG = Config(16, 8, 4, 2, 2, 240)
TEXTS = {
    "full": "score",
    "causal": "causal()",
    "window": "sliding_window(300)",
    "documents": "tensor doc[q_len]: int; mask = q >= kv and doc[q] == doc[kv]",
    "sink": "mask = causal(); sink = 0.5",
    "gain": "tensor gain[heads]: float; mask = causal(); score = gain[h] * score",
    "alibi": "mask = causal(); score = score + alibi()",
    "keys": "tensor keys[kv_len]: float; mask = causal(); score = score + keys[kv]",
    "relative": "tensor rel[heads, n]: float; score = score + rel[h, q - kv + kv_len]",
    "bias": """
        tensor bias[heads, q_len, kv_len]: float
        mask = causal()
        score = score + bias[h, q, kv]
    """,
    "dropout": "mask = causal(); weights = dropout(softmax(score), 0.1)",
    "some rows": "q < 700 and kv >= 100",
}


@pytest.mark.parametrize(
    ("text", "dtype", "persistent", "anchored"),
    [("causal()", torch.bfloat16, True, True), ("score", torch.bfloat16, True, True),
     ("causal()", torch.float16, True, False), ("causal()", torch.bfloat16, False, False),
     ("score = softcap(score, 9.0)", torch.bfloat16, True, False),
     ("weights = sigmoid(score)", torch.bfloat16, True, False),
     ("(q + kv) % 2 == 0", torch.bfloat16, True, False)],
)  # fmt: skip
def test_which_kernels_are_anchored(text, dtype, persistent, anchored):
    """fp16 has no room for weights far above 1, and without FULL tiles nothing is saved."""
    lowered = attndsl.compile(text).lowered
    facts = facts_of(lowered.program, example_call(lowered, 128, 128, dtype, {}))
    facts = with_forms(facts, lowered.program, parse_target("cuda:90"))
    config = replace(configs_of(lowered, facts, "forward")[0], persistent=persistent)
    loop = plan_loop(lowered, facts, "forward", config)
    text = text_of(lowered, facts, "forward", loop, config)
    assert bool(number_of(text, "await_written()")) == anchored


@pytest.mark.parametrize(
    ("text", "dtype", "bounded"),
    [("softcap(score, 20.0)", "bf16", True), ("softcap(score, 50.0)", "bf16", True),
     ("softcap(score, 60.0)", "bf16", False), ("softcap(score, 20.0)", "fp16", False),
     ("softcap(score, 6.0)", "fp16", True), ("score", "bf16", False),
     ("softcap(score, 20.0) + rel[q]", "bf16", True),
     ("softcap(score, 20.0) + rel[kv]", "bf16", False)],
)  # fmt: skip
def test_which_scores_are_bounded(text, dtype, bounded):
    text = f"tensor rel[n]: float; score = {text}" if "rel" in text else f"score = {text}"
    lowered = attndsl.compile(text).lowered
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    facts = facts_of(lowered.program, example_call(lowered, 64, 64, kind, {}))
    facts = with_forms(facts, lowered.program, parse_target("cuda:90"))
    loop = plan_loop(lowered, facts, "forward", CONFIG)
    text = text_of(lowered, facts, "forward", loop, CONFIG)
    assert bool(number_of(text, "gl.max(...)")) != bounded
    assert ("MIXED = tl.constexpr(3)" in text) == (bounded and dtype == "bf16")
    assert bool(number_of(text, "mixed_exp2(...)")) == (bounded and dtype == "bf16")


def captures_of(name, lengths, heads=4):
    q_len, kv_len = lengths
    return {
        "documents": {"doc": (torch.arange(q_len, device="cuda") // 401).int()},
        "gain": {"gain": torch.rand(heads, device="cuda") + 0.5},
        "keys": {"keys": 20 * torch.randn(kv_len, device="cuda")},
        "relative": {"rel": 20 * torch.randn(heads, 2 * kv_len, device="cuda")},
        "bias": {"bias": 20 * torch.randn(heads, q_len, kv_len, device="cuda")},
    }.get(name, {})


@pytest.mark.gpu
@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("lengths", [(1024, 1024), (1000, 1333)], ids=["even", "ragged"])
@pytest.mark.parametrize("size", [30.0, 300.0])
def test_growing_scores(check, name, dim, lengths, size):
    """Late keys of some heads have scores that no maximum of those before comes near."""
    if name in ("documents", "window") and lengths[0] != lengths[1]:
        lengths = (1000, 1000)
    place = SimpleNamespace(backend="hopper", device="cuda", shape=(2, 4, 0, dim))
    options = {"seed": 3} if name == "dropout" else {}
    inputs = check.inputs(
        place, torch.bfloat16, kv_heads=2, q_len=lengths[0], kv_len=lengths[1],
        captures=captures_of(name, lengths), options=options,
    )  # fmt: skip
    late = torch.arange(lengths[1], device="cuda")[:, None] % 371 == 350
    k = torch.where(late, size * inputs.k, inputs.k)
    k[:, 1:] = inputs.k[:, 1:]
    inputs = replace(inputs, k=k.detach().requires_grad_())
    attention = attndsl.compile(TEXTS[name], backend="hopper")
    golden, ref = (
        check.run(attndsl.compile(TEXTS[name], backend="reference"), inputs.to(dtype))
        for dtype in (torch.float64, torch.bfloat16)
    )
    own = inputs.to(torch.bfloat16)
    found = check.run(attention, own)
    if name == "dropout":
        # Where one key has all the weight, dQ is what rounding leaves of rowsum(dO * O).
        golden, ref, found = ({"out": each["out"]} for each in (golden, ref, found))
    spread = check.spread_of(TEXTS[name], inputs, torch.bfloat16)
    check.close(golden, ref, found, torch.bfloat16, spread=spread)
    with torch.no_grad():
        runs = [
            attention(own.q, own.k, own.v, return_lse=True, **own.captures, **own.options)
            for _ in range(20)
        ]
    for run in runs[1:]:
        assert torch.equal(run[0], runs[0][0])
        assert torch.equal(run[1], runs[0][1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["alibi", "keys"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("size", [1.0, 9.0])
def test_rows_that_share_a_maximum_may_be_far_apart(check, name, dim, size):
    """Every other eight queries have scores as far below 0 as the others have above."""
    place = SimpleNamespace(backend="hopper", device="cuda", shape=(2, 4, 1000, dim))
    inputs = check.inputs(place, torch.bfloat16, captures=captures_of(name, (1000, 1000)))
    k = inputs.k / 4 + size
    signs = 1 - 2 * (torch.arange(1000, device="cuda")[:, None] // 8 % 2)
    q = inputs.q / 4 + size * signs
    inputs = replace(inputs, q=q.detach().requires_grad_(), k=k.detach().requires_grad_())
    check(place, TEXTS[name], inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_what_is_no_number_stays_in_its_rows(dim):
    q, k, v = torch.randn(3, 2, 4, 1024, dim, device="cuda", dtype=torch.bfloat16)
    attention = attndsl.compile("causal()", backend="hopper")
    out, lse = attention(q, k, v, return_lse=True)
    bad = q.clone()
    bad[1, 2, 700, 3] = torch.nan
    again, again_lse = attention(bad, k, v, return_lse=True)
    assert again[1, 2, 700].isnan().all()
    again[1, 2, 700], again_lse[1, 2, 700] = out[1, 2, 700], lse[1, 2, 700]
    # The rows beside it have been computed again, and their weights rounded otherwise.
    torch.testing.assert_close(again, out, atol=1e-2, rtol=1.6e-2)
    torch.testing.assert_close(again_lse, lse, atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
def test_graphs():
    q, k, v = torch.randn(3, 2, 4, 2048, 128, device="cuda", dtype=torch.bfloat16)
    k[:, ::2, 1500] *= 400
    attention = attndsl.compile("causal()", backend="hopper")
    expected = attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = attention(q, k, v)
    for _ in range(5):
        kept.zero_()
        graph.replay()
        assert torch.equal(kept, expected)
