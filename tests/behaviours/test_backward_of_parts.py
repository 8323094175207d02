"""A backward from given results: summed over parts of the keys, it is the whole's."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support.parts_of_keys import CUTS, LENGTH, PROGRAMS, WIDTH, captures_of, operands_of, parts_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import attndsl
from attndsl.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError

SUNK = "tensor t[heads]: float; param a: float; mask = causal() and q - kv < 15"
SUNK += "; score = softcap(score, 3.0) + a * (q - kv); sink = t[h]"
LEARNED = "tensor t[heads]: float; tensor r[n]: float; tensor c[n]: float; mask = causal()"
LEARNED += "; score = t[h] * score + r[q] - c[kv]"
FP32 = {"out_dtype": torch.float32}


def _whole(attention, operands, captures, grads=None, **options):
    """Output, log-sum-exp, gradients of both, and gradients, by autograd."""
    found = attention(*operands, return_lse=True, **options, **captures)
    if grads is None:
        grads = [torch.randn_like(x) for x in found]
        grads[1] = torch.where(found[1] == -torch.inf, 0.0, grads[1])
    leaves = [*operands, *(x for x in captures.values() if x.requires_grad)]
    return found, grads, torch.autograd.grad(found, leaves, grads)


def _by_parts(attention, operands, captures, grads, cuts=CUTS, **options):
    """The same without autograd: parts are merged, and their backwards added up."""
    q, k, v = (x.detach() for x in operands)
    part = attention.without_sink()
    wide = FP32 if q.dtype in (torch.float16, torch.bfloat16) else {}
    parts = parts_of(part, (q, k, v), captures, cuts, **wide, **options)
    parts = [(out.detach(), lse.detach()) for out, lse in parts]
    logits = attention.sink_logits(q, k, **captures)
    out, lse = attndsl.merge(parts, sink=None if logits is None else logits.detach())
    found = [
        # The first part has the sink's gradient.
        (part if first else attention).backward(
            q, k[:, :, first:last], v[:, :, first:last], out, lse, *grads, kv_offset=first,
            grad_dtype=torch.float32 if wide else None, **options, **captures,
        )
        for first, last in pairwise(cuts)
    ]  # fmt: skip
    sums = [sum(each.q for each in found), *(torch.cat(x, 2) for x in _keys(found))]
    names = found[0].captures
    return (out, lse), [*sums, *(sum(each.captures[name] for each in found) for name in names)]


def _keys(found):
    return [each.k for each in found], [each.v for each in found]


@pytest.mark.few_when_interpreted(name=["window", "nothing", "sink of all"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_backwards_of_parts_add_up(place, name):
    attention = attndsl.compile(PROGRAMS[name], backend=place.backend)
    operands, captures = operands_of(place.device), captures_of(PROGRAMS[name], place.device)
    results, grads, wanted = _whole(attention, operands, captures)
    merged, found = _by_parts(attention, operands, captures, grads)
    for one, other in zip((*results, *wanted), (*merged, *found), strict=True):
        torch.testing.assert_close(one, other, atol=3e-5, rtol=3e-5)
        assert other.grad_fn is None


@pytest.mark.few_when_interpreted(dtype=[torch.bfloat16], text=[SUNK])
@pytest.mark.parametrize("text", [SUNK, LEARNED], ids=["sunk", "learned"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parts_of_halves_err_no_more_than_the_whole(place, dtype, text):
    """All that is added up is in fp32; operands are rounded as they are in one call."""
    golden = attndsl.compile(text, backend="reference")
    attention = attndsl.compile(text, backend=place.backend)
    operands, captures = operands_of(place.device, dtype), captures_of(text, place.device)
    results, grads, _ = _whole(attention, operands, captures)
    q, k, v, learned = attention.backward(
        *operands, *(x.detach() for x in results), *grads, **captures
    )
    usual = q, k, v, *learned.values()
    doubles = [x.detach().double().requires_grad_() for x in operands]
    exact = [x.double() for x in grads]
    wide = {name: x.detach().double().requires_grad_() for name, x in captures.items()}
    best, _, wanted = _whole(golden, doubles, wide, exact)
    merged, found = _by_parts(attention, operands, captures, grads)
    assert merged[0].dtype is torch.float32
    assert [x.dtype for x in found] == [torch.float32] * len(found)
    for one, other, true in zip(
        (results[0], *usual), (merged[0], *found), (best[0], *wanted), strict=True
    ):
        allowed = 1.1 * (one - true).norm() + 1e-3 * (true.dim() < 2) * true.norm()
        assert (other - true).norm() <= allowed


@pytest.mark.few_when_interpreted(dtype=["fp32"])
def test_the_output_in_fp32(place, dtype):
    q, k, v = (x.detach() for x in operands_of(place.device, dtype))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    attention = attndsl.compile("causal()", backend=place.backend)
    out, lse = attention(q, k, v, return_lse=True)
    wide, same = attention(q, k, v, return_lse=True, **FP32)
    assert wide.dtype is torch.float32
    assert wide.stride() == out.stride()
    if place.backend == "hopper" and dtype is not torch.float32:
        # Kernels of another family, which add in another order, store outputs in fp32.
        torch.testing.assert_close(lse, same, atol=1e-5, rtol=1e-5)
    else:
        assert torch.equal(lse, same)
    assert torch.equal(attention(q, k, v, out_dtype=dtype), out)
    golden = attndsl.compile("causal()", backend="reference")(q.double(), k.double(), v.double())
    errors = [(x - golden).norm() / golden.norm() for x in (wide, out)]
    if dtype is torch.float32:
        assert torch.equal(wide, out)
        return
    assert errors[0] < errors[1]
    # Interpreted bf16 is truncated, and the reference rounds more than the output.
    if (place.backend, place.device) == ("cpu", "cpu"):
        assert errors[0] < 1e-6
        assert torch.equal(wide.to(dtype), out)


@pytest.mark.parametrize("shape", [(0, 2, 5), (1, 2, 0)])
def test_no_rows(kernels, shape):
    batch, heads, length = shape
    q = torch.zeros(batch, heads, length, 16, dtype=torch.bfloat16, device=kernels.device)
    attention = attndsl.compile("causal()", backend=kernels.backend)
    out, lse = attention(q, q, q, return_lse=True, **FP32)
    assert out.dtype is torch.float32
    found = attention.backward(q, q, q, out, lse, out, grad_dtype=torch.float32)
    assert {x.dtype for x in found[:3]} == {torch.float32}
    assert {x.shape for x in found[:3]} == {q.shape}


def test_gradients_of_an_output_in_fp32(place):
    attention = attndsl.compile(SUNK, backend=place.backend)
    operands = operands_of(place.device, torch.bfloat16)
    captures = captures_of(SUNK, place.device)
    _, grads, wanted = _whole(attention, operands, captures)
    rounded = [grads[0].float(), grads[1]]
    results, _, found = _whole(attention, operands, captures, rounded, **FP32)
    assert results[0].dtype is torch.float32
    doubles = [x.detach().double().requires_grad_() for x in operands]
    wide = {name: x.detach().double().requires_grad_() for name, x in captures.items()}
    golden = attndsl.compile(SUNK, backend="reference")
    _, _, exact = _whole(golden, doubles, wide, [x.double() for x in grads])
    for one, other, true in zip(wanted, found, exact, strict=True):
        assert one.dtype is other.dtype
        # delta is made of an output that is not rounded. A number is the sum of all pairs' terms.
        floor = 0.5 if true.dim() == 0 else 2e-3 * (true.dim() == 1) * true.norm()
        assert (other - true).norm() <= 1.1 * (one - true).norm() + floor


def test_derivatives_of_an_output_in_fp32(kernels):
    text = "mask = causal(); score = softcap(score, 3.0)"
    attention = attndsl.compile(text, backend=kernels.backend)
    operands = [x[:1, :1, :9] for x in operands_of(kernels.device, torch.bfloat16)]
    tensors = tuple(x.detach() for x in operands)
    moved = tuple(torch.randn_like(x) for x in tensors)
    (out, tangent), (usual, moved_usual) = (
        torch.func.jvp(lambda *x, more=more: attention(*x, **more), tensors, moved)
        for more in (FP32, {})
    )
    assert out.dtype is tangent.dtype is torch.float32
    torch.testing.assert_close(tangent, moved_usual.float(), atol=0.05, rtol=0.05)
    torch.testing.assert_close(out, usual.float(), atol=0.02, rtol=0.02)
    mapped = torch.func.vmap(lambda x: attention(x, *tensors[1:], **FP32))(tensors[0][None])
    assert mapped.dtype is torch.float32
    first = torch.autograd.grad(
        attention(*operands, **FP32).square().sum(), operands, create_graph=True
    )
    second = torch.autograd.grad(sum(x.float().square().sum() for x in first), operands)
    usual = torch.autograd.grad(
        attention(*operands).float().square().sum(), operands, create_graph=True
    )
    wanted = torch.autograd.grad(sum(x.float().square().sum() for x in usual), operands)
    for one, other in zip(second, wanted, strict=True):
        assert one.dtype is torch.bfloat16
        assert (one - other).float().norm() < 0.05 * other.float().norm()


def test_results_anywhere_in_memory(kernels):
    """Slices, expanded and negated tensors: results are read as forwards leave them."""
    attention = attndsl.compile("causal()", backend=kernels.backend)
    q, k, v = (x.detach() for x in operands_of(kernels.device))
    out, lse = attention(q, k, v, return_lse=True)
    grad = torch.ones((), device=q.device).expand(out.shape)
    wanted = attention.backward(q, k, v, out, lse, grad.contiguous())

    def moved(x):
        room = x.new_zeros((*x.shape[:-1], x.shape[-1] + 3))
        room[..., 1:-2] = x
        return room[..., 1:-2]

    other_way = out.mT.contiguous().mT
    negated = torch._neg_view(-grad)
    for one in ((moved(out), moved(lse), grad), (other_way, lse, moved(grad)), (out, lse, negated)):
        found = attention.backward(q, k, v, *one)
        assert all(torch.equal(x, y) for x, y in zip(found[:3], wanted[:3], strict=True))


def test_groups_of_heads_and_memory_order(kernels):
    attention = attndsl.compile("causal()", backend=kernels.backend)
    q = torch.randn(2, 12, 4, 16, device=kernels.device).transpose(1, 2).requires_grad_()
    k, v = (torch.randn(2, 2, 12, 16, device=kernels.device).requires_grad_() for _ in range(2))
    (out, lse), grads, wanted = _whole(attention, (q, k, v), {})
    found = attention.backward(
        q, k, v, out.detach().contiguous(), lse.detach(), *grads, wants=("q", "k")
    )
    assert found.v is None
    assert found.q.stride() == q.stride()
    for one, other in zip(wanted[:2], found[:2], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.none_when_interpreted
def test_contractions(kernels):
    text = "tensor u[batch, heads, q_len, 4]: float; tensor w[batch, n, 4]: float; mask = causal()"
    text += "; score = score + dot(u[b, h, q, :], w[b, kv, :])"
    attention = attndsl.compile(text, backend=kernels.backend)
    dtype = torch.bfloat16 if kernels.backend != "cpu" else torch.float32
    operands = operands_of(kernels.device, dtype)
    captures = {
        "u": torch.randn(2, 2, LENGTH, 4, device=kernels.device).requires_grad_(),
        "w": torch.randn(2, LENGTH, 4, device=kernels.device).requires_grad_(),
    }
    results, grads, wanted = _whole(attention, operands, captures, **FP32)
    merged, found = _by_parts(attention, operands, captures, grads)
    for one, other in zip((*results, *wanted), (*merged, *found), strict=True):
        loose = 1e-4 if dtype is torch.float32 else 0.1
        torch.testing.assert_close(one.float(), other, atol=loose, rtol=loose)


def test_weights_of_a_programs_own_add_up(kernels):
    text = "tensor t[heads]: float; mask = causal(); weights = sigmoid(score + t[h])"
    attention = attndsl.compile(text, backend=kernels.backend)
    operands, captures = operands_of(kernels.device), captures_of(text, kernels.device)
    out = attention(*operands, **captures)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(out, [*operands, captures["t"]], grad)
    q, k, v = (x.detach() for x in operands)
    nothing = torch.full_like(q, torch.nan)  # Is not read.
    parts = [
        attention.backward(
            q, k[:, :, first:last], v[:, :, first:last], nothing, None, grad, kv_offset=first,
            **captures,
        )
        for first, last in pairwise(CUTS)
    ]  # fmt: skip
    keys, values = _keys(parts)
    found = [sum(each.q for each in parts), torch.cat(keys, 2), torch.cat(values, 2)]
    found.append(sum(each.captures["t"] for each in parts))
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)
    with pytest.raises(ArgumentError, match="lse is given, and the program has weights"):
        attention.backward(q, k, v, nothing, grad[..., 0], grad, **captures)


def test_dropout_wants_the_seed_of_the_call(kernels):
    text = "param p: float; mask = causal(); weights = dropout(softmax(score), p)"
    attention = attndsl.compile(text, backend=kernels.backend)
    operands = operands_of(kernels.device)
    results, grads, wanted = _whole(attention, operands, {}, p=0.3, seed=11)
    found = attention.backward(*operands, *(x.detach() for x in results), *grads, p=0.3, seed=11)
    for one, other in zip(wanted, found[:3], strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ArgumentError, match="the program has dropout, and there is no seed"):
        attention.backward(*operands, *results, *grads, p=0.3)
    with pytest.raises(ArgumentError, match="the dropout probability is 3"):
        attention.backward(*operands, *results, *grads, p=3.0, seed=11)


@pytest.mark.none_when_interpreted
def test_dropout_of_parts(kernels):
    """Autograd through the merge finds what the backwards of parts add up to."""
    text = "param a: float; mask = causal(); weights = dropout(softmax(score), a / 2)"
    attention = attndsl.compile(text, backend=kernels.backend)
    operands, captures = operands_of(kernels.device), captures_of(text, kernels.device)
    out, lse = attndsl.merge(parts_of(attention, operands, captures, seed=5))
    grads = torch.randn_like(out), torch.randn_like(lse)
    wanted = torch.autograd.grad((out, lse), [*operands, captures["a"]], grads)
    _, found = _by_parts(attention, operands, captures, grads, seed=5)
    for one, other in zip(wanted, found, strict=True):
        torch.testing.assert_close(one, other, atol=3e-5, rtol=3e-5)


def test_which_gradients_are_made(kernels):
    attention = attndsl.compile(SUNK, backend=kernels.backend)
    operands, captures = operands_of(kernels.device), captures_of(SUNK, kernels.device)
    results = [x.detach() for x in attention(*operands, return_lse=True, **captures)]
    grad = torch.randn_like(results[0])
    usual = attention.backward(*operands, *results, grad, **captures)
    assert list(usual.captures) == ["t", "a"]
    some = attention.backward(
        *operands, *results, grad, wants=["v"], wants_captures=["a"], captures=captures
    )
    assert some.q is some.k is None
    torch.testing.assert_close(some.v, usual.v)
    assert list(some.captures) == ["a"]
    torch.testing.assert_close(some.captures["a"], usual.captures["a"])
    plain = {name: x.detach() for name, x in captures.items()}
    nothing = attention.backward(*operands, *results, grad, wants=(), **plain)
    assert nothing == (None, None, None, {})
    q, k, v, _ = attention.backward(*operands, *results, grad, **plain)
    assert [x.shape for x in (q, k, v)] == [x.shape for x in operands]


def test_it_makes_no_forward():
    attention = attndsl.compile("causal()")
    q, k, v = (x.detach() for x in operands_of("cpu"))
    out, lse = attention(q, k, v, return_lse=True)
    with FlopCounterMode(display=False) as counter:
        attention.backward(q, k, v, out, lse, out)
    (counts,) = [x for name, x in counter.get_flop_counts().items() if name == "Global"]
    assert list(counts) == [torch.ops.attndsl.backward]
    assert sum(counts.values()) == 2 * 2 * 2 * LENGTH * LENGTH * 5 * WIDTH


def test_tiles_and_autocast():
    text = "tensor doc[batch, n]: int; mask = q >= kv and doc[b, q] == doc[b, kv]"
    attention = attndsl.compile(text)
    q, k, v = (x.detach() for x in operands_of("cpu"))
    doc = torch.arange(LENGTH).expand(2, -1) // 10
    out, lse = attention(q, k, v, return_lse=True, doc=doc)
    tiles = attention.tiles(LENGTH, LENGTH, 8, 8, batch=2, heads=2, doc=doc)
    wanted = attention.backward(q, k, v, out, lse, out, doc=doc)
    found = attention.backward(q, k, v, out, lse, out, doc=doc, tiles=tiles)
    for one, other in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attention(q, k, v, return_lse=True, doc=doc, **FP32)
        found = attention.backward(q, k, v, out, lse, out, doc=doc)
    assert out.dtype is torch.float32
    assert found.q.dtype is torch.bfloat16
    torch.testing.assert_close(found.q.float(), wanted.q, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("wide", [False, True])
def test_in_graphs(wide):
    attention = attndsl.compile(SUNK)
    dtype = torch.bfloat16 if wide else torch.float32
    operands, captures = operands_of("cpu", dtype), captures_of(SUNK, "cpu")
    more = FP32 if wide else {}
    kind = torch.float32 if wide else None

    def both(q, k, v, captures, offset):
        out, lse = attention(q, k, v, return_lse=True, kv_offset=offset, **more, captures=captures)
        return out, attention.backward(
            q, k, v, out, lse, out, kv_offset=offset, captures=captures, grad_dtype=kind
        )

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    inputs = [x.detach() for x in operands]
    fixed = {name: x.detach() for name, x in captures.items()}
    for offset in (0, 3, 5):
        out, found = compiled(*inputs, fixed, offset)
        wanted_out, wanted = both(*inputs, fixed, offset)
        torch.testing.assert_close(out, wanted_out)
        torch.testing.assert_close(tuple(found[:3]), tuple(wanted[:3]))
        assert [x.dtype for x in found[:3]] == [x.dtype for x in wanted[:3]]
    q, k, v = operands
    trained = torch.compile(
        lambda: attention(q, k, v, captures=captures, **more), fullgraph=True, backend="aot_eager"
    )
    leaves = [*operands, *captures.values()]
    for one, other in zip(
        *(
            torch.autograd.grad(x.float().square().sum(), leaves)
            for x in (trained(), attention(q, k, v, captures=captures, **more))
        ),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_tensors_without_data():
    attention = attndsl.compile("causal()")
    with FakeTensorMode():
        q = torch.empty(2, 4, 8, 16, dtype=torch.bfloat16).transpose(1, 2)
        out, lse = attention(q, q, q, return_lse=True, **FP32)
        found = attention.backward(q, q, q, out, lse, out, grad_dtype=torch.float32)
    assert out.dtype is torch.float32
    for each in found[:3]:
        assert (each.dtype, each.shape, each.stride()) == (torch.float32, q.shape, q.stride())


Q = torch.zeros(1, 2, 4, 8, dtype=torch.bfloat16)
OUT, LSE = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4)


@pytest.mark.parametrize(
    ("results", "options", "kind", "message"),
    [
        ((OUT[:, :, :2], LSE, OUT), {}, ShapeError, "out has shape"),
        ((OUT, LSE[:, :1], OUT), {}, ShapeError, "lse has shape"),
        ((OUT, None, OUT), {}, ArgumentError, "lse is a NoneType"),
        ((OUT, LSE, None), {}, ArgumentError, "grad_out is a NoneType"),
        ((OUT, LSE.bfloat16(), OUT), {}, DTypeError, "lse is of dtype torch.bfloat16"),
        ((OUT.double(), LSE, OUT), {}, DTypeError, "out is of dtype torch.float64"),
        ((OUT.half(), LSE, OUT), {}, DTypeError, "out is of dtype torch.float16"),
        ((OUT, LSE, OUT, LSE[..., None]), {}, ShapeError, "grad_lse has shape"),
        ((OUT, LSE, OUT), {"wants": ["x"]}, ArgumentError, "no operand 'x'"),
        ((OUT, LSE, OUT), {"wants": 3}, ArgumentError, "wants is a int"),
        ((OUT, LSE, OUT), {"wants_captures": LSE}, ArgumentError, "wants_captures is a Tensor"),
        ((OUT, LSE, OUT), {"wants_captures": ["w"]}, ArgumentError, "'w' has no gradient"),
        ((OUT, LSE, OUT), {"wants_captures": ["x"]}, ArgumentError, "'x' has no gradient"),
        ((OUT, LSE, OUT), {"grad_dtype": torch.float16}, DTypeError, "grad_dtype is torch.float16"),
        ((OUT, LSE, OUT), {"out_dtype": torch.float64}, DTypeError, "out_dtype is torch.float64"),
        ((OUT, LSE, OUT), {"return_lse": True}, ArgumentError, "no tensor or run-time param"),
        ((OUT, LSE, OUT), {"q_offset": 1 << 30}, ArgumentError, "positions are below"),
    ],
)
def test_refusals(results, options, kind, message):
    attention = attndsl.compile("param w: int = 3; q - kv < w")
    with pytest.raises(kind, match=message) as caught:
        attention.backward(Q, Q, Q, *results, **options)
    assert caught.value.hint


def test_refusals_of_output_dtypes():
    attention = attndsl.compile("causal()")
    for x, dtype in ((Q, torch.float16), (Q.float(), torch.bfloat16), (Q.double(), torch.float32)):
        with pytest.raises(DTypeError, match=f"out_dtype is {dtype} and q is {x.dtype}"):
            attention(x, x, x, out_dtype=dtype)
    with pytest.raises(UnsupportedError, match="transforms of torch"):
        torch.func.grad(lambda q: attention.backward(q, Q, Q, OUT, LSE, OUT).q.sum())(Q)
