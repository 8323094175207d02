"""Causal calls by squares: every pair once, rows of parts with the bits of the whole."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attndsl
from attndsl.backends.base import Backward, Wants
from attndsl.backends.log_sum import public_lse
from attndsl.backends.tiled import sdpa_causal, step_plan
from attndsl.backends.tiled.sdpa_causal import Triangle, triangle_of
from attndsl.call.bind import bind
from attndsl.call.options import CallOptions, Location

ARE = {
    "causal()": 0,
    "not (kv > q)": 0,
    "q - kv >= -128": 128,
    "q + 128 >= kv": 128,
    "causal_lower_right()": 128,  # Of a call with so many more keys.
}
ARE_NOT = [
    "score",
    "q > kv",  # Row 0 sees nothing, and tiles do not begin where keys do.
    "causal() and q - kv < 300",  # Also where a call has no row that far down.
    "causal() or q - kv < -2000",
    "causal() and q // 100 == kv // 100",
    "causal() and (q - kv) % 2 == 0",
    "kv <= q + h",
    "kv <= q + 128 * b",
    "kv <= 2 * q",
    "mask = causal(); sink = 0.5",
    "tensor n[1]: int\nmask = q - kv >= n[0]",
]


def _call(attention, rows=256, keys=384, q_offset=0, kv_offset=0, scale=None, **captures):
    q, k, v = (torch.randn(1, 2, n, 8) for n in (rows, keys, keys))
    location = Location(q_offset, kv_offset, None, None)
    program = attention.lowered.program
    return bind(program, (q, k, v), captures, location, CallOptions(scale))


@pytest.mark.parametrize("text", ARE)
def test_what_is_a_triangle(text):
    attention = attndsl.compile(text, backend="cpu")
    found = triangle_of(attention.lowered, _call(attention))
    assert found == Triangle(ARE[text], 256, step_plan.BLOCK_M)


@pytest.mark.parametrize("text", ARE_NOT)
def test_what_is_none(text):
    attention = attndsl.compile(text, backend="cpu")
    captures = {"n": torch.tensor([0])} if "tensor" in text else {}
    assert triangle_of(attention.lowered, _call(attention, **captures)) is None


def test_where_a_call_lies_decides():
    attention = attndsl.compile("causal()", backend="cpu")
    for first in (0, 128):
        call = _call(attention, q_offset=first + 9, kv_offset=9)
        assert triangle_of(attention.lowered, call) == Triangle(first, 256, step_plan.BLOCK_M)
    # Not from a tile on, above the diagonal, and rows that see less than their keys.
    for options in ({"q_offset": 64}, {"q_offset": -128}, {"q_offset": 256}, {"keys": 255}):
        assert triangle_of(attention.lowered, _call(attention, **options)) is None


def test_scales_that_torch_gets_wrong_are_looked_at_each_time():
    """It scales what it has made -inf. The mask of a call before had the same numbers."""
    attention, found = attndsl.compile("causal()", backend="cpu"), sdpa_causal.Triangles()
    wanted = Triangle(0, 256, step_plan.BLOCK_M)
    for scale in (0.5, 0.0, -1.0, 0.5):
        call = _call(attention, scale=scale)
        assert found.of(attention.lowered, call) == (wanted if scale > 0.0 else None)


@given(first=st.integers(0, 9), rows=st.integers(1, 40), side=st.sampled_from([1, 2, 4]))
@settings(deadline=None)
def test_squares_have_every_pair_once(first, rows, side):
    first *= side
    counts = torch.zeros(rows, first + rows, dtype=torch.int64)
    for squares in Triangle(first, rows, side).squares():
        for number in range(squares.number):
            row, key = (at + number * squares.apart for at in (squares.row, squares.key))
            ones = torch.ones(squares.rows, squares.keys, dtype=torch.int64)
            part = counts[row : row + squares.rows, key : key + squares.keys]
            part += ones.tril() if squares.causal else ones
    assert counts.equal(torch.ones_like(counts).tril(first))


@given(first=st.integers(0, 9), rows=st.integers(1, 20))
@settings(deadline=None)
def test_rows_of_a_part_meet_the_squares_of_the_whole(first, rows):
    """In their order, so that sums are the same."""

    def met(triangle, row):
        return [
            (squares.key + number * squares.apart, squares.keys if not squares.causal else 0)
            for squares in triangle.squares()
            for number in range(squares.number)
            if 0 <= row - squares.row - number * squares.apart < squares.rows
        ]

    whole, part = Triangle(0, first + rows, 1), Triangle(first, rows, 1)
    for row in range(rows):
        assert met(part, row) == met(whole, first + row)


def test_calls_are_few():
    for tiles in (1, 2, 16, 64):
        found = list(Triangle(0, tiles * 128, 128).squares())
        assert len(found) == tiles.bit_length()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize(("first", "rows"), [(0, 64), (0, 37), (24, 45), (16, 3), (40, 8)])
def test_results_and_gradients(monkeypatch, dtype, heads, first, rows):
    monkeypatch.setattr(step_plan, "BLOCK_M", 8)
    torch.manual_seed(0)
    q = torch.randn(2, rows, heads[0], 16, dtype=dtype).transpose(1, 2)
    k, v = torch.randn(2, 2, heads[1], first + rows + 2, 16, dtype=dtype)
    operands = [x.requires_grad_() for x in (q, k, v)]
    grad_out = torch.randn_like(q)
    attention, where = attndsl.compile("causal()", backend="reference"), Location(first)
    call = bind(attention.lowered.program, tuple(map(torch.Tensor.detach, operands)), {}, where)
    triangle = triangle_of(attention.lowered, call)
    out, lse = triangle.forward(attention.lowered, call)
    backward = Backward(out, lse, grad_out, None, Wants(True, True, True))
    grads = triangle.backward(attention.lowered, call, backward)
    found = out, public_lse(lse), grads.q, grads.k, grads.v
    out, lse = attention(*operands, q_offset=first, return_lse=True)
    wanted = out, lse, *torch.autograd.grad(out, operands, grad_out)
    close = {"atol": 0.02, "rtol": 0.02} if dtype is torch.bfloat16 else {}
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **close)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("length", [512, 1000])
def test_rows_of_a_part_have_the_bits_of_the_whole(length):
    attention = attndsl.compile("causal()", backend="cpu")
    q, k, v = (torch.randn(1, 2, length, 32, requires_grad=True) for _ in range(3))
    grad_out = torch.randn_like(q)
    out, lse = attention(q, k, v, return_lse=True)
    (dq,) = torch.autograd.grad(out, q, grad_out)
    for start, stop in ((0, 128), (128, 384), (384, 512), (256, length)):
        part = q[:, :, start:stop].detach().requires_grad_()
        own, own_lse = attention(
            part, k[:, :, :stop], v[:, :, :stop], q_offset=start, return_lse=True
        )
        (own_dq,) = torch.autograd.grad(own, part, grad_out[:, :, start:stop])
        assert own.equal(out[:, :, start:stop])
        assert own_lse.equal(lse[:, :, start:stop])
        assert own_dq.equal(dq[:, :, start:stop])


def test_a_row_of_zeros_is_no_row_without_keys():
    """Its log-sum-exp is 0, and its output is not."""
    attention = attndsl.compile("causal()", backend="cpu")
    q, k, v = (torch.randn(1, 2, 300, 8) for _ in range(3))
    q[:, :, 0] = 0.0
    call = bind(attention.lowered.program, (q, k, v), {}, Location(), CallOptions())
    triangle = triangle_of(attention.lowered, call)
    assert triangle is not None
    assert triangle.forward(attention.lowered, call) is not None


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("place", [0, 5, 200])
def test_keys_that_are_no_numbers_count_where_they_are_seen(value, place):
    attention, reference = (
        attndsl.compile("causal()", backend=name) for name in ("cpu", "reference")
    )
    q, k, v = (torch.randn(1, 2, 300, 8).abs() for _ in range(3))
    k[:, :, place] = value
    operands = [x.requires_grad_() for x in (q, k, v)]

    def run(call):
        out, lse = call(*operands, return_lse=True)
        _, *others = torch.autograd.grad(out.sum(), operands)
        return out, lse, *others  # dQ is a product with dead keys too.

    for one, other in zip(run(attention), run(reference), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_infinite_values_that_are_seen_stay_infinite():
    attention, reference = (
        attndsl.compile("causal()", backend=name) for name in ("cpu", "reference")
    )
    q, k, v = (torch.randn(1, 2, 300, 8) for _ in range(3))
    v[:, :, 0, ::2] = float("inf")
    v[:, :, 5, 1::2] = float("-inf")
    torch.testing.assert_close(attention(q, k, v)[:, :, 5:], reference(q, k, v)[:, :, 5:])
