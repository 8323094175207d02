"""Positions in tensors that change between a call and its backward."""

from __future__ import annotations

import pytest
import torch

import attndsl

NAMES = ("q_offset", "kv_offset", "q_index", "kv_index")


def _leaves() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))


def _positions(name: str) -> torch.Tensor:
    return torch.arange(5) if name.endswith("index") else torch.tensor(0)


@pytest.mark.parametrize("name", NAMES)
def test_a_change_before_the_backward_is_noticed(name: str) -> None:
    q, k, v = _leaves()
    positions = _positions(name)
    out = attndsl.compile("causal()", backend="cpu")(q, k, v, **{name: positions})
    positions += 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_a_change_before_the_second_backward_is_noticed(name: str) -> None:
    q, k, v = _leaves()
    positions = _positions(name)
    out = attndsl.compile("causal()", backend="cpu")(q, k, v, **{name: positions})
    (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    positions += 3
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def test_gradients_with_positions_that_stay() -> None:
    q, k, v = _leaves()
    q_index, kv_offset = torch.tensor([4, 1, 3, 2, 0]), torch.tensor(1)
    found = {}
    for backend in ("reference", "cpu"):
        attention = attndsl.compile("mask = causal(); score = score + alibi()", backend=backend)
        out = attention(q, k, v, q_index=q_index, kv_offset=kv_offset)
        first = torch.autograd.grad(out.square().sum(), (q, k, v), create_graph=True)
        found[backend] = (*first, *torch.autograd.grad(first[0].square().sum(), (q, k, v)))
    for one, other in zip(found["cpu"], found["reference"], strict=True):
        torch.testing.assert_close(one, other)
