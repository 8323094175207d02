"""``dot(u[..., :], w[..., :])`` in a program: values, gradients of both sides, shapes, layouts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import attndsl
from attndsl import errors
from attndsl.backends.base import Backward, Wants
from attndsl.backends.tiled.contractions import Wide, why_tiles
from attndsl.call.bind import bind
from attndsl.call.dispatch import backend_of
from attndsl.passes.fold_dots import with_heads_apart
from attndsl.pipeline import lower
from attndsl.source import Source

DECLARED = {
    "own": "tensor own[batch, heads, q_len, r]: float",
    "shared": "tensor shared[batch, kv_len, r]: float",
    "keys": "tensor keys[batch, kv_heads, kv_len, r]: float",
    "by_head": "tensor by_head[heads, kv_len, r]: float",
    "table": "tensor table[5, r]: float",
    "kind": "tensor kind[kv_len]: int",
    "gain": "tensor gain[heads]: float",
    "rows": "tensor rows[q_len]: float",
    "columns": "tensor columns[kv_len]: float",
    "c": "param c: float",
}
WIDENED = {
    "rotary": "mask = q >= kv; score = score + dot(own[b, h, q, :], shared[b, kv, :])",
    "capped": (
        "mask = kv - q < 4; score = score + c * dot(keys[b, hkv, kv, :], own[b, h, q, :]);"
        "score = 5 * tanh(score / 5) - 0.1 * (q - kv)"
    ),
    "by head": "score = score - dot(own[b, h, q, :], by_head[h, kv, :]) * gain[h] * columns[kv]",
    "looked up": "score = score + rows[q] * dot(own[b, h, q, :], table[kind[kv], :]) + columns[kv]",
    "one table twice": (
        "score = (score + dot(table[q % 5, :], keys[b, hkv, kv, :])"
        " + dot(own[b, h, 0, :], table[kv % 5, :])) * gain[h]"
    ),
}
IN_TILES = {
    "gate": "mask = q >= kv; score = score * sigmoid(dot(own[b, h, q, :], shared[b, kv, :]))",
    "mask": "mask = dot(table[q % 5, :], keys[b, hkv, kv, :]) > 0; score = score + columns[kv]",
    "weights": "weights = sigmoid(score) * exp(-dot(own[b, h, q, :], shared[b, kv, :]) ** 2)",
    "a factor of pairs": "score = score + dot(own[b, h, q, :], shared[b, kv, :]) * cos(0.1*(q-kv))",
}
PROGRAMS = WIDENED | IN_TILES


def _text(body):
    return "\n".join([line for name, line in DECLARED.items() if _mentions(body, name)] + [body])


def _mentions(body, name):
    return f"{name}[" in body or (name == "c" and "c * dot" in body)


def _captures(body, place, dtype, batch, heads, kv_heads, q_len, kv_len, width=6):
    def draw(*shape):
        return torch.randn(shape, device=place.device).to(dtype).requires_grad_()

    every = {
        "own": draw(batch, heads, q_len, width),
        "shared": draw(batch, kv_len, width),
        "keys": draw(batch, kv_heads, kv_len, width),
        "by_head": draw(heads, kv_len, width),
        "table": draw(5, width),
        "kind": torch.randint(0, 5, (kv_len,), device=place.device),
        "gain": draw(heads),
        "rows": draw(q_len),
        "columns": draw(kv_len),
        "c": torch.tensor(0.5, device=place.device, requires_grad=True),
    }
    return {name: value for name, value in every.items() if _mentions(body, name)}


def _inputs(check, place, body, dtype=torch.float32, **sizes):
    batch, heads, length, _ = place.shape
    heads = sizes.get("heads", heads)
    q_len = sizes.get("q_len", length)
    captures = _captures(
        body, place, dtype, batch, heads, sizes.get("kv_heads", heads), q_len,
        sizes.get("kv_len", q_len),
    )  # fmt: skip
    with_lse = "weights" not in body
    return check.inputs(place, dtype, with_lse=with_lse, captures=captures, **sizes)


@pytest.mark.few_when_interpreted(name=["capped", "by head", "gate"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_contractions(check, kernels, name):
    body = PROGRAMS[name]
    inputs = _inputs(check, kernels, body, heads=4, kv_heads=2)
    check(kernels, _text(body), inputs)


@pytest.mark.none_when_interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_half_types(check, kernels, dtype):
    body = WIDENED["capped"]
    # One of its gradients is a single number.
    several = [_inputs(check, kernels, body, dtype) for _ in range(16)]
    check.draws(kernels, _text(body), several)


@pytest.mark.parametrize(("q_len", "kv_len"), [(3, 37), (40, 0)])
def test_ragged_lengths(check, kernels, q_len, kv_len):
    body = WIDENED["looked up"]
    check(kernels, _text(body), _inputs(check, kernels, body, q_len=q_len, kv_len=kv_len))


def test_positions_choose_rows(check, kernels):
    """Rows are looked up by logical positions, and the rows of a chunk are those of the whole."""
    body = WIDENED["rotary"]
    inputs = _inputs(check, kernels, body, q_len=12)
    attention = attndsl.compile(
        _text(body).replace("q_len, r", "n, r").replace("kv_len, r", "m, r"),
        backend=kernels.backend,
    )
    q, k, v = inputs.q, inputs.k, inputs.v
    whole = attention(q, k, v, **inputs.captures)
    chunk = attention(q[:, :, 7:], k, v, **inputs.captures, q_offset=7)
    torch.testing.assert_close(chunk, whole[:, :, 7:], atol=1e-5, rtol=1e-5)
    order = torch.randperm(12, device=kernels.device)
    mixed = attention(q[:, :, order], k, v, **inputs.captures, q_index=order)
    torch.testing.assert_close(mixed, whole[:, :, order], atol=1e-5, rtol=1e-5)


def test_strides_of_captures(check, kernels):
    body = WIDENED["rotary"]
    inputs = _inputs(check, kernels, body).to(torch.float32)
    attention = attndsl.compile(_text(body), backend=kernels.backend)
    usual = check.run(attention, inputs)
    swapped = inputs.captures["own"].detach().permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
    padded = torch.zeros(*inputs.captures["shared"].shape[:2], 9, device=kernels.device)[..., 2:8]
    padded.copy_(inputs.captures["shared"].detach())
    captures = {"own": swapped.requires_grad_(), "shared": padded.requires_grad_()}
    found = attention(inputs.q, inputs.k, inputs.v, **captures)
    torch.testing.assert_close(found.detach(), usual["out"], atol=1e-6, rtol=1e-6)


def test_gradients_are_equal_bit_for_bit(check, kernels):
    body = WIDENED["rotary"]
    inputs = _inputs(check, kernels, body, q_len=40)
    inputs.options["deterministic"] = True
    inputs = inputs.to(torch.float32)
    attention = attndsl.compile(_text(body), backend=kernels.backend)
    first = check.run(attention, inputs)
    for _ in range(2):
        for name, value in check.run(attention, inputs).items():
            assert torch.equal(value, first[name]), name


def test_the_formula():
    """The reference backend against the products written out."""
    q, k, v = (torch.randn(2, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    u, w = (torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    attention = attndsl.compile(
        "tensor u[batch, q_len, 3]: float; tensor w[batch, kv_len, 3]: float;"
        "score = score * dot(u[b, q, :], w[b, kv, :])",
        backend="reference",
    )
    given = (q, k, v, u, w)
    scores = (q @ k.mT / 2) * (u @ w.mT).unsqueeze(1)
    expected = torch.softmax(scores, -1) @ v
    found = attention(q, k, v, u=u, w=w)
    torch.testing.assert_close(found, expected)
    grad = torch.randn_like(found)
    torch.testing.assert_close(
        torch.autograd.grad(found, given, grad), torch.autograd.grad(expected, given, grad)
    )


@pytest.mark.parametrize(("backend", "name"), [("cpu", "capped"), ("reference", "gate")])
def test_gradcheck(check, backend, name):
    body, place = PROGRAMS[name], SimpleNamespace(device="cpu", shape=(1, 2, 5, 4))
    inputs = _inputs(check, place, body, torch.float64, q_len=5).to(torch.float64)
    attention = attndsl.compile(_text(body), backend=backend)
    names = list(inputs.captures)

    def call(q, k, v, *captures):
        return attention(q, k, v, return_lse=True, **dict(zip(names, captures, strict=True)))

    given = (inputs.q, inputs.k, inputs.v, *inputs.captures.values())
    assert torch.autograd.gradcheck(call, given, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(call, given, fast_mode=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_only_adds_to_the_score_is_part_of_its_product(name):
    body = PROGRAMS[name]
    lowered = attndsl.compile(_text(body)).lowered
    q, k, v = (torch.randn(2, 4, 9, 16) for _ in range(3))
    captures = _captures(body, SimpleNamespace(device="cpu"), torch.float32, 2, 4, 4, 9, 9)
    call = bind(lowered.program, (q, k, v), captures)
    if name in IN_TILES:
        assert why_tiles(lowered, call)
        return
    assert why_tiles(lowered, call) is None
    with torch.no_grad():
        wide = Wide(lowered, call)
    widths = {"one table twice": 16 + 6 + 6}
    expected = widths.get(name, 16 + 6)
    assert wide.call.q.shape == wide.call.k.shape == (2, 4, 9, -(-expected // 8) * 8)
    wide_rows = call.q.new_zeros(2, 4, 9, 240)
    narrow = bind(lowered.program, (wide_rows, wide_rows, v), captures)
    refused = why_tiles(lowered, narrow)
    assert (refused is None) == (240 + expected - 16 <= 256)


ROWS = {
    "plain": "score = score + c * dot(own[b, h, q, :], table[hkv, :])",
    "alone": "score = -dot(own[b, h, q, :], table[hkv, :])",
    "among others": (
        "mask = q >= kv; score = (score + dot(own[b, h, q, :], shared[b, kv, :])) * gain[h]"
        " - (rows[q] - dot(table[hkv, :], own[b, h, q, :]) ** 2 / 4) + columns[kv]"
    ),
    "some rows without pairs": "mask = kv < q - 3; score = rows[q] - dot(own[b, h, q, :],"
    " own[b, h, 0, :]) / 2 + score",
}


@pytest.mark.parametrize("name", ROWS)
def test_what_is_added_to_whole_rows(check, kernels, name):
    """Values and gradients, those of the log-sum-exp among them."""
    body = ROWS[name]
    check(kernels, _text(body), _inputs(check, kernels, body, heads=4, kv_heads=2))


def test_a_softmax_does_not_see_what_is_added_to_whole_rows(check, kernels):
    """No gradient of the output, not even a small one, and the output of the program without."""
    body, tiles = ROWS["plain"], kernels.backend == "cpu"
    dtype = torch.float32 if tiles else torch.bfloat16
    inputs = _inputs(check, kernels, body, dtype).to(dtype)
    q, k, v, captures = inputs.q, inputs.k, inputs.v, inputs.captures
    captures["c"] = torch.tensor(20.0, device=kernels.device, requires_grad=True)
    found, lse = attndsl.compile(_text(body), backend=kernels.backend)(
        q, k, v, **captures, return_lse=True
    )
    plain = attndsl.compile("score", backend=kernels.backend)
    expected, plain_lse = plain(q, k, v, return_lse=True)
    # Torch operations, tile by tile, round what kernels do not compute.
    atol = 1e-3 if tiles else 0.0
    torch.testing.assert_close(found, expected, atol=atol, rtol=0.0)
    added = 20 * captures["own"].float() @ captures["table"][: q.shape[1], :, None].float()
    torch.testing.assert_close(lse, plain_lse + added.squeeze(-1), atol=1e-3, rtol=1e-4)
    given = tuple(captures.values())
    for grad in torch.autograd.grad(found.float().square().sum(), given, retain_graph=True):
        assert grad.abs().max() <= atol
    (of_c,) = torch.autograd.grad(lse.sum(), captures["c"])
    torch.testing.assert_close(of_c, added.sum() / 20, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "more", ["sink = 0.5", "weights = sigmoid(score)"], ids=["sink", "weights"]
)
def test_what_is_seen_of_rows_stays(check, kernels, more):
    body = f"{ROWS['plain']}; {more}"
    check(kernels, _text(body), _inputs(check, kernels, body))


def test_rows_of_parts_of_keys(check, kernels):
    """The gradient of a part has the share of its own keys."""
    body = ROWS["plain"]
    inputs = _inputs(check, kernels, body).to(torch.float32)
    attention = attndsl.compile(_text(body), backend=kernels.backend)
    lowered = attention.lowered
    assert lowered.contractions.row is not None
    backend, _ = backend_of(lowered, kernels.backend, inputs.q.device, False, torch.float32)
    call = bind(lowered.program, (inputs.q, inputs.k, inputs.v), inputs.captures)
    with torch.no_grad():
        out, lse = backend.forward(lowered, call)
        wants = Wants(tensors=frozenset({"own"}), partial=True)
        grads = torch.ones_like(out), torch.ones_like(lse[0])
        whole = backend.backward(lowered, call, Backward(out, lse, *grads, wants)).tensors["own"]
        total, half = torch.zeros_like(whole), call.k.shape[2] // 2
        for keys in (slice(0, half), slice(half, None)):
            k, v = call.k[:, :, keys], call.v[:, :, keys]
            part = call._replace(k=k, v=v, sizes={**call.sizes, "kv_len": k.shape[2]})
            found = backend.backward(lowered, part, Backward(out, lse, *grads, wants))
            total += found.tensors["own"]
    torch.testing.assert_close(total, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "given", "names"),
    [
        (torch.float16, torch.float32, ["own"]),
        (torch.float16, torch.float32, ["shared"]),
        (torch.bfloat16, torch.float16, ["shared", "own"]),
    ],
    ids=["queries", "keys", "halves"],
)
def test_rows_keep_the_precision_that_they_are_given_with(check, kernels, dtype, given, names):
    """Beside q and k of fewer bits, which would round them by 0.01 here."""
    body = "score = score + dot(own[b, h, q, :], shared[b, kv, :]) * 30.0"
    inputs = _inputs(check, kernels, body, dtype).to(dtype)
    captures = dict(inputs.captures)
    for name in names:
        like = captures[name]
        captures[name] = torch.randn(like.shape, device=like.device).to(given)
    attention = attndsl.compile(_text(body), backend=kernels.backend)
    call = bind(attention.lowered.program, (inputs.q, inputs.k, inputs.v), captures)
    short = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}
    refused = why_tiles(attention.lowered, call)
    assert f"{short[dtype]}, would round rows of '{names[-1]}', {short[given]}" in refused
    found = attention(inputs.q, inputs.k, inputs.v, **captures)
    single = [x.detach().float() for x in (inputs.q, inputs.k, inputs.v)]
    exact = attndsl.compile(_text(body), backend="reference")(*single, **captures)
    atol = 8e-3 if dtype is torch.bfloat16 else 1e-3
    torch.testing.assert_close(found.float(), exact, atol=atol, rtol=8e-3)


def test_in_graphs(check, kernels):
    body = WIDENED["capped"]
    inputs = _inputs(check, kernels, body).to(torch.float32)
    attention = attndsl.compile(_text(body), backend=kernels.backend)

    def call(*args, **options):
        return attention(*args, **options)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    expected, found = check.run(attention, inputs), check.run(compiled, inputs)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-6)


def test_rows_of_two_lengths_are_refused():
    attention = attndsl.compile(
        "tensor u[q_len, m]: float; tensor w[kv_len, n]: float;"
        "score = score + dot(u[q, :], w[kv, :])"
    )
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(errors.ShapeError, match="which have 3 and 5 elements"):
        attention(x, x, x, u=torch.randn(4, 3), w=torch.randn(4, 5))


def test_a_row_out_of_range_is_found_in_checked_mode():
    attention = attndsl.compile(
        "tensor u[n, 3]: float; tensor w[kv_len, 3]: float;"
        "score = score + dot(u[q + 1, :], w[kv, :])",
        backend="reference", checked=True,
    )  # fmt: skip
    x = torch.randn(1, 1, 4, 8)
    attention(x, x, x, u=torch.randn(5, 3), w=torch.randn(4, 3))
    with pytest.raises(errors.ArgumentError, match="'u' is looked up at 4 in dim 0, of size 4"):
        attention(x, x, x, u=torch.randn(4, 3), w=torch.randn(4, 3))


def test_flex_attention_has_none():
    attention = attndsl.compile(
        "tensor u[q_len, 3]: float; tensor w[kv_len, 3]: float;"
        "score = score + dot(u[q, :], w[kv, :])"
    )
    with pytest.raises(errors.UnsupportedError, match="no products of rows"):
        attention.to_flex(4, 4, u=torch.randn(4, 3), w=torch.randn(4, 3))


def test_source_of_what_kernels_run():
    attention = attndsl.compile(
        "tensor u[q_len, 3]: float; tensor w[kv_len, 3]: float;"
        "score = score + dot(u[q, :], w[kv, :])"
    )
    assert "def attention_forward" in attention.source(backend="triton")
    gate = attndsl.compile(
        "tensor u[q_len, 3]: float; tensor w[kv_len, 3]: float;"
        "score = score * dot(u[q, :], w[kv, :])"
    )
    with pytest.raises(errors.UnsupportedError, match="does more than add to the raw score"):
        gate.source(backend="triton")


APART = """
tensor own[q_len, r]: float
tensor by_head[heads, kv_len, r]: float
tensor gain[kv_heads]: float
tensor bias[batch, kv_heads, kv_len]: float
tensor logit[kv_heads, 2]: float
mask = kv > hkv * 3 or kv_heads != 2
sink = logit[hkv, h % kv_heads] + hkv
score = (score + dot(own[q, :], by_head[h, kv, :])) * gain[hkv] * rsqrt(float(r)) / kv_heads
score = score + bias[b, hkv, kv] + gain[h // (heads // kv_heads)]
"""


def test_key_rows_by_head_change_no_other_head(check, kernels):
    """Copies of k for all query heads are no key heads of the program."""

    def draw(*shape):
        return torch.randn(shape, device=kernels.device).requires_grad_()

    captures = {
        "own": draw(11, 3), "by_head": draw(4, 13, 3), "gain": draw(2),
        "bias": draw(2, 2, 13), "logit": draw(2, 2),
    }  # fmt: skip
    inputs = check.inputs(
        kernels, torch.float32, batch=2, heads=4, kv_heads=2, q_len=11, kv_len=13, captures=captures
    )
    check(kernels, APART, inputs)


def test_the_name_of_the_given_key_heads_is_nobody_elses():
    text = """
    tensor t[given_kv_heads]: float
    tensor u[heads, kv_len, r]: float
    score = score + dot(u[h, kv, :], u[h, q, :]) + t[hkv]
    """
    lowered = lower(Source(text), {})
    program, name = with_heads_apart(lowered.contractions.wide.program)
    assert name == "given_kv_heads_"
    assert program.dim_names() == ("given_kv_heads", name)


def test_no_entries(kernels):
    text = """
    tensor left[batch, q_len, r]: float
    tensor right[kv_heads, kv_len, r]: float
    tensor gain[heads]: float
    score = score + gain[h] * dot(left[b, q_len - 1 - q, :], right[hkv, kv, :])
    """
    device = kernels.device
    q = torch.zeros(0, 2, 3, 8, device=device, requires_grad=True)
    k, v = torch.zeros(2, 0, 1, 5, 8, device=device)
    left = torch.zeros(0, 3, 4, device=device)
    right = torch.zeros(1, 5, 4, device=device, requires_grad=True)
    gain = torch.ones(2, device=device, requires_grad=True)
    attention = attndsl.compile(text, backend=kernels.backend)
    out = attention(q, k, v, left=left, right=right, gain=gain)
    assert out.shape == (0, 2, 3, 8)
    found = torch.autograd.grad(out.sum(), [q, right, gain])
    assert [tuple(x.shape) for x in found] == [(0, 2, 3, 8), (1, 5, 4), (2,)]
    assert not any(x.any() for x in found)


def test_a_contraction_reads_no_score():
    # A name may be the weight, whatever the score has become since.
    text = """
    tensor left[q_len, r]: float
    tensor right[kv_len, r]: float
    near = dot(left[q, :], right[kv, :])
    score = 1.0
    weights = near
    """
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    left, right = torch.randn(2, 5, 3, dtype=torch.float64)
    for backend in ("reference", "cpu"):
        out = attndsl.compile(text, backend=backend)(q, k, v, left=left, right=right)
        torch.testing.assert_close(out, (left @ right.mT) @ v)
