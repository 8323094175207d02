"""Each refusal names the argument, its value, and what would do."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn.attention.bias import causal_lower_right

from attndsl import scaled_dot_product_attention
from attndsl.errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError


def _operands(**changes):
    return {
        "query": torch.randn(2, 4, 5, 8),
        "key": torch.randn(2, 4, 7, 8),
        "value": torch.randn(2, 4, 7, 8),
    } | changes


def _jagged(lengths, dim=8, heads=4):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [torch.randn(n, heads, dim) for n in lengths]
        return torch.nested.nested_tensor(parts, layout=torch.jagged)


META = torch.device("meta")
REFUSALS = {
    "no tensor": (
        lambda: _operands(key=[1.0]), ArgumentError, "key is a list", "pass a tensor",
    ),
    "no dims": (
        lambda: _operands(query=torch.tensor(1.0)), ShapeError, "query has 0 dims ()",
        "unsqueeze",
    ),
    "one dim": (
        lambda: _operands(value=torch.randn(7)), ShapeError, "value has 1 dims (7,)", "unsqueeze",
    ),
    "zero heads of query": (
        lambda: {n: x[:, :0] for n, x in _operands().items()}, ShapeError, "query has 0 heads",
        "at least one",
    ),
    "zero heads of key": (
        lambda: _operands(key=torch.randn(2, 0, 7, 8), value=torch.randn(2, 0, 7, 8)), ShapeError,
        "key has 0 heads", "at least one",
    ),
    "zero heads of value": (
        lambda: _operands(value=torch.randn(2, 0, 7, 8)), ShapeError, "value has 0 heads",
        "at least one",
    ),
    "dtypes": (
        lambda: _operands(key=torch.randn(2, 4, 7, 8).half()), DTypeError,
        "key is torch.float16 and query is torch.float32", "key.to(query.dtype)",
    ),
    "dtype of value": (
        lambda: _operands(value=torch.randn(2, 4, 7, 8).double()), DTypeError,
        "value is torch.float64 and query is torch.float32", "value.to(query.dtype)",
    ),
    "no float": (
        lambda: _operands(query=torch.ones(2, 4, 5, 8, dtype=torch.int32)), DTypeError,
        "query is of dtype torch.int32", "float16",
    ),
    "devices": (
        lambda: _operands(value=torch.randn(2, 4, 7, 8, device=META)), DeviceError,
        "value is on meta and query is on cpu", "value.to(query.device)",
    ),
    "device of key": (
        lambda: _operands(key=torch.randn(2, 4, 7, 8, device=META)), DeviceError,
        "key is on meta and query is on cpu", "key.to(query.device)",
    ),
    "batch": (
        lambda: _operands(key=torch.randn(3, 4, 7, 8)), ShapeError,
        "key has batch (3,) and query has 2 along its dim 0", "or one of them 1",
    ),
    "batch of value": (
        lambda: _operands(value=torch.randn(3, 4, 7, 8)), ShapeError,
        "value has batch (3,) and query has 2", "or one of them 1",
    ),
    "heads": (
        lambda: _operands(key=torch.randn(2, 2, 7, 8), value=torch.randn(2, 2, 7, 8)), ShapeError,
        "query has 4 heads, key has 2 heads and enable_gqa is False", "enable_gqa=True",
    ),
    "heads that do not divide": (
        lambda: _operands(
            key=torch.randn(2, 3, 7, 8), value=torch.randn(2, 3, 7, 8), enable_gqa=True
        ),
        ShapeError, "query has 4 heads and key has 3 heads", "a multiple",
    ),
    "heads of value": (
        lambda: _operands(value=torch.randn(2, 2, 7, 8), enable_gqa=True), ShapeError,
        "key has 4 heads and value has 2 heads", "make them equal",
    ),
    "head dims": (
        lambda: _operands(key=torch.randn(2, 4, 7, 16)), ShapeError,
        "query has head dim 8 and key has head dim 16", "make them equal",
    ),
    "no head dim": (
        lambda: _operands(query=torch.randn(2, 4, 5, 0), key=torch.randn(2, 4, 7, 0)), ShapeError,
        "head dim 0", "at least one element",
    ),
    "lengths": (
        lambda: _operands(value=torch.randn(2, 4, 6, 8)), ShapeError,
        "key has length 7 and value has length 6", "make them equal",
    ),
    "a mask of other lengths": (
        lambda: _operands(attn_mask=torch.ones(5, 6) > 0), ShapeError,
        "attn_mask has shape (5, 6), and the scores have shape (2, 4, 5, 7)", "broadcasts to it",
    ),
    "a mask of too many dims": (
        lambda: _operands(attn_mask=torch.ones(1, 2, 4, 5, 7)), ShapeError,
        "attn_mask has shape (1, 2, 4, 5, 7)", "broadcasts to it",
    ),
    "a mask of ints": (
        lambda: _operands(attn_mask=torch.ones(5, 7).int()), DTypeError,
        "attn_mask is of dtype torch.int32", "attn_mask.bool()",
    ),
    "a mask elsewhere": (
        lambda: _operands(attn_mask=torch.ones(5, 7, device=META)), DeviceError,
        "attn_mask is on meta and query is on cpu", "attn_mask.to(query.device)",
    ),
    "no mask": (
        lambda: _operands(attn_mask="causal"), ArgumentError, "attn_mask is a str", "bool or float",
    ),
    "a sparse operand": (
        lambda: _operands(key=torch.randn(2, 4, 7, 8).to_sparse()), ArgumentError,
        "key is of layout torch.sparse_coo", "key.to_dense()",
    ),
    "a sparse mask": (
        lambda: _operands(attn_mask=torch.ones(5, 7).to_sparse()), ArgumentError,
        "attn_mask is of layout torch.sparse_coo", "attn_mask.to_dense()",
    ),
    "dropout": (
        lambda: _operands(dropout_p=1.5), ArgumentError, "dropout_p is 1.5", "from 0 to 1",
    ),
    "a scale that is a tensor": (
        lambda: _operands(scale=torch.tensor(0.5)), ArgumentError, "scale is a Tensor",
        "pass a number",
    ),
    "a bias and causality": (
        lambda: _operands(attn_mask=causal_lower_right(5, 7), is_causal=True), ArgumentError,
        "attn_mask is causal_lower_right and is_causal is True", "drop is_causal",
    ),
    "a bias of other lengths": (
        lambda: _operands(attn_mask=causal_lower_right(4, 7)), ShapeError,
        "attn_mask is causal_lower_right(4, 7), and query and key have lengths 5 and 7",
        "causal_lower_right(5, 7)",
    ),
    "a mask of nested operands": (
        lambda: dict.fromkeys(("query", "key", "value"), _jagged([3, 4]).transpose(1, 2))
        | {"attn_mask": torch.ones(5, 7)},
        UnsupportedError, "attn_mask is given with nested operands", "is_causal=True",
    ),
    "another ragged dim": (
        lambda: dict.fromkeys(("query", "key", "value"), _jagged([3, 4])), ShapeError,
        "query has the nested shape (2,", "transpose(1, 2)",
    ),
    "nested beside too few dims": (
        lambda: _operands(query=_jagged([3, 4]).transpose(1, 2), key=torch.randn(5, 8)),
        ShapeError, "key has 2 dims (5, 8) beside nested operands", "(batch, heads, length, dim)",
    ),
    "nested batch": (
        lambda: _operands(
            query=_jagged([3, 4]).transpose(1, 2), key=_jagged([1, 2, 3]).transpose(1, 2),
            value=_jagged([1, 2, 3]).transpose(1, 2),
        ),
        ShapeError, "query has batch 2 and another operand has batch 3", "make them equal",
    ),
    "nested without heads": (
        lambda: _operands(
            query=_jagged([3, 4], heads=1).squeeze(2), key=_jagged([3, 4]).transpose(1, 2),
            value=_jagged([3, 4]).transpose(1, 2),
        ),
        ShapeError, "key or value has 4 heads", "a dim for heads",
    ),
    "nested lengths": (
        lambda: _operands(
            query=_jagged([3, 4]).transpose(1, 2), key=_jagged([3, 4]).transpose(1, 2),
            value=_jagged([4, 3]).transpose(1, 2),
        ),
        ShapeError, "key and value are nested with other lengths", "same offsets",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    make, kind, message, hint = REFUSALS[name]
    with pytest.raises(kind) as caught:
        scaled_dot_product_attention(**make())
    assert isinstance(caught.value, ValueError)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_devices_that_autocast_does_not_know():
    x = torch.randn(1, 1, 4, 8, device=META)
    found = scaled_dot_product_attention(x, x, x)
    assert (found.shape, found.device.type) == (x.shape, "meta")


def test_nested_tensors_of_the_other_layout():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x = torch.nested.nested_tensor([torch.randn(4, 3, 8), torch.randn(4, 2, 8)])
    with pytest.raises(ArgumentError, match=r"query is a nested tensor of layout torch\.strided"):
        scaled_dot_product_attention(x, x, x)
