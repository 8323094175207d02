"""xFormers' function and biases beside plain torch formulas."""

import math

import pytest
import torch

from attndsl import compat, errors


def plain(q, k, v, mask, bias=0.0, scale=None):
    """Attention of (batch, length, heads, dim) in fp64; mask and bias broadcast to all pairs."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    score = torch.einsum("bqhd,bkhd->bhqk", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    score = (score + bias).masked_fill(~mask, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", score.softmax(-1).nan_to_num(), v)


def close(found, wanted):
    torch.testing.assert_close(found.double(), wanted.double(), atol=2e-5, rtol=2e-5)


def away(q_len, k_len, lower_right=False):
    rows = torch.arange(q_len)[:, None] + (k_len - q_len if lower_right else 0)
    return rows - torch.arange(k_len)


def operands(q_len, k_len, heads=4):
    torch.manual_seed(0)
    q = torch.randn(2, q_len, heads, 8, requires_grad=True)
    return q, *(torch.randn(2, k_len, heads, 8, requires_grad=True) for _ in range(2))


def held(found, wanted, inputs):
    """Values and gradients."""
    close(found, wanted)
    torch.manual_seed(1)
    grad = torch.randn(found.shape)
    mine = torch.autograd.grad(found, inputs, grad)
    for one, other in zip(mine, torch.autograd.grad(wanted, inputs, grad.double()), strict=True):
        close(one, other)


MASKS = {
    "none": (None, lambda n, m: away(n, m) > -math.inf),
    "triangular": (compat.LowerTriangularMask(), lambda n, m: away(n, m) >= 0),
    "bottom right": (
        compat.LowerTriangularFromBottomRightMask(), lambda n, m: away(n, m, True) >= 0,
    ),
    "local": (
        compat.LowerTriangularFromBottomRightMask().make_local_attention(3),
        lambda n, m: (away(n, m, True) >= 0) & (away(n, m, True) < 3),
    ),
    "window": (
        compat.LocalAttentionFromBottomRightMask(window_left=2, window_right=1),
        lambda n, m: (away(n, m, True) <= 2) & (away(n, m, True) >= -1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(("q_len", "k_len"), [(9, 9), (5, 12), (12, 5)])
def test_biases_without_sequences(name, q_len, k_len):
    bias, mask = MASKS[name]
    q, k, v = operands(q_len, k_len)
    found = compat.memory_efficient_attention(q, k, v, bias, scale=0.3)
    held(found, plain(q, k, v, mask(q_len, k_len), scale=0.3), (q, k, v))


@pytest.mark.parametrize("shape", [(2, 4, 6, 9), (1, 4, 6, 9), (2, 1, 6, 9), (4, 6, 9), (6, 9)])
def test_tensors_as_biases(shape):
    q, k, v = operands(6, 9)
    bias = torch.randn(shape, requires_grad=True)
    found = compat.memory_efficient_attention(q, k, v, bias)
    held(found, plain(q, k, v, torch.tensor(True), bias.double()), (q, k, v, bias))


def test_a_triangle_with_a_tensor():
    q, k, v = operands(9, 9)
    bias = torch.randn(2, 4, 9, 9, requires_grad=True)
    found = compat.memory_efficient_attention(q, k, v, compat.LowerTriangularMask().add_bias(bias))
    held(found, plain(q, k, v, away(9, 9) >= 0, bias.double()), (q, k, v, bias))


def of_sequences(q_lengths, k_lengths, rule, room=None):
    """The mask of packed sequences; ``rule`` is of a sequence's queries and keys."""
    room = k_lengths if room is None else [room] * len(k_lengths)
    mask = torch.zeros(sum(q_lengths), sum(room), dtype=torch.bool)
    row = column = 0
    for n, m, width in zip(q_lengths, k_lengths, room, strict=True):
        mask[row : row + n, column : column + m] = rule(n, m)
        row, column = row + n, column + width
    return mask


