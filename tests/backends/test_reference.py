"""The reference backend against formulas of its own kind of simplicity, and its two gradients."""

from __future__ import annotations

import math

import pytest
import torch
from support.by_hand import (
    BATCH,
    DIM,
    HEADS,
    KV_HEADS,
    KV_LEN,
    Q_LEN,
    by_hand,
    draw,
    exact,
    make_call,
)

import attndsl
from attndsl.backends.base import Backward, Call, Wants
from attndsl.backends.dense.philox import kept
from attndsl.backends.dense.reference import ReferenceBackend
from attndsl.backends.log_sum import public_lse
from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.ir import SCORE, Op, Program, const, node
from attndsl.pipeline import lower, lower_program
from attndsl.source import Source

BACKEND = ReferenceBackend()


def forward(program, call):
    """Output and log-sum-exp as users get them."""
    out, lse = BACKEND.forward(program, call)
    return out, public_lse(lse)


def lowered(text):
    return lower(Source(text), {})


Q = torch.arange(Q_LEN)[:, None]
KV = torch.arange(KV_LEN)


def test_plain_attention_and_its_gradients_equal_torchs():
    call = make_call(scale=DIM**-0.5)
    out, _ = BACKEND.forward(lowered("score"), call)
    expected = torch.nn.functional.scaled_dot_product_attention(
        call.q, call.k, call.v, enable_gqa=True
    )
    exact(out, expected)
    seed = torch.randn_like(out)
    leaves = (call.q, call.k, call.v)
    for found, wanted in zip(
        torch.autograd.grad(out, leaves, seed),
        torch.autograd.grad(expected, leaves, seed),
        strict=True,
    ):
        exact(found, wanted)


def test_lse_is_of_the_final_score():
    call = make_call()
    out, lse = forward(lowered("mask = q >= kv; score = 2 * score + kv"), call)
    expected = by_hand(call, lambda s: 2 * s + KV, Q >= KV)
    exact(out, expected[0])
    exact(lse, expected[1])


def test_a_mask_may_read_the_raw_score():
    call = make_call()
    out, _ = BACKEND.forward(lowered("mask = score > -1000; score = 3 * score"), call)
    exact(out, by_hand(call, lambda s: 3 * s)[0])


def test_sink_is_one_more_logit_in_the_denominator():
    call = make_call({"s": draw(HEADS)})
    out, lse = forward(lowered("tensor s[heads]: float; mask = q >= kv; sink = s[h]"), call)
    expected = by_hand(call, live=Q >= KV, sink=call.tensors["s"].view(1, HEADS, 1, 1))
    exact(out, expected[0])
    exact(lse, expected[1])


def test_a_far_larger_sink_leaves_nothing_and_no_nan():
    call = make_call()
    out, lse = forward(lowered("sink = 5000.0"), call)
    assert (out == 0).all()
    exact(lse, torch.full_like(lse, 5000.0))


def test_dead_rows_stay_dead_beside_a_sink():
    call = make_call({"s": draw(HEADS)})
    out, lse = forward(lowered("tensor s[heads]: float; mask = kv < q; sink = s[h]"), call)
    assert (out[:, :, 0] == 0).all()
    assert (lse[:, :, 0] == -torch.inf).all()
    (grad,) = torch.autograd.grad(out[:, :, 0].sum() + lse[:, :, 1:].sum() * 0, call.tensors["s"])
    assert (grad == 0).all()


@pytest.mark.parametrize(
    ("text", "formula"),
    [
        ("weights = sigmoid(score)", torch.sigmoid),
        ("weights = relu(score) ** 2 / kv_len", lambda s: s.relu() ** 2 / KV_LEN),
        ("score = score + 1; weights = score * score", lambda s: (s + 1) ** 2),
    ],
)
def test_own_weights(text, formula):
    call = make_call()
    out, lse = forward(lowered("mask = kv < q;" + text), call)
    k, v = (x.repeat_interleave(2, 1) for x in (call.k, call.v))
    weights = formula(call.q @ k.mT * call.scale) * (KV < Q)
    exact(out, weights @ v)
    assert (lse[:, :, 1:] == 0).all()
    assert (lse[:, :, 0] == -torch.inf).all()


