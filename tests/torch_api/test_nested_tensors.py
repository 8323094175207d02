"""Jagged nested tensors, entry by entry against dense calls."""

from __future__ import annotations

import pytest
import torch

from attndsl import scaled_dot_product_attention
from attndsl.torch_api.sdpa_programs import program

HEADS, DIM = 2, 8


def _nested(lengths, heads=HEADS, dtype=torch.float64):
    parts = [torch.randn(length, heads * DIM, dtype=dtype) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def _split(x, heads=HEADS):
    return x.unflatten(-1, (heads, DIM)).transpose(1, 2)


def _lengths(batch=32, zeros=True):
    drawn = torch.randint(1, 32, (batch,)).tolist()
    if zeros:
        drawn[0] = drawn[5] = drawn[-1] = 0
        drawn[6], drawn[7] = 1, 0
    return drawn


def _entries(x, batch):
    return x.unbind() if x.is_nested else x.expand(batch, *x.shape[1:]).unbind()


def _same(query, key, value, leaves, **options):
    """Outputs and gradients with respect to ``leaves`` agree with those of dense entries."""
    found = scaled_dot_product_attention(query, key, value, **options)
    batch = len(found.unbind())
    expected = [
        torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
        for q, k, v in zip(*(_entries(x, batch) for x in (query, key, value)), strict=True)
    ]
    assert found.is_nested == query.is_nested
    for mine, torchs in zip(found.unbind(), expected, strict=True):
        torch.testing.assert_close(mine, torchs)
    whole = found.values() if found.is_nested else found
    grads = torch.autograd.grad(whole.square().sum(), leaves, retain_graph=True)
    total = sum(part.square().sum() for part in expected)
    for mine, torchs in zip(grads, torch.autograd.grad(total, leaves), strict=True):
        pair = (x.values() if x.is_nested else x for x in (mine, torchs))
        torch.testing.assert_close(*pair)
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_self_attention(causal, zeros):
    x = _nested(_lengths(zeros=zeros))
    found = _same(_split(x), _split(x), _split(x), [x], is_causal=causal)
    (found + _split(x)).sum()  # Of one shape to torch, which compares offsets by identity.


@pytest.mark.parametrize("causal", [False, True])
def test_other_lengths_of_keys(causal):
    x, y = _nested(_lengths()), _nested(_lengths()[::-1])
    z = torch.nested.nested_tensor_from_jagged(
        torch.randn_like(y.values(), requires_grad=True), y.offsets()
    )
    _same(_split(x), _split(y), _split(z), [x, y], is_causal=causal, scale=0.3)


@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_a_dense_query(batch, causal):
    y = _nested([3, 0, 1, 31, 17, 4])
    query = torch.randn(batch, HEADS, 5, DIM, dtype=torch.float64, requires_grad=True)
    found = _same(query, _split(y), _split(y), [query, y], is_causal=causal)
    assert found.shape == (6, HEADS, 5, DIM)


@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("batch", [1, 6])
def test_dense_keys_shared_by_the_batch_and_the_heads(batch, heads):
    x = _nested([3, 0, 1, 31, 17, 4])
    shape = (batch, heads, 9, DIM)
    key, value = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    _same(_split(x), key, value, [x, key, value], is_causal=True)


@pytest.mark.parametrize("batches", [(1, 6), (6, 1)])
def test_a_dense_key_or_value_shared_by_the_batch(batches):
    x = _nested([3, 0, 1, 31, 17, 4])
    key, value = (
        torch.randn(batch, HEADS, 9, DIM, dtype=torch.float64, requires_grad=True)
        for batch in batches
    )
    _same(_split(x), key, value, [x, key, value], is_causal=True)


def test_a_dense_value_shared_by_nested_keys_of_one_length():
    x, y = _nested([3, 0, 1]), _nested([5, 5, 5])
    value = torch.randn(1, HEADS, 5, DIM, dtype=torch.float64)
    found = scaled_dot_product_attention(_split(x), _split(y), value)
    expected = scaled_dot_product_attention(_split(x), torch.stack(_split(y).unbind()), value)
    torch.testing.assert_close(found.values(), expected.values())


def test_nested_keys_of_one_entry_or_one_head():
    x, y = _nested([3, 0, 4]), _nested([5])
    found = scaled_dot_product_attention(_split(x), _split(y), _split(y))
    for mine, query in zip(found.unbind(), _split(x).unbind(), strict=True):
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, *(_split(y).unbind()[0] for _ in range(2))
        )
        torch.testing.assert_close(mine, expected)
    z = _nested([2, 7, 1], heads=1)
    _same(_split(x), _split(z, 1), _split(z, 1), [x, z])


