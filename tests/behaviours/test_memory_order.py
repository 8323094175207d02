"""Outputs lie in memory as q, and gradients as q, k and v: layers need no copies around a call."""

from __future__ import annotations

import pytest
import torch

import attndsl

ALIBI = "mask = q >= kv; score = score - 0.25 * (h + 1) * (q - kv)"
DOT = (
    "tensor a[heads, q_len, r]: float; tensor c[heads, kv_len, r]: float\n"
    "mask = causal(); score = score + dot(a[h, q, :], c[h, kv, :])"
)


def _rows_of_heads(batch, heads, length, dim, **options):
    """(batch, length, heads, dim) in memory, as projections make it."""
    return torch.randn(batch, length, heads, dim, **options).transpose(1, 2)


def _length_first(batch, heads, length, dim, **options):
    return torch.randn(length, batch, heads, dim, **options).permute(1, 2, 0, 3)


def _sliced(batch, heads, length, dim, **options):
    """A part of a packed projection."""
    packed = torch.randn(batch, length, heads * (dim + 8), **options)
    return packed.view(batch, length, heads, dim + 8)[..., :dim].transpose(1, 2)


def _contiguous(*shape, **options):
    return torch.randn(shape, **options)


def _steps(x):
    """Strides of the dims that have any."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def _results(attention, leaves, grad_out, **captures):
    """Output and gradients, by name."""
    out = attention(*leaves.values(), **captures)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_results_lie_as_their_inputs(place, kv_heads):
    kind = {"device": place.device}
    if place.device == "cuda":
        kind["dtype"] = torch.bfloat16
    leaves = {
        "q": _rows_of_heads(2, 4, 19, 16, **kind),
        "k": _length_first(2, kv_heads, 21, 16, **kind),
        "v": _sliced(2, kv_heads, 21, 24, **kind),
    }
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    grad_out = _rows_of_heads(2, 4, 19, 24, **kind)
    attention = attndsl.compile(ALIBI, backend=place.backend)
    found = _results(attention, leaves, grad_out)
    rows = found["out"].transpose(1, 2).view(2, 19, 4 * 24)
    assert rows.data_ptr() == found["out"].data_ptr()
    for name, x in leaves.items():
        assert _steps(found[name]) == _steps(torch.empty_like(x)), name
    plain = {name: x.detach().contiguous().requires_grad_() for name, x in leaves.items()}
    wanted = _results(attention, plain, grad_out.contiguous())
    for name, x in wanted.items():
        assert x.is_contiguous(), name
        torch.testing.assert_close(found[name], x)


def test_contractions_keep_the_order(kernels):
    """Kernels get longer rows than q and k have."""
    kind = {"device": kernels.device}
    leaves = {
        "q": _rows_of_heads(1, 4, 19, 16, **kind),
        "k": _rows_of_heads(1, 2, 21, 16, **kind),
        "v": _length_first(1, 2, 21, 16, **kind),
    }
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    captures = {"a": torch.randn(4, 19, 3, **kind), "c": torch.randn(4, 21, 3, **kind)}
    attention = attndsl.compile(DOT, backend=kernels.backend)
    found = _results(attention, leaves, torch.randn(1, 4, 19, 16, **kind), **captures)
    for name, x in {**leaves, "out": leaves["q"]}.items():
        assert _steps(found[name]) == _steps(torch.empty_like(x)), name
        dense = found[name].untyped_storage().nbytes()
        assert dense == found[name].numel() * found[name].element_size(), name


def test_tangents_lie_as_the_output(kernels):
    kind = {"device": kernels.device}
    q, k, v = (_rows_of_heads(2, 3, 19, 16, **kind) for _ in range(3))
    attention = attndsl.compile(ALIBI, backend=kernels.backend)
    out, moved = torch.func.jvp(attention, (q, k, v), (k, v, q))
    plain = [x.contiguous() for x in (q, k, v, k, v, q)]
    wanted_out, wanted = torch.func.jvp(attention, tuple(plain[:3]), tuple(plain[3:]))
    for found, expected in ((out, wanted_out), (moved, wanted)):
        assert found.stride() == q.stride()
        torch.testing.assert_close(found, expected)


def test_outputs_keep_the_order_within_transforms():
    q, k, v = (_rows_of_heads(2, 3, 7, 4, dtype=torch.float64) for _ in range(3))
    attention = attndsl.compile(ALIBI)

    def loss(q):
        rows = attention(q, k, v).transpose(1, 2).view(2, 7, 12)
        return rows.square().sum()

    many = torch.randn(2, 2, 7, 3, 4, dtype=torch.float64).transpose(2, 3)
    each = torch.vmap(torch.func.grad(loss))(many)
    torch.testing.assert_close(each[1], torch.func.grad(loss)(many[1]))
    leaf = q.detach().requires_grad_()
    (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    assert first.stride() == second.stride() == q.stride()


def test_rows_of_length_zero_and_one():
    attention = attndsl.compile("causal()")
    for length in (0, 1):
        q = _rows_of_heads(2, 3, length, 4).requires_grad_()
        out = attention(q, q, q)
        out.transpose(1, 2).view(2, length, 12).sum().backward()
        assert q.grad.shape == q.shape


def test_outputs_are_written_to_in_training(place):
    """As with torch's own: right gradients, or torch's error about versions."""
    attention = attndsl.compile("causal()", backend=place.backend)
    inputs = [_rows_of_heads(1, 2, 9, 16, device=place.device).requires_grad_() for _ in range(3)]
    out, lse = attention(*inputs, return_lse=True)
    (2 * out).sum().backward()
    wanted = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    written, lse = attention(*inputs, return_lse=True)
    written.mul_(2)
    lse.add_(1)
    torch.testing.assert_close(written, 2 * out)
    if place.backend == "reference":
        written.sum().backward()
        for x, grad in zip(inputs, wanted, strict=True):
            torch.testing.assert_close(x.grad, grad)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        written.sum().backward()


def test_outputs_without_gradients_are_written_to_later(place):
    q = torch.randn(1, 2, 9, 16, device=place.device)
    with torch.no_grad():
        out = attndsl.compile("causal()", backend=place.backend)(q, q, q)
    factor = torch.ones((), device=place.device, requires_grad=True)
    out.mul_(factor)
    assert out.requires_grad
