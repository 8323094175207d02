"""Shapes, masks, alignments, numerics and settings of scaled dot product attention."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import attndsl
from attndsl import scaled_dot_product_attention
from attndsl.torch_api.mask_captures import capture_mask
from attndsl.torch_api.sdpa_programs import program_text

MASKS = {
    "kv": (11,),
    "q,kv": (7, 11),
    "q,1": (7, 1),
    "heads,q,kv": (3, 7, 11),
    "heads,1,1": (3, 1, 1),
    "batch,1,1,kv": (2, 1, 1, 11),
    "batch,1,q,kv": (2, 1, 7, 11),
    "batch,heads,q,kv": (2, 3, 7, 11),
    "nothing": (1, 1, 1, 1),
    "scalar": (),
}


def _operands(q_len=7, kv_len=11, heads=3, dim=8, value_dim=None, batch=2, device="cpu"):
    return {
        "query": torch.randn(batch, heads, q_len, dim, device=device),
        "key": torch.randn(batch, heads, kv_len, dim, device=device),
        "value": torch.randn(batch, heads, kv_len, value_dim or dim, device=device),
    }


def _four(mask):
    """torch's math takes masks of at least two dims."""
    return mask if mask.dim() > 1 else mask.expand(1, 11)


@pytest.mark.parametrize("kind", ["bool", "float", "learned", "infinite"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_any_shape(against_torch, name, kind):
    mask = torch.randn(MASKS[name], dtype=torch.float64)
    if kind == "bool":
        mask = mask > -1
    elif kind == "infinite":
        mask = mask.masked_fill(mask < -1, -torch.inf)
    mask = mask.requires_grad_(kind == "learned")
    against_torch(torch.float64, **_operands(), attn_mask=_four(mask))
    operands = _operands()
    found = scaled_dot_product_attention(**operands, attn_mask=mask.detach())
    full = mask.detach().expand(2, 3, 7, 11)
    torch.testing.assert_close(found, scaled_dot_product_attention(**operands, attn_mask=full))


def test_fp64(device):
    operands = {name: x.double() for name, x in _operands(device=device).items()}
    torch.testing.assert_close(
        scaled_dot_product_attention(**operands, is_causal=True),
        torch.nn.functional.scaled_dot_product_attention(**operands, is_causal=True),
        atol=1e-13, rtol=1e-13,
    )  # fmt: skip


@pytest.mark.parametrize("kv_len", [15, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_whose_rows_are_no_whole_lines(against_torch, kv_len, dtype, causal):
    mask = torch.randn(2, 3, 7, kv_len, requires_grad=True)
    against_torch(dtype, **_operands(kv_len=kv_len), attn_mask=mask, is_causal=causal)


@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced", "reversed dims"])
@pytest.mark.parametrize("learned", [False, True])
def test_masks_of_any_strides(layout, learned):
    base = torch.randn(13, 9, 11, requires_grad=learned)
    mask = {
        "expanded": lambda: base[0, 0].expand(2, 3, 7, 11),
        "transposed": lambda: base[:11, :7, 0].T,
        "sliced": lambda: base[2, 1:8],
        "reversed dims": lambda: base[:11, :7, :3].permute(2, 1, 0),
    }[layout]()
    operands = _operands()
    dense = mask.expand(2, 3, 7, 11).contiguous()
    outs = [scaled_dot_product_attention(**operands, attn_mask=m) for m in (mask, dense)]
    torch.testing.assert_close(*outs)
    if learned:
        grads = [torch.autograd.grad(out.square().sum(), base, retain_graph=True) for out in outs]
        torch.testing.assert_close(*grads)


def test_an_expanded_mask_gets_a_gradient_of_its_own_shape():
    mask = torch.randn(1, 1, 7, 11, requires_grad=True).expand(2, 3, 7, 11)
    copy = mask.detach().clone().requires_grad_()
    operands = _operands()
    grads = [
        torch.autograd.grad(scaled_dot_product_attention(**operands, attn_mask=m).sum(1).std(), m)
        for m in (mask, copy)
    ]
    torch.testing.assert_close(*grads)
    assert (grads[0][0] != 0).all()


@pytest.mark.parametrize("kind", ["bool", "shared", "per head"])
def test_rows_that_see_nothing_are_zero(kind):
    mask = torch.ones(3, 7, 11, dtype=torch.bool) if kind == "per head" else torch.ones(7, 11) > 0
    mask[..., 2, :] = False
    if kind != "bool":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    operands = _operands()
    for x in operands.values():
        x.requires_grad_()
    out = scaled_dot_product_attention(**operands, attn_mask=mask)
    assert (out[:, :, 2] == 0).all()
    assert (out[:, :, 3] != 0).all()
    grads = torch.autograd.grad(out.sum(), list(operands.values()))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :, 2] == 0).all()
    expected = torch.nn.functional.scaled_dot_product_attention(**operands, attn_mask=mask)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    "shape", [(8, 8), (8,), (8, 1), (1, 1, 8, 8), (2, 1, 8), (1, 2, 8, 8), (1, 1, 1, 1), (2, 1, 1)]
)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf])
def test_only_minus_infinity_masks(shape, odd):
    q, k, v = (torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3))
    mask = torch.zeros(shape)
    mask.view(-1)[-1] = odd
    if mask.numel() > 1:
        mask.view(-1)[0] = -torch.inf
    wide = mask.expand(8, 8) if mask.dim() == 1 else mask
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, wide)
    found = scaled_dot_product_attention(q, k, v, mask)
    assert wanted.isnan().any()
    torch.testing.assert_close(found, wanted, equal_nan=True)
    mine, theirs = (torch.autograd.grad(out.sum(), q)[0] for out in (found, wanted))
    assert torch.equal(mine.isnan(), theirs.isnan())


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("dims", ["kv_len", "q_len, kv_len"])
def test_a_tile_of_minus_infinity_and_nan_is_live(backend, dims):
    form = ("bias", "sparse bias", tuple(dims.split(", ")))
    attn = attndsl.compile(program_text("all", (form,), False), backend=backend)
    q, k, v = (torch.randn(1, 1, 160, 16) for _ in range(3))
    mask = torch.zeros(160, 160) if "q" in dims else torch.zeros(160)
    mask[..., 128:] = -torch.inf
    mask[..., 150] = torch.nan
    assert attn(q, k, v, bias=mask).isnan().all()