def test_dropout_drops_what_the_generator_says():
    p = 0.3
    call = make_call(seed=123)
    out, lse = forward(lowered("weights = dropout(softmax(score), 0.3)"), call)
    k, v = (x.repeat_interleave(2, 1) for x in (call.k, call.v))
    score = call.q @ k.mT * call.scale
    keep = kept(123, torch.tensor(p), (BATCH, HEADS, Q_LEN, KV_LEN)).double() / (1 - p)
    exact(out, (score.softmax(-1) * keep) @ v)
    exact(lse, score.logsumexp(-1))


def test_dropout_is_the_same_in_every_dtype():
    """Which pairs are kept is decided in fp32, also where p is no fp32 number."""
    text = "param p: float; weights = dropout(softmax(score), p)"
    shape = (1, 1, 64, 64)
    zero, one = torch.zeros(1, 1, 64, 1), torch.eye(64).reshape(shape)
    kept = []
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        leaves = (zero.to(dtype), zero.to(dtype), one.to(dtype))
        call = make_call(params={"p": 0.48}, leaves=leaves, seed=9)
        kept.append(BACKEND.forward(lowered(text), call)[0] != 0)
    assert all(torch.equal(kept[0], other) for other in kept[1:])
    fraction = kept[0].double().mean().item()
    assert abs(fraction - 0.52) < 5 * math.sqrt(0.48 * 0.52 / 64**2)


def test_dropout_seeds_and_extremes():
    def run(p, seed):
        call = make_call(params={"p": p}, leaves=leaves, seed=seed)
        text = "param p: float; weights = dropout(softmax(score), p)"
        return BACKEND.forward(lowered(text), call)[0]

    leaves = (draw(1, 2, 8, 4), draw(1, 2, 8, 4), draw(1, 2, 8, 4))
    assert torch.equal(run(0.5, 1), run(0.5, 1))
    assert not torch.equal(run(0.5, 1), run(0.5, 2))
    exact(run(0.0, 1), by_hand(make_call(leaves=leaves))[0])
    assert (run(1.0, 1) == 0).all()


def test_dropout_keeps_the_mean():
    leaves = (torch.zeros(8, 8, 64, 1), torch.zeros(8, 8, 64, 1), torch.ones(8, 8, 64, 1))
    call = make_call(leaves=leaves, seed=4)
    out, _ = BACKEND.forward(lowered("weights = dropout(softmax(score), 0.25)"), call)
    assert abs(out.mean().item() - 1) < 5 * math.sqrt(0.25 / 0.75 / (8 * 8 * 64 * 64))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_do_what_eager_attention_does(dtype):
    call = make_call(dtype=dtype)
    out, lse = forward(lowered("mask = q >= kv; score = score * 2"), call)
    k, v = (x.repeat_interleave(2, 1) for x in (call.k, call.v))
    score = (call.q @ k.mT).float() * call.scale * 2
    score = score.masked_fill(~(Q >= KV), -torch.inf)
    expected = score.softmax(-1).to(dtype) @ v
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, score.logsumexp(-1))


def test_offsets_and_maps_give_logical_positions():
    text = lowered("mask = q >= kv; score = score + 0.1 * (q - kv)")
    call = make_call(q_offset=20, kv_offset=5)
    expected = by_hand(call, lambda s: s + (Q + 20 - KV - 5).double() * 0.1, Q + 20 >= KV + 5)[0]
    exact(BACKEND.forward(text, call)[0], expected)
    as_tensors = call._replace(
        q_offset=torch.tensor(20), kv_offset=torch.tensor(5, dtype=torch.int32)
    )
    exact(BACKEND.forward(text, as_tensors)[0], expected)
    mapped = call._replace(
        q_offset=0, q_index=torch.arange(20, 29), kv_index=torch.arange(5, 12).int()
    )
    exact(BACKEND.forward(text, mapped)[0], expected)