def test_grouped_heads():
    x = _nested([3, 0, 4, 9], heads=6)
    keys = torch.nested.nested_tensor_from_jagged(
        torch.randn(16, 2 * DIM, dtype=torch.float64), x.offsets()
    )
    key = _split(keys)
    _same(_split(x, 6), key, key, [x], enable_gqa=True, is_causal=True)


def test_one_head_without_a_dim_for_it():
    x = _nested([3, 0, 4], heads=1)
    found = scaled_dot_product_attention(x, x, x, is_causal=True)
    split = scaled_dot_product_attention(*[_split(x, 1)] * 3, is_causal=True)
    assert torch.equal(found.values(), split.values()[0])


def test_unused_rows_between_entries():
    rows = torch.randn(12, HEADS, DIM, dtype=torch.float64, requires_grad=True)
    offsets, lengths = torch.tensor([0, 4, 8, 12]), torch.tensor([2, 4, 1])
    x = torch.nested.nested_tensor_from_jagged(rows, offsets, lengths).transpose(1, 2)
    found = scaled_dot_product_attention(x, x, x, is_causal=True)
    for number, length in enumerate(lengths.tolist()):
        entry = rows[4 * number : 4 * number + length].transpose(0, 1)
        expected = torch.nn.functional.scaled_dot_product_attention(
            entry, entry, entry, is_causal=True
        )
        torch.testing.assert_close(found.unbind()[number], expected)
    (grad,) = torch.autograd.grad(found.values().sum(), rows)
    assert (grad[2:4] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_rows_before_the_first_entry_see_nothing(causal):
    values = torch.randn(9, 2, 8, requires_grad=True)
    whole, part = (
        torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets)).transpose(1, 2)
        for offsets in ([0, 3, 7, 9], [3, 7, 9])
    )
    out = scaled_dot_product_attention(part, part, part, is_causal=causal).transpose(1, 2).values()
    wanted = (
        scaled_dot_product_attention(whole, whole, whole, is_causal=causal).transpose(1, 2).values()
    )
    assert torch.equal(out[:3], torch.zeros(3, 2, 8))
    torch.testing.assert_close(out[3:], wanted[3:])
    (found,) = torch.autograd.grad(out.sum(), values)
    (exact,) = torch.autograd.grad(wanted[3:].sum(), values)
    torch.testing.assert_close(found, exact)


def test_dropout_drops_pairs():
    x = _split(_nested([30, 20]))
    torch.manual_seed(5)
    found = scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    torch.manual_seed(5)
    again = scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    assert torch.equal(found.values(), again.values())
    assert not torch.equal(found.values(), scaled_dot_product_attention(x, x, x).values())


def test_other_entries_cost_no_tiles():
    captures = (("first_key", "bound", ("q_len",)), ("end_key", "bound", ("q_len",)))
    start = torch.arange(1024) // 128 * 128
    tiles = program("range", captures, False).tiles(
        1024, 1024, 128, 128, first_key=start, end_key=start + 128
    )
    assert torch.equal(tiles.kinds[0, 0], 2 * torch.eye(8, dtype=torch.int8))