def test_masks_let_tiles_be_skipped():
    """NaN in keys of tiles that a mask leaves out reaches nothing: they are not multiplied."""
    operands = _operands(q_len=256, kv_len=256)
    operands["key"][:, :, 128:] = torch.nan
    operands["value"][:, :, 128:] = torch.nan
    live = (torch.arange(256) < 128).expand(2, 1, 256, 256)
    bias = torch.zeros(2, 1, 1, 256).masked_fill(torch.arange(256) >= 128, -torch.inf)
    causal = scaled_dot_product_attention(**operands, is_causal=True)
    assert causal[:, :, :128].isfinite().all()
    for mask in (live, bias):
        assert scaled_dot_product_attention(**operands, attn_mask=mask).isfinite().all()


def test_a_mask_and_causality_go_together(against_torch):
    for mask in (torch.rand(2, 1, 1, 11) < 0.7, torch.randn(3, 7, 11)):
        against_torch(torch.float64, **_operands(), attn_mask=mask, is_causal=True)


@pytest.mark.parametrize(
    ("batch", "heads", "q_len", "kv_len", "dim"),
    [(16, 16, 128, 128, 16), (16, 16, 128, 256, 32), (16, 16, 256, 128, 32), (1, 1, 23, 56, 15)],
)
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_causal_biases(batch, heads, q_len, kv_len, dim, bias, whole):
    """With all batch entries and heads among the slow tests."""
    batch, heads = (batch, heads) if whole else (min(batch, 2), min(heads, 2))
    operands = _operands(q_len, kv_len, heads, dim, batch=batch)
    with warnings.catch_warnings():  # Of NaN in rows that see nothing, which are 0 here.
        warnings.simplefilter("ignore", UserWarning)
        mask = bias(q_len, kv_len)
    live = torch.ones(q_len, kv_len, dtype=torch.bool)
    live = live.tril(0 if bias is causal_upper_left else kv_len - q_len)
    leaves = [x.requires_grad_() for x in operands.values()]
    found = scaled_dot_product_attention(**operands, attn_mask=mask)
    expected = torch.nn.functional.scaled_dot_product_attention(**operands, attn_mask=live)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    grad = torch.randn_like(found)
    for mine, torchs in zip(
        torch.autograd.grad(found, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(mine, torchs, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_zero_lengths(q_len, kv_len, causal):
    operands = _operands(q_len, kv_len)
    leaves = [x.requires_grad_() for x in operands.values()]
    mask = torch.zeros(q_len, kv_len, requires_grad=True)
    out = scaled_dot_product_attention(**operands, attn_mask=mask, is_causal=causal)
    assert out.shape == (2, 3, q_len, 8)
    assert (out == 0).all()
    for leaf, grad in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert grad.shape == leaf.shape
        assert (grad == 0).all()


@pytest.mark.parametrize("lead", [(), (3,), (2, 2, 3), (0, 2, 3)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0)])
def test_zero_lengths_of_other_ranks(lead, q_len, kv_len):
    query, key = torch.randn(*lead, q_len, 8), torch.randn(*lead, kv_len, 8)
    mask = torch.zeros(q_len, kv_len)
    out = scaled_dot_product_attention(query, key, key, mask)
    assert out.shape == query.shape
    assert (out == 0).all()


def test_an_empty_batch():
    operands = {name: x[:0] for name, x in _operands().items()}
    assert scaled_dot_product_attention(**operands).shape == (0, 3, 7, 8)


@pytest.mark.parametrize(
    "shapes",
    [
        ((7, 8), (11, 8), (11, 4)),
        ((3, 7, 8), (3, 11, 8), (3, 11, 8)),
        ((2, 2, 3, 7, 8), (2, 2, 3, 11, 8), (2, 2, 3, 11, 8)),
        ((2, 3, 7, 8), (3, 11, 8), (1, 3, 11, 8)),
        ((2, 3, 7, 8), (2, 1, 11, 8), (2, 1, 11, 8)),
        ((2, 3, 7, 8), (1, 1, 11, 8), (2, 3, 11, 8)),
        ((1, 1, 7, 8), (2, 3, 11, 8), (2, 3, 11, 8)),
        ((2, 1, 3, 7, 8), (1, 4, 3, 11, 8), (3, 11, 8)),
        ((2, 3, 1, 8), (2, 3, 1, 8), (2, 3, 1, 8)),
    ],
)
def test_leading_dims(against_torch, shapes):
    names = ("query", "key", "value")
    operands = {name: torch.randn(shape) for name, shape in zip(names, shapes, strict=True)}
    against_torch(torch.float64, **operands)
    if operands["key"].shape[-2] == 11:
        against_torch(torch.float64, **operands, attn_mask=torch.randn(7, 11, requires_grad=True))


@pytest.mark.parametrize("lead", [(2, 1), (1, 4), (2, 4), (1, 1)])
def test_masks_of_five_dims(against_torch, lead):
    operands = {name: torch.randn(2, 4, 3, 7, 8) for name in ("query", "key", "value")}
    for mask in (torch.rand(*lead, 1, 7, 7) < 0.7, torch.randn(*lead, 3, 7, 7, requires_grad=True)):
        against_torch(torch.float64, **operands, attn_mask=mask)


@pytest.mark.parametrize("dims", [3, 4, 5])
def test_grouped_heads(against_torch, dims):
    operands = {"query": torch.randn(2, 2, 6, 7, 8)}
    operands |= {name: torch.randn(2, 2, 2, 11, 8) for name in ("key", "value")}
    operands = {name: x[(0,) * (5 - dims)] for name, x in operands.items()}
    mask = torch.randn(6, 7, 11, requires_grad=True)
    against_torch(torch.float64, **operands, attn_mask=mask, enable_gqa=True)


def test_value_dims_of_their_own(against_torch):
    against_torch(torch.float32, **_operands(dim=64, value_dim=96))
    against_torch(torch.float32, **_operands(dim=96, value_dim=64), is_causal=True)


def test_views_of_a_packed_projection(against_torch):
    packed = torch.randn(2, 11, 3 * 3 * 8).chunk(3, -1)
    views = [x.unflatten(-1, (3, 8)).transpose(1, 2) for x in packed]
    against_torch(torch.float64, **dict(zip(("query", "key", "value"), views, strict=True)))


def test_keys_shared_by_stride():
    query = torch.randn(3, 16, 1, 128)
    key, value = (
        torch.randn(3, 3584).as_strided((3, 16, 14, 128), (3584, 0, 256, 1)) for _ in "kv"
    )
    found = scaled_dot_product_attention(query, key, value)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(found, expected)


def test_last_strides_other_than_one(against_torch):
    turned = {name: x.mT.contiguous().mT for name, x in _operands().items()}
    assert turned["query"].stride(-1) != 1
    against_torch(torch.float64, **turned)


def test_large_inputs_give_no_nan():
    x = torch.full((1, 2, 16, 8), 133120.0, dtype=torch.bfloat16, requires_grad=True)
    for causal in (False, True):
        out = scaled_dot_product_attention(x, x, x, is_causal=causal)
        assert not out.isnan().any()
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert not grad.isnan().any()


def test_negative_scales(against_torch):
    against_torch(torch.float64, **_operands(), scale=-1 / 0.0001, is_causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype):
    operands = _operands(dim=16)
    # Halves of this step are lost in fp16 and bf16 beside 100: what is added stays fp32.
    mask = 100 + torch.randn(7, 11) / 64
    with torch.autocast("cpu", dtype):
        found = scaled_dot_product_attention(**operands, attn_mask=mask)
        wide = {name: x.double() for name, x in operands.items()}
        assert scaled_dot_product_attention(**wide).dtype is torch.float64
    assert found.dtype is dtype
    low = {name: x.to(dtype) for name, x in operands.items()}
    assert torch.equal(found, scaled_dot_product_attention(**low, attn_mask=mask))
    assert not torch.equal(found, scaled_dot_product_attention(**low, attn_mask=mask.to(dtype)))


def test_autocast_makes_operands_of_several_dtypes_one():
    query, key, value = _operands().values()
    with torch.autocast("cpu", torch.bfloat16):
        found = scaled_dot_product_attention(query, key.half(), value.bfloat16())
        expected = scaled_dot_product_attention(query, key.half().bfloat16(), value)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, expected)


def test_gradients_are_the_same_bits_each_time():
    operands = _operands(q_len=33, kv_len=70)
    leaves = [x.requires_grad_() for x in operands.values()]
    mask = torch.randn(33, 70, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [
            torch.autograd.grad(
                scaled_dot_product_attention(**operands, attn_mask=mask).sum(), [*leaves, mask]
            )
            for _ in range(100)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((7, 11), ("q_len", "kv_len")),
        ((1, 3, 1, 11), ("heads", "kv_len")),
        ((1, 1, 1, 1), ("kv_len",)),
    ],
)
def test_learned_masks_keep_their_dims_where_gradients_must_be_deterministic(shape, dims):
    mask = torch.empty(shape, device="meta", requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        found = capture_mask("m", mask, (1, 3, 7, 11), mask.device)
    finally:
        torch.use_deterministic_algorithms(False)
    assert found.form.dims == dims


def test_dropout_comes_from_torchs_seed():
    operands = _operands()
    torch.manual_seed(3)
    first, second = (scaled_dot_product_attention(**operands, dropout_p=0.4) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(scaled_dot_product_attention(**operands, dropout_p=0.4), first)
    assert not torch.equal(first, second)
    assert (scaled_dot_product_attention(**operands, dropout_p=1.0) == 0).all()


def test_gradients_by_finite_differences():
    query, key, value = (
        torch.randn(2, 2, 8, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)
    )
    mask = torch.randn(2, 8, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: scaled_dot_product_attention(*x, is_causal=True),
        (query, key, value, mask),
        fast_mode=True,
    )


def test_an_eager_call_does_not_import_what_compiles_graphs():
    code = """
import sys, torch, attndsl
x = torch.randn(1, 2, 4, 8)
attndsl.scaled_dot_product_attention(x, x, x, torch.ones(4, 4) > 0, dropout_p=0.5)
attndsl.nn.MultiheadAttention(8, 2)(x[0], x[0], x[0])
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_what_attndsl_exports():
    assert attndsl.scaled_dot_product_attention is scaled_dot_product_attention
    assert attndsl.nn.MultiheadAttention is not torch.nn.MultiheadAttention
    assert {"nn", "layout", "scaled_dot_product_attention"} <= set(dir(attndsl))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_masks_of_every_pair_of_many_heads(dtype):
    mask = torch.zeros(1, 1, 8192, 8192, device="cuda", dtype=dtype).expand(1, 32, -1, -1)
    mask = mask.contiguous().normal_()
    x = torch.randn(1, 32, 8192, 64, device="cuda", dtype=dtype)
    found = scaled_dot_product_attention(x, x, x, attn_mask=mask)[:, :2]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x[:, :2].float() for _ in range(3)), attn_mask=mask[:, :2].float()
    )
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
def test_learned_masks_on_a_gpu(against_torch):
    mask = torch.randn(3, 70, 130, device="cuda", requires_grad=True)
    operands = _operands(70, 130, device="cuda")
    against_torch(torch.float32, **operands, attn_mask=mask, is_causal=True)
