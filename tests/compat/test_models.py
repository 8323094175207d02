"""Whole layers with attention swapped: the same outputs and gradients, eager and in one graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import attndsl
from attndsl.flex import create_block_mask, flex_attention

WIDTH, HEADS, KV_HEADS, DIM = 32, 4, 2, 8
CAUSAL = attndsl.compile("causal()")


def _dense(q, k, v, q_offset):
    """Scores, mask and softmax by torch."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    row = torch.arange(q.shape[2])[:, None] + q_offset
    live = row >= torch.arange(k.shape[2])
    score = (q @ k.mT * DIM**-0.5).masked_fill(~live, -torch.inf)
    return torch.softmax(score, -1) @ v


def _program(q, k, v, q_offset):
    return CAUSAL(q, k, v, q_offset=q_offset)


def _sdpa(q, k, v, q_offset):
    live = torch.arange(q.shape[2])[:, None] + q_offset >= torch.arange(k.shape[2])
    return attndsl.scaled_dot_product_attention(q, k, v, live, enable_gqa=True)


def _flex(q, k, v, q_offset):
    def live(score, b, h, q_idx, kv_idx):
        return torch.where(q_idx + q_offset >= kv_idx, score, -torch.inf)

    return flex_attention(q, k, v, live, enable_gqa=True)


