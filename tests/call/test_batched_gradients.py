"""Gradients that torch.autograd batches by itself are refused with what to call instead."""

import pytest
import torch

import attndsl
from attndsl.errors import UnsupportedError

Q, K, V = torch.randn(3, 1, 1, 5, 4, generator=torch.Generator().manual_seed(0))
PROGRAM = attndsl.compile("causal()", backend="cpu")


def call(q):
    return PROGRAM(q, K, V)


def once(q):
    return torch.autograd.functional.jacobian(call, q, vectorize=True)


def forwards(q):
    return torch.autograd.functional.jacobian(call, q, vectorize=True, strategy="forward-mode")


def twice(q):
    return torch.autograd.functional.hessian(lambda q: call(q).square().sum(), q, vectorize=True)


def by_lse(q):
    lse = PROGRAM(q.requires_grad_(), K, V, return_lse=True)[1]
    return torch.autograd.grad(lse, q, torch.ones(2, *lse.shape), is_grads_batched=True)


def in_a_graph(q):
    compiled = torch.compile(call, backend="aot_eager")
    return torch.autograd.functional.jacobian(compiled, q, vectorize=True)


@pytest.mark.parametrize("ask", [once, forwards, twice, by_lse, in_a_graph])
def test_batched_gradients_are_refused(ask):
    with pytest.raises(UnsupportedError, match="is_grads_batched=True and jacobian") as caught:
        ask(Q.clone())
    assert "torch.func.jacrev" in caught.value.hint


def test_what_is_named_instead_gives_the_same():
    reference = attndsl.compile("causal()", backend="reference")
    expected = torch.autograd.functional.jacobian(lambda q: reference(q, K, V), Q, vectorize=True)
    torch.testing.assert_close(torch.func.jacrev(call)(Q), expected)
    torch.testing.assert_close(torch.func.jacfwd(call)(Q), expected)
