"""Parts of the keys put together are the whole: output, log-sum-exp and all gradients."""

from __future__ import annotations

import math

import pytest
import torch
from support.parts_of_keys import LENGTH, PROGRAMS, captures_of, operands_of, parts_of

import attndsl
from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError


@pytest.mark.few_when_interpreted(name=["window", "nothing", "sink of all"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_of_the_keys_are_the_whole(place, name):
    attention = attndsl.compile(PROGRAMS[name], backend=place.backend)
    operands, captures = operands_of(place.device), captures_of(PROGRAMS[name], place.device)
    leaves = [*operands, *captures.values()]
    whole = attention(*operands, return_lse=True, **captures)
    logits = attention.sink_logits(operands[0], operands[1], **captures)
    merged = attndsl.merge(parts_of(attention.without_sink(), operands, captures), sink=logits)
    grads = [torch.randn_like(x) for x in whole]
    grads[1] = torch.where(whole[1] == -torch.inf, 0.0, grads[1])
    found = [(*each, *torch.autograd.grad(each, leaves, grads)) for each in (whole, merged)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=3e-5, rtol=3e-5)
    assert (logits is not None) == ("sink" in name)
    if "t" in captures:
        assert (found[1][5] != 0).any()


def test_a_sink_of_sizes_is_that_of_the_call_asked():
    attention = attndsl.compile("mask = causal(); sink = log(kv_len) + b")
    operands = operands_of("cpu")
    logits = attention.sink_logits(*operands[:2])
    torch.testing.assert_close(logits, torch.tensor([[0.0], [1.0]]).expand(2, 2) + math.log(LENGTH))
    merged = attndsl.merge(parts_of(attention.without_sink(), operands, {}), sink=logits)
    torch.testing.assert_close(merged[0], attention(*operands), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(dtype):
    attention = attndsl.compile("causal()")
    operands = [x.detach() for x in operands_of("cpu", dtype)]
    parts = parts_of(attention, operands, {})
    out, lse = attndsl.merge(parts)
    assert out.dtype is dtype
    assert lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    whole, wanted = attention(*operands, return_lse=True)
    exact = dtype is torch.float64
    torch.testing.assert_close(lse, wanted, atol=1e-12 if exact else 1e-3, rtol=0)
    torch.testing.assert_close(out, whole, atol=1e-12 if exact else 0.02, rtol=0)
    wide, _ = attndsl.merge(parts, dtype=torch.float32)
    assert wide.dtype is torch.float32
    assert torch.equal(wide.to(dtype), out) or exact


def test_order_and_nesting():
    attention = attndsl.compile("causal()")
    parts = parts_of(attention, operands_of("cpu"), {})
    out, lse = attndsl.merge(parts)
    again = attndsl.merge(list(parts))
    assert torch.equal(out, again[0])
    assert torch.equal(lse, again[1])
    nested = attndsl.merge([attndsl.merge(parts[:2]), attndsl.merge(parts[2:])])
    torch.testing.assert_close(nested, (out, lse), atol=1e-5, rtol=1e-5)
    assert torch.equal(attndsl.merge(parts[:1])[0], parts[0][0])


def _random_parts(count=3, dead=True):
    outs = [torch.randn(1, 2, 3, 4, dtype=torch.float64) for _ in range(count)]
    sums = [torch.randn(1, 2, 3, dtype=torch.float64) * 3 for _ in range(count)]
    if dead:
        for lse in sums:
            lse[0, 0, 0] = -torch.inf
        sums[1][0, 1] = -torch.inf
    return outs, sums


def test_formula():
    outs, sums = _random_parts(dead=False)
    sink = torch.randn(2, dtype=torch.float64)
    out, lse = attndsl.merge(list(zip(outs, sums, strict=True)), sink=sink)
    every = torch.stack([*sums, sink[None, :, None].expand(1, 2, 3)])
    torch.testing.assert_close(lse, torch.logsumexp(every, 0))
    weights = torch.softmax(every, 0)[:3, ..., None]
    torch.testing.assert_close(out, (weights * torch.stack(outs)).sum(0))


def test_rows_without_a_live_pair():
    outs, sums = _random_parts()
    for out, lse in zip(outs, sums, strict=True):
        out[lse == -torch.inf] = torch.nan  # Other kernels' rows may hold anything.
    for sink in (None, 1.5, torch.tensor([2000.0, -torch.inf])):
        for each in outs + sums:
            each.requires_grad_()
        out, lse = attndsl.merge(list(zip(outs, sums, strict=True)), sink=sink)
        assert (out[0, 0, 0] == 0).all()
        assert lse[0, 0, 0] == -torch.inf
        assert out.isfinite().all()
        live = torch.where(lse == -torch.inf, 0.0, lse)
        for grad in torch.autograd.grad(out.sum() + live.sum(), outs + sums):
            assert grad.isfinite().all()
            assert (grad[0, 0, 0] == 0).all()
    alone, _ = attndsl.merge([(outs[0], sums[0]), (outs[2], sums[2])])
    torch.testing.assert_close(
        attndsl.merge(list(zip(outs, sums, strict=True)))[0][0, 1], alone[0, 1]
    )


def test_far_apart_sums():
    """Exponents of neither sign overflow, whatever part has the largest."""
    outs = [torch.full((1, 1, 2, 1), float(n)) for n in range(3)]
    sums = [torch.tensor([[[x, -x]]]) for x in (-4e4, 0.0, 4e4)]
    out, lse = attndsl.merge(list(zip(outs, sums, strict=True)))
    assert out.flatten().tolist() == [2.0, 0.0]
    assert lse.flatten().tolist() == [4e4, 4e4]
    _, lse = attndsl.merge(list(zip(outs, sums, strict=True)), sink=1e5)
    assert lse.flatten().tolist() == [1e5, 1e5]


def test_nan_stays():
    outs, sums = _random_parts()
    sums[0][0, 1, 2] = torch.nan
    out, lse = attndsl.merge(list(zip(outs, sums, strict=True)))
    assert lse[0, 1, 2].isnan()
    assert out[0, 1, 2].isnan().all()
    assert lse.isnan().sum() == 1


def test_derivatives_of_any_order():
    outs, sums = _random_parts()
    sink = torch.randn(1, 2, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (*outs, *sums, sink)]

    def whole(*inputs):
        *parts, sink = inputs
        out, lse = attndsl.merge(list(zip(parts[:3], parts[3:], strict=True)), sink=sink)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    live = [torch.where(x == -torch.inf, -40.0, x).detach().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(whole, live)
    assert torch.autograd.gradgradcheck(whole, live)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    _, (moved, moved_lse) = torch.func.jvp(whole, tuple(x.detach() for x in inputs), tangents)
    assert moved.isfinite().all()
    step = 1e-6
    ahead, behind = (
        whole(*(x.detach() + sign * step * t for x, t in zip(inputs, tangents, strict=True)))
        for sign in (1, -1)
    )
    torch.testing.assert_close((ahead[0] - behind[0]) / (2 * step), moved, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close((ahead[1] - behind[1]) / (2 * step), moved_lse, atol=1e-6, rtol=1e-6)


def test_in_graphs():
    text = "tensor t[heads]: float; mask = causal(); sink = t[h]"
    attention = attndsl.compile(text)
    operands, captures = operands_of("cpu"), captures_of(text, "cpu")

    part = attention.without_sink()

    def layer(operands, captures):
        return attndsl.merge(parts_of(part, operands, captures), sink=captures["t"])

    wanted = layer(operands, captures)
    found = torch.compile(layer, fullgraph=True, backend="aot_eager")(operands, captures)
    leaves = [*operands, *captures.values()]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(
        *(torch.autograd.grad(x[0].sum() + x[1].sum(), leaves) for x in (found, wanted)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    q = operands[0]
    for outside, message in (
        (lambda t: attention.sink_logits(q, q, t=t), "no sink_logits"),
        (lambda t: attention.without_sink()(q, q, q, t=t), "compile no programs"),
    ):
        with pytest.raises(Exception, match=message):
            torch.compile(outside, fullgraph=True, backend="eager")(captures["t"])


def test_without_sink():
    attention = attndsl.compile("tensor t[heads]: float; mask = causal(); sink = t[h]")
    other = attention.without_sink()
    assert other != attention
    assert other == attention.without_sink()
    assert other.without_sink() is other
    assert other.lowered.program.sink is None
    q, k, v = (x.detach() for x in operands_of("cpu"))
    found = other(q, k, v, return_lse=True, t=torch.ones(2))
    wanted = attndsl.compile("causal()")(q, k, v, return_lse=True)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))
    assert attndsl.compile("causal()").sink_logits(q, k) is None
    bound = attndsl.compile("mask = causal(); sink = t[h]", t=torch.tensor([1.0, 2.0]))
    assert bound.sink_logits(q, k).tolist() == [[1.0, 2.0]]


OUT, LSE = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        ([], ArgumentError, "parts is empty"),
        (OUT, ArgumentError, "parts is a Tensor"),
        ([OUT, OUT], ArgumentError, "part 0 has no lse"),
        ([(OUT, LSE), (OUT, None)], ArgumentError, "part 1 has no lse"),
        ([(OUT, LSE, LSE)], ArgumentError, "part 0 is no pair of tensors"),
        ([(OUT, LSE), (OUT[:, :, :2], LSE)], ShapeError, "out of part 1 is"),
        ([(OUT, LSE), (OUT, LSE[:, :1])], ShapeError, "lse of part 1 is"),
        ([(OUT, LSE[..., None])], ShapeError, "part 0 has an out"),
        ([(OUT, LSE), (OUT.bfloat16(), LSE)], DTypeError, "out of part 1 is torch.bfloat16"),
        ([(OUT, LSE.bfloat16())], DTypeError, "an lse of dtype torch.bfloat16"),
        ([(OUT.double(), LSE)], DTypeError, "an out of dtype torch.float64"),
        ([(OUT, LSE), (OUT.to("meta"), LSE)], DeviceError, "out of part 1 is on meta"),
    ],
)
def test_refusals_ofparts_of(parts, kind, message):
    with pytest.raises(kind, match=message) as caught:
        attndsl.merge(parts)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"sink": True}, ArgumentError, "sink is a bool"),
        ({"sink": torch.ones(2, dtype=torch.int64)}, ArgumentError, "sink is a torch.int64"),
        ({"sink": torch.ones(3)}, ShapeError, "sink has shape"),
        ({"sink": torch.ones(2, device="meta")}, DeviceError, "sink is on meta"),
        ({"dtype": torch.int32}, DTypeError, "dtype is torch.int32"),
        ({"dtype": "fp32"}, DTypeError, "dtype is 'fp32'"),
    ],
)
def test_refusals_of_options(options, kind, message):
    with pytest.raises(kind, match=message) as caught:
        attndsl.merge([(OUT, LSE)], **options)
    assert caught.value.hint


def test_other_weights_have_no_parts_to_merge():
    attention = attndsl.compile("mask = causal(); weights = sigmoid(score)")
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(UnsupportedError) as caught:
        attention(q, q, q, return_lse=True)
    assert "added up" in caught.value.hint
    assert math.isfinite(attention(q, q, q).sum())