BLOCKS = {
    "whole": (lambda block: block, lambda n, m: away(n, m) > -math.inf),
    "causal": (lambda block: block.make_causal(), lambda n, m: away(n, m) >= 0),
    "bottom right": (
        lambda block: block.make_causal_from_bottomright(), lambda n, m: away(n, m, True) >= 0,
    ),
    "local": (
        lambda block: block.make_local_attention(2),
        lambda n, m: (away(n, m) >= 0) & (away(n, m) < 2),
    ),
    "local bottom right": (
        lambda block: block.make_local_attention_from_bottomright(2),
        lambda n, m: (away(n, m, True) >= 0) & (away(n, m, True) < 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("keys", [None, [6, 2, 9]])
def test_packed_sequences(name, keys):
    torch.manual_seed(0)
    make, rule = BLOCKS[name]
    lengths = [4, 1, 7]
    bias = make(compat.BlockDiagonalMask.from_seqlens(lengths, keys))
    q = torch.randn(1, 12, 4, 8, requires_grad=True)
    k, v = (torch.randn(1, sum(keys or lengths), 4, 8, requires_grad=True) for _ in range(2))
    mask = of_sequences(lengths, keys or lengths, rule)
    found = compat.memory_efficient_attention(q, k, v, bias)
    held(found, plain(q, k, v, mask), (q, k, v))


@pytest.mark.parametrize("causal", [True, False])
def test_keys_with_room(causal):
    torch.manual_seed(0)
    kinds = (
        compat.BlockDiagonalPaddedKeysMask, compat.BlockDiagonalCausalWithOffsetPaddedKeysMask
    )  # fmt: skip
    bias = kinds[causal].from_seqlens([2, 1, 3], 8, [5, 1, 8])
    q, k, v = torch.randn(1, 6, 4, 8), *torch.randn(2, 1, 24, 4, 8)
    mask = of_sequences(
        [2, 1, 3], [5, 1, 8], lambda n, m: away(n, m, True) >= (0 if causal else -99), room=8
    )
    close(compat.memory_efficient_attention(q, k, v, bias), plain(q, k, v, mask))


def test_tensors_are_packed_and_split():
    tensors = [torch.randn(1, 3, 2, 8), torch.randn(2, 4, 2, 8)]
    bias, packed = compat.BlockDiagonalMask.from_tensor_list(tensors)
    out = compat.memory_efficient_attention(packed, packed, packed, bias)
    parts = bias.split(out)
    assert [part.shape for part in parts] == [x.shape for x in tensors]
    for part, x in zip(parts, tensors, strict=True):
        close(part, compat.memory_efficient_attention(x, x, x))
    # As in xFormers, other masks made of it know the tensors too.
    local = bias.make_local_attention(2)
    assert [x.shape for x in local.split(packed)] == [x.shape for x in tensors]
    single = compat.BlockDiagonalMask.from_seqlens([3, 0, 4]).make_causal()
    assert [x.shape[:2] for x in single.split(packed[:, :7])] == [(1, 3), (1, 0), (1, 4)]
    with pytest.raises(errors.ShapeError, match="for 7 rows"):
        single.split(packed)


def test_expanded_leaves_get_a_gradient_for_each_head():
    q, k, v = operands(5, 7)
    shared = k.detach()[:, :, :1].expand(-1, -1, 4, -1).requires_grad_()
    found = compat.memory_efficient_attention(q, shared, v)
    held(found, plain(q, shared, v, torch.tensor(True)), (q, shared, v))
    groups = q.reshape(2, 5, 2, 2, 8)
    keys = k.detach()[:, :, :2, None].expand(-1, -1, 2, 2, -1).requires_grad_()
    found = compat.memory_efficient_attention(groups, keys, keys).flatten(2, 3)
    wide = keys.flatten(2, 3)
    held(found, plain(q, wide, wide, torch.tensor(True)), (q, keys))


def test_layouts():
    torch.manual_seed(0)
    q, k, v = operands(5, 7)
    full = torch.tensor(True)
    flat = compat.memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0])
    close(flat, plain(q, k, v, full)[:, :, 0])
    shared = k[:, :, :1].expand(-1, -1, 4, -1)
    close(compat.memory_efficient_attention(q, shared, v), plain(q, shared, v, full))
    # Two groups of two heads, each with a key head of its own.
    groups = q.reshape(2, 5, 2, 2, 8)
    keys, values = (x[:, :, :2, None].expand(-1, -1, 2, 2, -1) for x in (k, v))
    out = compat.memory_efficient_attention(groups, keys, values)
    assert out.shape == groups.shape
    close(out.flatten(2, 3), plain(q, k[:, :, :2], v[:, :, :2], full))
    bias = torch.randn(2, 2, 2, 5, 7)
    biased = compat.memory_efficient_attention(groups, keys, values, bias)
    wanted = plain(q, k[:, :, :2], v[:, :, :2], full, bias.double().flatten(1, 2))
    close(biased.flatten(2, 3), wanted)


def test_dropout_and_dtypes():
    q, k, v = (x.detach().bfloat16() for x in operands(5, 7))
    assert compat.memory_efficient_attention(q, k, v).dtype is torch.bfloat16
    wide = compat.memory_efficient_attention(q, k, v, output_dtype=torch.float32)
    assert wide.dtype is torch.float32
    close(wide, compat.memory_efficient_attention(q.float(), k.float(), v.float()))
    first, second = (compat.memory_efficient_attention(q, k, v, p=0.5) for _ in range(2))
    assert not torch.equal(first, second)


def test_one_graph():
    q, k, v = operands(6, 6)
    bias = compat.LowerTriangularFromBottomRightMask().make_local_attention(3)
    call = torch.compile(compat.memory_efficient_attention, fullgraph=True, backend="aot_eager")
    close(call(q, k, v, bias), compat.memory_efficient_attention(q, k, v, bias))


class _LowerTriangularMask:
    """As if of another package."""


X = torch.randn(1, 4, 2, 8)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (
            lambda: compat.memory_efficient_attention(X, X, X, _LowerTriangularMask()),
            errors.UnsupportedError, "_LowerTriangularMask",
        ),
        (lambda: compat.memory_efficient_attention(X, X, X, op=1), errors.UnsupportedError, "op"),
        (
            lambda: compat.memory_efficient_attention(X, X, X, torch.ones(4, 4).bool()),
            errors.DTypeError, "bool",
        ),
        (
            lambda: compat.memory_efficient_attention(X, X, X, torch.ones(3, 4, 4)),
            errors.ShapeError, "attn_bias has shape",
        ),
        (lambda: compat.memory_efficient_attention(X[0, 0], X, X), errors.ShapeError, "dims"),
        (
            lambda: compat.memory_efficient_attention(
                X, X, X, compat.BlockDiagonalMask.from_seqlens([2, 3])
            ),
            errors.ShapeError, "5 rows",
        ),
        (
            lambda: compat.BlockDiagonalMask.from_seqlens([2, 3], [1]),
            errors.ShapeError, "2 sequences",
        ),
        (
            lambda: compat.BlockDiagonalPaddedKeysMask.from_seqlens([2], 4, [5]),
            errors.ArgumentError, "room for 4",
        ),
        (lambda: compat.BlockDiagonalMask.from_seqlens([-2]), errors.ArgumentError, "-2 rows"),
        (
            lambda: compat.LowerTriangularFromBottomRightMask().make_local_attention(0),
            errors.ArgumentError, "window_size",
        ),
        (lambda: compat.LocalAttentionFromBottomRightMask(-1, 2), errors.ArgumentError, "window"),
    ],
)  # fmt: skip
def test_what_is_refused(call, error, match):
    with pytest.raises(error, match=match) as caught:
        call()
    assert caught.value.hint


def test_views_of_a_leaf_whose_heads_are_in_one_place_have_a_gradient_for_each_head():
    q, v = (torch.randn(1, 5, 2, 4, dtype=torch.float64) for _ in range(2))
    leaf = torch.randn(5, 1, 4, dtype=torch.float64).expand(5, 2, 4).detach().requires_grad_()
    found, wanted = (
        torch.autograd.grad(compat.memory_efficient_attention(q, k[None], v).sum(), leaf)[0]
        for k in (leaf, leaf.clone())
    )
    torch.testing.assert_close(found, wanted)