def test_names_of_heads_and_sizes():
    text = (
        "score + 100 * h + 10 * hkv + b + heads + 2 * kv_heads + q_len / kv_len + head_dim + batch"
    )
    call = make_call()
    h = torch.arange(HEADS).view(1, HEADS, 1, 1)
    b = torch.arange(BATCH).view(BATCH, 1, 1, 1)
    shift = 100 * h + 10 * (h // 2) + b + HEADS + 2 * KV_HEADS + DIM + BATCH
    _, lse = forward(lowered(text), call)
    exact(lse, by_hand(call, lambda s: s + shift + Q_LEN / KV_LEN)[1])


TWO_PATHS = {
    "identity": ("score", {}, {}),
    "relative": ("mask = q >= kv; score = sin(score) * score + (q - kv)", {}, {}),
    "silu": ("silu(score) + gelu(score) + softplus(score) - erf(score)", {}, {}),
    "roots": ("mask = score > 0.1; score = sqrt(score) + rsqrt(score) + log(score)", {}, {}),
    "kinks": ("abs(score) + max(score, 0.5 * score) + clamp(score, -1, 1)", {}, {}),
    "powers": ("abs(score) ** 1.5 + 2.0 ** score + score ** 3", {}, {}),
    "bias": (
        "tensor t[q_len, kv_len]: float; mask = kv <= q; score = score * t[q, kv] + exp(t[q, 0])",
        {"t": (Q_LEN, KV_LEN)},
        {},
    ),
    "diagonal": (
        "tensor t[q_len + kv_len]: float; score = score + t[q - kv + kv_len] * t[kv]",
        {"t": (Q_LEN + KV_LEN,)},
        {},
    ),
    "heads": (
        "tensor t[batch, heads]: float; tensor u[kv_heads]: float; "
        "score = tanh(score * t[b, h]) + u[hkv]",
        {"t": (BATCH, HEADS), "u": (KV_HEADS,)},
        {},
    ),
    "params": (
        "param a: float; param c: float; score = c * tanh(score / c) * a",
        {},
        {"a": 0.7, "c": 2.0},
    ),
    "sink": (
        "tensor s[heads]: float; param a: float; mask = kv < q; score = score * a; "
        "sink = s[h] * s[h] + a",
        {"s": (HEADS,)},
        {"a": 0.7},
    ),
    "sigmoid": (
        "tensor t[heads]: float; param a: float; mask = kv < q; score = a * score; "
        "weights = sigmoid(score - t[h]) ** 2 * a",
        {"t": (HEADS,)},
        {"a": 0.7},
    ),
    "dropout": (
        "tensor t[heads]: float; mask = kv < q; score = score * t[h]; "
        "weights = dropout(softmax(score), 0.4)",
        {"t": (HEADS,)},
        {},
    ),
    "learned_dropout": (
        "param p: float; tensor t[heads]: float; score = score * t[h]; "
        "weights = dropout(softmax(score), p)",
        {"t": (HEADS,)},
        {"p": 0.6},
    ),
    "sigmoid_dropout": (
        "param a: float; mask = kv < q; weights = dropout(sigmoid(score * a), 0.25)",
        {},
        {"a": 0.7},
    ),
    "sink_dropout": (
        "tensor s[heads]: float; sink = s[h]; weights = dropout(softmax(score), 0.25)",
        {"s": (HEADS,)},
        {},
    ),
    "constant": ("mask = kv <= q; score = 0.3 * (q - kv)", {}, {}),
}


@pytest.mark.parametrize("with_lse", [True, False])
@pytest.mark.parametrize("name", TWO_PATHS)
def test_symbolic_gradients_equal_autograds(name, with_lse):
    text, shapes, values = TWO_PATHS[name]
    tensors = {key: draw(*shape) for key, shape in shapes.items()}
    params = {
        key: torch.tensor(value, dtype=torch.float64, requires_grad=True)
        for key, value in values.items()
    }
    call = make_call(tensors, params, seed=77)
    program = lowered(text)
    out, both = BACKEND.forward(program, call)
    lse = public_lse(both)
    grad_out, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    grad_lse = torch.where(lse.isinf(), 0.0, grad_lse)
    leaves = (call.q, call.k, call.v, *tensors.values(), *params.values())
    outputs = (out, lse) if with_lse and program.program.weights is None else (out,)
    seeds = (grad_out, grad_lse)[: len(outputs)]
    expected = torch.autograd.grad(outputs, leaves, seeds, allow_unused=False)
    wants = Wants(tensors=frozenset(tensors), params=frozenset(params))
    of_lse = grad_lse if len(outputs) == 2 else None
    found = BACKEND.backward(program, call, Backward(out, both, grad_out, of_lse, wants))
    parts = (
        found.q,
        found.k,
        found.v,
        *(found.tensors[key] for key in tensors),
        *(found.params[key] for key in params),
    )
    for part, exactly in zip(parts, expected, strict=True):
        exact(part, exactly, 1e-10)


def test_only_wanted_gradients_are_given():
    call = make_call({"t": draw(HEADS)})
    program = lowered("tensor t[heads]: float; score = score * t[h]")
    out, lse = BACKEND.forward(program, call)
    found = BACKEND.backward(
        program, call, Backward(out, lse, torch.ones_like(out), None, Wants(False, True, False))
    )
    assert found.q is None
    assert found.v is None
    assert found.k.shape == call.k.shape
    assert dict(found.tensors) == {}


@pytest.mark.parametrize(
    "name", ["relative", "heads", "params", "sink", "sigmoid", "learned_dropout"]
)
def test_gradcheck(name):
    text, shapes, values = TWO_PATHS[name]
    sizes = {"batch": 2, "heads": 2, "kv_heads": 2, "q_len": 8, "kv_len": 8, "head_dim": 4}
    dims = {(BATCH, HEADS): (2, 2), (KV_HEADS,): (2,), (HEADS,): (2,)}
    program = lowered(text)
    names, params = list(shapes), list(values)
    leaves = [draw(2, 2, 8, 4) for _ in range(3)]
    leaves += [draw(*dims[shape]) for shape in shapes.values()]
    leaves += [torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in values.values()]

    def function(q, k, v, *rest):
        captures = dict(zip(names, rest, strict=False))
        scalars = dict(zip(params, rest[len(names) :], strict=True))
        out, lse = forward(program, Call(q, k, v, 0.5, sizes, captures, scalars))
        return out, torch.where(lse.isinf(), 0.0, lse)

    assert torch.autograd.gradcheck(function, leaves)


POISONED = [
    (
        "mask = score > 0.1; score = log(score - 0.05)",
        lambda s: (torch.log(s.clamp(min=0.1) - 0.05), s > 0.1),
    ),
    (
        "where(score > 0.5, log(score - 0.25), 2 * score)",
        lambda s: (torch.where(s > 0.5, torch.log(s.clamp(min=0.5) - 0.25), 2 * s), s > -torch.inf),
    ),
    (
        "where(score > 0.5, 1 / max(score - 0.5, 0.0), score)",
        lambda s: (torch.where(s > 0.5, 1 / (s - 0.5).clamp(min=1e-9), s), s > -torch.inf),
    ),
]


@pytest.mark.parametrize(("text", "formula"), POISONED, ids=range(3))
def test_what_is_not_used_never_poisons_gradients(text, formula):
    """Through autograd and through the symbolic derivative."""
    call = make_call()
    program = lowered(text)
    out, lse = BACKEND.forward(program, call)
    k, v = (x.repeat_interleave(2, 1) for x in (call.k, call.v))
    score, live = formula(call.q @ k.mT * call.scale)
    some = live.any(-1, keepdim=True)
    weights = torch.where(some, score.masked_fill(~live & some, -torch.inf).softmax(-1), 0.0)
    expected = weights @ v
    exact(out, expected)
    seed = torch.randn_like(out)
    leaves = (call.q, call.k, call.v)
    wanted = torch.autograd.grad(expected, leaves, seed)
    symbolic = BACKEND.backward(program, call, Backward(out, lse, seed, None, Wants()))
    for path in (torch.autograd.grad(out, leaves, seed), (symbolic.q, symbolic.k, symbolic.v)):
        for found, exactly in zip(path, wanted, strict=True):
            assert found.isfinite().all()
            exact(found, exactly, 1e-9)


def test_nan_captures_of_dead_pairs_never_poison_gradients():
    bias = torch.randn(Q_LEN, KV_LEN, dtype=torch.float64)
    bias[Q < KV] = torch.nan
    bias[Q < KV - 1] = torch.inf
    call = make_call({"t": bias.requires_grad_(), "g": draw(HEADS)})
    program = lowered(
        "tensor t[q_len, kv_len]: float; tensor g[heads]: float; "
        "mask = q >= kv; score = score + g[h] * t[q, kv]"
    )
    out, lse = BACKEND.forward(program, call)
    leaves = (call.q, call.k, call.v, bias, call.tensors["g"])
    seed = torch.randn_like(out)
    first = torch.autograd.grad(out, leaves, seed)
    second = BACKEND.backward(
        program, call, Backward(out, lse, seed, None, Wants(tensors=frozenset({"t", "g"})))
    )
    for found in (first, (second.q, second.k, second.v, second.tensors["t"], second.tensors["g"])):
        assert all(x.isfinite().all() for x in found)
        assert (found[3][Q < KV] == 0).all()
        assert found[3][1:][Q[1:] >= KV].abs().min() > 0


def test_unused_leaves_get_zero_and_not_none():
    level = draw(HEADS)
    call = make_call({"level": level})
    program = lowered("tensor level[heads]: float; mask = level[h] < 100.0; score = 1.0")
    out, lse = forward(program, call)
    for outputs in (out, lse):
        grads = torch.autograd.grad(outputs.sum(), (call.q, call.k, level), retain_graph=True)
        assert all((grad == 0).all() for grad in grads)
    (grad,) = torch.autograd.grad(lse.sum(), call.v)
    assert (grad == 0).all()


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 0, 3, 4)])
def test_empty_calls(sizes):
    batch, heads, q_len, kv_len = sizes
    leaves = (
        draw(batch, heads, q_len, 4),
        draw(batch, heads, kv_len, 4),
        draw(batch, heads, kv_len, 5),
    )
    call = make_call({"t": draw(3)}, leaves=leaves)
    program = lowered("tensor t[3]: float; mask = q >= kv; score = score + t[kv]; sink = 1.0")
    out, lse = BACKEND.forward(program, call)
    assert out.shape == (batch, heads, q_len, 5)
    assert (out == 0).all()
    assert (lse[0] == -torch.inf).all()
    wants = Wants(tensors=frozenset({"t"}))
    grads = torch.autograd.grad(out.sum(), (*leaves, call.tensors["t"]))
    found = BACKEND.backward(program, call, Backward(out, lse, torch.ones_like(out), None, wants))
    for one, other in zip(grads, (found.q, found.k, found.v, found.tensors["t"]), strict=True):
        assert one.shape == other.shape
        assert (one == 0).all()
        assert (other == 0).all()


