"""``FlopCounterMode`` counts calls as it counts torch's own attention."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

import attndsl

SHAPES = ((2, 4, 7, 16), (2, 2, 9, 16), (2, 2, 9, 24))


def _count(function, leaves, counter=None):
    counter = counter or FlopCounterMode(display=False)
    with counter:
        function(*leaves).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_two_products_forward_and_five_backward(backend, compiled):
    leaves = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    attention = attndsl.compile("causal()", backend=backend)
    function = torch.compile(attention, backend="aot_eager") if compiled else attention
    qk, pv = (2 * 2 * 4 * 7 * 9 * dim for dim in (16, 24))
    assert _count(function, leaves) == 3 * qk + 2 * pv + qk + pv
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        function(*leaves)
    assert counter.get_total_flops() == qk + pv
    by_operator = counter.get_flop_counts()["Global"]
    assert by_operator == {torch.ops.attndsl.forward: qk + pv}
    torch._dynamo.reset()


def test_as_torch_counts_attention():
    """A dense one of torch operations, which are counted one by one."""
    leaves = [torch.randn(2, 4, length, 16, requires_grad=True) for length in (7, 9, 9)]
    with sdpa_kernel(SDPBackend.MATH):
        dense = _count(scaled_dot_product_attention, leaves)
    # Fused backwards make the scores again.
    again = 2 * 2 * 4 * 7 * 9 * 16
    assert _count(attndsl.scaled_dot_product_attention, leaves) == dense + again


def test_a_counter_that_was_there_before(monkeypatch):
    """Made, and turned on, before anybody told torch's counters of the operators."""
    import torch.utils.flop_counter as module

    for operator in (torch.ops.attndsl.forward, torch.ops.attndsl.backward):
        monkeypatch.delitem(module.flop_registry, operator, raising=False)
    leaves = [torch.randn(shape, requires_grad=True) for shape in SHAPES]
    assert _count(attndsl.compile("causal()"), leaves, FlopCounterMode(display=False)) > 0
