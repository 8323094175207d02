"""Dropout of the weights: the same pairs everywhere, forward and backward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import attndsl
import attndsl.errors
from attndsl.backends.kernels.config import Config
from attndsl.backends.triton import tiles
from attndsl.foundation.caches import CACHES, Reason

SEED = 0x1234_5678_9ABC_DEF
PROGRAMS = {
    "plain": "weights = dropout(softmax(score), 0.25)",
    "causal": "mask = q >= kv; weights = dropout(softmax(score), 0.1)",
    "at run time": "param p: float; mask = q >= kv; weights = dropout(softmax(score), p * 2)",
    "score and sink": (
        "tensor s[heads]: float; score = softcap(score, 5.0); sink = s[h];"
        "weights = dropout(softmax(score), 0.5)"
    ),
}


def _kept(place, seed, q_len=40, kv_len=24, batch=2, heads=2, p=0.5):
    """Which pairs are kept: all weights are equal, and the values name the keys."""
    q = torch.zeros(batch, heads, q_len, 32, device=place.device)
    k = torch.zeros(batch, heads, kv_len, 32, device=place.device)
    v = torch.eye(kv_len, 32, device=place.device).expand(batch, heads, kv_len, 32)
    attention = attndsl.compile(
        "param p: float; weights = dropout(softmax(score), p)", backend=place.backend
    )
    return attention(q, k, v, p=p, seed=seed)[..., :kv_len] > 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_outputs_and_gradients(check, kernels, name):
    text = PROGRAMS[name]
    captures = {"p": 0.15} if "param p" in text else {}
    if "tensor s" in text:
        captures["s"] = torch.randn(kernels.shape[1], device=kernels.device).requires_grad_()
    inputs = check.inputs(
        kernels, torch.float32, with_lse=True, captures=captures, options={"seed": SEED}
    )
    check(kernels, text, inputs)


@pytest.mark.parametrize(("q_len", "kv_len", "kv_heads"), [(23, 41, None), (40, 7, 1)])
def test_ragged_lengths_and_groups(check, kernels, q_len, kv_len, kv_heads):
    inputs = check.inputs(
        kernels, torch.float32, q_len=q_len, kv_len=kv_len, kv_heads=kv_heads,
        options={"seed": SEED},
    )  # fmt: skip
    check(kernels, PROGRAMS["causal"], inputs)


@pytest.mark.parametrize("seed", [0, 7, SEED, -3, (1 << 64) + 9])
def test_the_pairs_are_those_of_the_reference(kernels, seed):
    expected = _kept(SimpleNamespace(backend="reference", device=kernels.device), seed)
    found = _kept(kernels, seed)
    assert torch.equal(found, expected)
    assert 0.4 < float(found.float().mean()) < 0.6


def test_seeds_decide(kernels):
    assert torch.equal(_kept(kernels, 5), _kept(kernels, 5))
    assert not torch.equal(_kept(kernels, 5), _kept(kernels, 6))
    assert not torch.equal(_kept(kernels, 5), _kept(kernels, 5 + (1 << 32)))
    assert _kept(kernels, 5, p=0.0).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's tile sizes can be chosen")
def test_tile_sizes_do_not(monkeypatch, tmp_path):
    found = []
    for number, config in enumerate((Config(16, 16, 4, 1), Config(32, 64, 4, 1))):
        monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(tmp_path / str(number)))
        monkeypatch.setattr(tiles, "INTERPRETED", (config,))
        CACHES.invalidate(Reason.BACKENDS)
        found.append(_kept(SimpleNamespace(backend="triton", device="cpu"), SEED))
    CACHES.invalidate(Reason.BACKENDS)
    assert torch.equal(*found)


def test_torch_seeds_what_has_no_seed(kernels):
    q, k, v = (torch.randn(1, 2, 24, 16, device=kernels.device) for _ in range(3))
    attention = attndsl.compile(PROGRAMS["plain"], backend=kernels.backend)
    torch.manual_seed(3)
    first, second = attention(q, k, v), attention(q, k, v)
    torch.manual_seed(3)
    assert torch.equal(attention(q, k, v), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("value", [0.15, 0.0, 0.6])
def test_a_learned_probability(check, kernels, value):
    """At 0.6 the program asks for 1.2: everything is dropped, and the gradient is 0."""
    p = torch.tensor(value, device=kernels.device, requires_grad=True)
    inputs = check.inputs(kernels, torch.float32, captures={"p": p}, options={"seed": SEED})
    check(kernels, PROGRAMS["at run time"], inputs)


@pytest.mark.parametrize("value", [-0.5, 1.5, torch.nan])
def test_probabilities_that_the_device_knows_are_clamped(check, kernels, value):
    """To 0 and 1; NaN is taken for 1, which drops everything."""
    p = torch.tensor(value, device=kernels.device, requires_grad=True)
    q = torch.randn(1, 2, 24, 16, device=kernels.device, requires_grad=True)
    text = "param p: float; mask = q >= kv; weights = dropout(softmax(score), p)"
    attention = attndsl.compile(text, backend=kernels.backend)
    found = attention(q, q, q, p=p, seed=SEED)
    expected = attndsl.compile("q >= kv")(q, q, q) if value < 0 else torch.zeros_like(q)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    grads = torch.autograd.grad(found.sum(), (q, p))
    assert grads[0].isfinite().all()
    assert float(grads[1]) == 0


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("probability", "given", "message"),
    [
        ("p", {"p": 1.5}, "is 1.5"),
        ("p", {"p": -0.5}, "is -0.5"),
        ("p", {"p": float("nan")}, "is nan"),
        ("p", {"p": 2}, "is 2"),
        ("2 * p", {"p": 0.75}, r"is 1.5 \(p = 0.75\)"),
        ("p * q_len / 8", {"p": 0.9}, r"is 1.8 \(p = 0.9, q_len = 16\)"),
    ],
)
def test_numbers_that_are_no_probabilities_are_refused(backend, probability, given, message):
    """At each call, whatever calls before it gave, and in graphs."""
    text = f"param p: float; weights = dropout(softmax(score), {probability})"
    attention = attndsl.compile(text, backend=backend)
    q = torch.randn(1, 2, 16, 16)
    for _ in range(2):
        assert attention(q, q, q, p=0.25).shape == q.shape
        with pytest.raises(attndsl.errors.ArgumentError, match=message) as caught:
            attention(q, q, q, **given)
        assert caught.value.span.text == probability
        assert caught.value.hint
    if backend == "cpu" and probability == "p":
        program = torch.compile(lambda q, p: attention(q, q, q, p=p), backend="eager")
        with pytest.raises(Exception, match=message):
            program(q, given["p"])


def test_numbers_that_are_bound_are_refused_at_once():
    refusals = {0.6: "a dropout probability lies in", -0.1: "a dropout probability lies in"}
    for p, match in {**refusals, float("nan"): "its value is NaN"}.items():
        with pytest.raises(attndsl.AttnDSLError, match=match):
            attndsl.compile("param p: float; weights = dropout(softmax(score), 2 * p)", p=p)
    q = torch.randn(1, 2, 16, 16)
    attention = attndsl.compile("param p: float = 1.5; weights = dropout(softmax(score), p)")
    with pytest.raises(attndsl.AttnDSLError, match="probability is 1"):
        attention(q, q, q)
    assert not attention(q, q, q, p=1.0).any()


def test_a_probability_that_is_in_the_sink_too(check, kernels):
    text = "param p: float; sink = 4 * p; weights = dropout(softmax(score), p)"
    p = torch.tensor(0.3, device=kernels.device, requires_grad=True)
    inputs = check.inputs(kernels, torch.float32, captures={"p": p}, options={"seed": SEED})
    check(kernels, text, inputs)


def test_a_seed_may_be_a_tensor(place):
    """As int and as tensor, forward and backward; changed afterwards, it changes nothing."""
    q, k, v = (torch.randn(1, 2, 24, 16, device=place.device) for _ in range(3))
    q.requires_grad_()
    attention = attndsl.compile(PROGRAMS["causal"], backend=place.backend)
    found = []
    for seed in (SEED, torch.tensor(SEED, device=place.device)):
        out = attention(q, k, v, seed=seed)
        if isinstance(seed, torch.Tensor):
            seed.add_(1)
        found.append((out, *torch.autograd.grad(out.square().sum(), q)))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.equal(attention(q, k, v, seed=seed), found[0][0])


@pytest.mark.parametrize(
    ("seed", "message"),
    [
        (torch.zeros(2).long(), "seed is a tensor of shape"),
        (torch.zeros(()), "dtype torch.float32"),
        (torch.zeros((), device="meta").long(), "seed is on meta"),
        (0.5, "seed is 0.5"),
    ],
)
def test_other_seeds_are_refused(seed, message):
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(attndsl.AttnDSLError, match=message):
        attndsl.compile(PROGRAMS["plain"])(q, q, q, seed=seed)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_a_captured_graph_draws_anew_at_each_replay(backend):
    q, k, v = (torch.randn(2, 4, 256, 64, device="cuda") for _ in range(3))
    q.requires_grad_()
    dropping = attndsl.compile(PROGRAMS["causal"], backend=backend)
    plain = attndsl.compile("causal()", backend=backend)

    def step():
        outs = dropping(q, k, v), plain(q, k, v)
        return outs, torch.autograd.grad(outs[0].sum() + outs[1].sum(), q)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (dropped, kept), grad = step()
    runs = []
    for _ in range(2):
        graph.replay()
        runs.append([x.clone() for x in (dropped, kept, grad)])
    assert torch.equal(runs[0][1], runs[1][1])
    assert torch.equal(runs[0][1], plain(q, k, v))
    assert not torch.equal(runs[0][0], runs[1][0])
    assert not torch.equal(runs[0][2], runs[1][2])
    assert (runs[0][0] != 0).any()
