"""Flexible attention 4: tensors that are no plain (B, H, S, D) block of memory."""

from __future__ import annotations

import pytest
import torch

import attndsl

ALIBI = "mask = q >= kv; score = score + (kv - q) * exp2(-(h + 1) * 8 / heads)"


def _permuted(x):
    """(B, S, H, D) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _padded(x):
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 8), torch.nan)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _offset(x):
    flat = x.new_full((x.numel() + 3,), torch.nan)
    flat[3:] = x.flatten()
    return flat[3:].view(x.shape)


def _batch_expanded(x):
    return x[:1].expand_as(x)


def _head_expanded(x):
    return x[:, :1].expand_as(x)


def _transposed(x):
    """Last stride not 1."""
    return x.mT.contiguous().mT


def _rows_reversed_blocks(x):
    """A slice with steps."""
    return x.repeat_interleave(2, dim=2)[:, :, ::2]


LAYOUTS = {
    f.__name__.strip("_"): f
    for f in (
        _permuted,
        _padded,
        _offset,
        _batch_expanded,
        _head_expanded,
        _transposed,
        _rows_reversed_blocks,
    )
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_all_three(check, place, name):
    dtype = torch.float32 if place.device == "cpu" else torch.float16
    inputs = check.inputs(place, dtype)
    lay = LAYOUTS[name]
    inputs.q, inputs.k, inputs.v = lay(inputs.q), lay(inputs.k), lay(inputs.v)
    check(place, ALIBI, inputs)


@pytest.mark.few_when_interpreted(which=["q"], name=["padded"])
@pytest.mark.few_when_interpreted(which=["grad_out"], name=["transposed"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "v", "grad_out"])
def test_layouts_of_one(check, place, name, which):
    inputs = check.inputs(place, torch.float32)
    setattr(inputs, which, LAYOUTS[name](getattr(inputs, which)))
    check(place, ALIBI, inputs)


def test_k_and_v_share_memory(check, place):
    """Overlapping rows: v starts one row after k in the same buffer."""
    batch, heads, length, dim = place.shape
    inputs = check.inputs(place, torch.float32)
    buffer = torch.randn(batch, heads, length + 1, dim, device=place.device)
    inputs.k, inputs.v = buffer[:, :, :-1], buffer[:, :, 1:]
    check(place, ALIBI, inputs)


def test_packed_projections(check, place):
    """(B, S, 3 H D), split and viewed."""
    batch, heads, length, dim = place.shape
    inputs = check.inputs(place, torch.float32)
    packed = torch.randn(batch, length, 3 * heads * dim, device=place.device)
    inputs.q, inputs.k, inputs.v = (
        part.view(batch, length, heads, dim).transpose(1, 2) for part in packed.chunk(3, -1)
    )
    check(place, ALIBI, inputs)


@pytest.mark.parametrize("name", ["padded", "offset", "transposed", "expanded"])
def test_layouts_of_a_capture(check, place, name):
    length = place.shape[2]
    bias = torch.randn(length, length, device=place.device)
    bias = bias[:1].expand(length, length) if name == "expanded" else LAYOUTS[name](bias)
    inputs = check.inputs(place, torch.float32, captures={"bias": bias.requires_grad_()})
    text = "tensor bias[q_len, kv_len]: float; score = score + bias[q, kv]"
    check(place, text, inputs)


def test_what_users_see_is_never_padded(place):
    """Rows of workspaces may be; of results none, whose next operation would read the gaps."""
    attention = attndsl.compile(
        "tensor bias[q_len, kv_len]: float; score = score + bias[q, kv]", backend=place.backend
    )
    q, k, v = (torch.randn(1, 3, 17, 67, device=place.device, requires_grad=True) for _ in range(3))
    bias = torch.randn(17, 17, device=place.device, requires_grad=True)
    out, lse = attention(q, k, v, bias=bias, return_lse=True)
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, bias))
    for x in (out, lse, *grads):
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size()


@pytest.mark.parametrize("backend", ["triton", "short", "auto"])
@pytest.mark.parametrize("name", ["contiguous", "transposed", "offset"])
def test_hooks_of_saved_tensors_lay_them_out_anew(device, backend, name):
    """``torch.autograd.graph.save_on_cpu`` is such a hook: what comes back is contiguous."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    attention = attndsl.compile(
        "tensor bias[heads, q_len, kv_len]: float; mask = q >= kv; score = score + bias[h, q, kv]",
        backend=backend,
    )
    given = [torch.randn(2, 40, 3, 16, device=device, dtype=dtype) for _ in range(4)]
    bias = torch.randn(40, 3, 40, device=device)
    unpack = {
        "contiguous": torch.Tensor.contiguous, "transposed": _transposed, "offset": _offset
    }[name]  # fmt: skip

    def gradients(hooked):
        leaves = [x.clone().requires_grad_() for x in (*given[:3], bias)]
        q, k, v = (x.transpose(1, 2) for x in leaves[:3])
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda x: x, lambda x: unpack(x) if hooked else x
        )
        for _ in range(2):  # The second call is one of a known signature.
            with hooks:
                out, lse = attention(q, k, v, bias=leaves[3].transpose(0, 1), return_lse=True)
        return torch.autograd.grad((out * given[3].transpose(1, 2)).sum() + lse.sum(), leaves)

    torch.testing.assert_close(gradients(True), gradients(False))