FACES = {"program": _program, "sdpa": _sdpa, "flex": _flex}


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _rotated(x, first):
    """x (B, H, L, D) turned by the angles of positions from ``first``."""
    speed = 1e4 ** (-torch.arange(0, DIM, 2, dtype=x.dtype) / DIM)
    angle = (torch.arange(x.shape[2], dtype=x.dtype)[:, None] + first) * speed
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    half = torch.cat((-x[..., DIM // 2 :], x[..., : DIM // 2]), -1)
    return x * cos + half * sin


class DecoderLayer(nn.Module):
    """Norm, rotary embedding, grouped heads, a cache of keys, and SwiGLU."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList((RMSNorm(), RMSNorm()))
        self.q = nn.Linear(WIDTH, HEADS * DIM, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * KV_HEADS * DIM, bias=False)
        self.o = nn.Linear(HEADS * DIM, WIDTH, bias=False)
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x, cache=None):
        first = 0 if cache is None else cache[0].shape[2]
        y = self.norms[0](x)
        q = self.q(y).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, KV_HEADS, DIM)).permute(2, 0, 3, 1, 4)
        q, k = _rotated(q, first), _rotated(k, first)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        x = x + self.o(self.attention(q, k, v, first).transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y)), (k, v)


def _layers(face, dtype):
    layer = DecoderLayer(FACES[face]).to(dtype)
    plain = copy.deepcopy(layer)
    plain.attention = _dense
    return layer, plain


def _run(layer, x):
    """Output and gradients by name, those of the parameters too."""
    leaf = x.detach().clone().requires_grad_()
    out = layer(leaf)
    out = out[0] if isinstance(out, tuple) else out
    names = ["x", *(name for name, _ in layer.named_parameters())]
    grads = torch.autograd.grad(out.sin().sum(), [leaf, *layer.parameters()])
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


@pytest.mark.parametrize(
    ("face", "compiled"),
    [
        *((face, False) for face in FACES),
        ("program", True),
        pytest.param("sdpa", True, marks=pytest.mark.slow),
        pytest.param("flex", True, marks=pytest.mark.slow),
    ],
)
def test_a_decoder_layer(check, graphs, face, compiled):
    layer, plain = _layers(face, torch.float32)
    x = torch.randn(2, 11, WIDTH)
    golden = _run(copy.deepcopy(plain).double(), x.double())
    found = _run(graphs(layer) if compiled else layer, x)
    found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
    check.close(golden, _run(plain, x), found, torch.float32)
    assert graphs.counter.frame_count == compiled


@pytest.mark.parametrize("face", FACES)
def test_steps_with_a_cache_are_the_whole_at_once(face):
    layer, plain = _layers(face, torch.float64)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    whole, _ = plain(x)
    parts, cache = [], None
    for part in x.split((4, 1, 3, 1), 1):
        out, cache = layer(part, cache)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("face", ["program", pytest.param("sdpa", marks=pytest.mark.slow)])
def test_steps_with_a_cache_share_a_graph(graphs, face):
    layer, _ = _layers(face, torch.float32)
    step = graphs(layer, dynamic=True)
    x = torch.randn(3, 13, WIDTH)
    with torch.no_grad():
        whole, (k, v) = layer(x)
        first = None
        for length in (5, 6, 7, 11, 12):
            cache = k[:, :, :length].contiguous(), v[:, :, :length].contiguous()
            out, _ = step(x[:, length : length + 1], cache)
            torch.testing.assert_close(out, whole[:, length : length + 1], atol=1e-5, rtol=1e-5)
            first = first or graphs.counter.frame_count
    assert graphs.counter.frame_count == first


def _encoders(norm_first, activation="relu"):
    """torch's encoder, and a copy whose attention is attndsl's."""
    options = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, activation=activation, **options)
    plain = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    mine = copy.deepcopy(plain)
    for each in mine.layers:
        state = each.self_attn.state_dict()
        each.self_attn = attndsl.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        each.self_attn.load_state_dict(state)
    return plain, mine


LENGTH = 10
PADDED = torch.arange(LENGTH) >= torch.tensor([10, 7, 4])[:, None]
MASKS = {
    "nothing": {},
    "padding": {"src_key_padding_mask": PADDED},
    "causal": {
        "mask": nn.Transformer.generate_square_subsequent_mask(LENGTH), "is_causal": True,
    },
    "both": {
        "mask": nn.Transformer.generate_square_subsequent_mask(LENGTH) < 0, "is_causal": True,
        "src_key_padding_mask": PADDED,
    },
}  # fmt: skip


class Real(nn.Module):
    """What ``model`` gives, without that of padded rows, which is nobody's."""

    def __init__(self, model, options):
        super().__init__()
        self.model = model
        self.options = options

    def forward(self, x):
        given = {
            key: mask.to(x.dtype) if key == "mask" and mask.is_floating_point() else mask
            for key, mask in self.options.items()
        }
        return torch.where(PADDED[..., None], 0.0, self.model(x, **given))


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("name", MASKS)
def test_torchs_encoder(check, name, training):
    """In evaluation and without gradients, torch's own layers take their fused path."""
    plain, mine = (
        Real(model, MASKS[name]).train(training) for model in _encoders(norm_first=name == "both")
    )
    x = torch.randn(3, LENGTH, WIDTH)
    golden = _run(copy.deepcopy(plain).double(), x.double())
    check.close(golden, _run(plain, x), _run(mine, x), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(mine(x), plain(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "training"),
    [
        ("both", True),
        pytest.param("both", False, marks=pytest.mark.slow),
        pytest.param("causal", True, marks=pytest.mark.slow),
        pytest.param("padding", False, marks=pytest.mark.slow),
    ],
)
def test_torchs_encoder_in_one_graph(graphs, name, training):
    plain, mine = (Real(model, MASKS[name]).train(training) for model in _encoders(norm_first=True))
    x = torch.randn(3, LENGTH, WIDTH)
    found, wanted = _run(graphs(mine), x), _run(plain, x)
    for one, other in zip(found.values(), wanted.values(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert graphs.counter.frame_count == 1


@pytest.mark.slow
def test_block_masks_in_a_layer(graphs):
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 11, 11, "cpu", BLOCK_SIZE=4)

    def attention(q, k, v, q_offset):
        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=True)

    layer, plain = _layers("program", torch.float32)
    layer.attention = attention
    x = torch.randn(2, 11, WIDTH)
    for model in (layer, graphs(layer)):
        found = _run(model, x)
        for name, value in _run(plain, x).items():
            other = found[name if name in found else f"_orig_mod.{name}"]
            torch.testing.assert_close(other, value, atol=1e-4, rtol=1e-4)
    assert graphs.counter.frame_count == 1