def test_empty_captures_read_zero():
    program = lowered("tensor t[pages]: float; score = score + t[kv]")
    call = make_call({"t": draw(0)}, dims={"pages": 0})
    out, _ = BACKEND.forward(program, call)
    exact(out, by_hand(call)[0])
    (grad,) = torch.autograd.grad(out.sum(), call.tensors["t"])
    assert grad.shape == (0,)


def test_checked_lookups():
    program = lowered("tensor t[4]: float; mask = q >= kv; score = score + t[q - kv]")
    call = make_call({"t": draw(4)})
    BACKEND.forward(program, call)
    with pytest.raises(ArgumentError, match="'t' is looked up at 4 in dim 0, of size 4"):
        ReferenceBackend(checked=True).forward(program, call)
    inside = lowered(
        "tensor t[4]: float; mask = 0 <= q - kv and q - kv < 4; score = score + t[q - kv]"
    )
    ReferenceBackend(checked=True).forward(inside, call)


def test_a_sink_beside_own_weights_is_refused():
    program = Program(score=SCORE, sink=const(1.0), weights=node(Op.SIGMOID, SCORE))
    with pytest.raises(UnsupportedError, match="sink"):
        BACKEND.check(lower_program(program), make_call())


def test_a_dropout_probability_of_the_score_is_refused():
    program = Program(score=SCORE, dropout=node(Op.SIGMOID, SCORE))
    with pytest.raises(UnsupportedError, match="dropout"):
        BACKEND.check(lower_program(program), make_call())


def test_it_runs_everywhere():
    assert BACKEND.why_not(torch.device("cpu")) is None
    BACKEND.check(lowered("score"), make_call())


def test_repeats_are_bitwise_equal():
    call = make_call({"t": draw(Q_LEN + KV_LEN)})
    program = lowered("tensor t[q_len + kv_len]: float; score = score + t[q - kv + kv_len]")
    leaves = (call.q, call.k, call.v, call.tensors["t"])
    first, second = (
        torch.autograd.grad(BACKEND.forward(program, call)[0].sum(), leaves) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_lookup_in_the_branch_that_is_not_chosen_counts():
    text = "tensor t[n]: float\nmask = causal()\nscore = score + where(q - kv < n, t[{}], 0.0)"
    q, t = torch.randn(1, 1, 16, 8), torch.randn(4)
    checked, plain = (
        attndsl.compile(text.format(index), checked=index != "q - kv")
        for index in ("clamp(q - kv, 0, n - 1)", "q - kv")
    )
    torch.testing.assert_close(checked(q, q, q, t=t), plain(q, q, q, t=t))
    with pytest.raises(ArgumentError, match="'t' is looked up at 4"):
        attndsl.compile(text.format("q - kv"), checked=True)(q, q, q, t=t)
