"""Parts of calls in graphs, under checkpoints that choose, and with positions that change."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import attndsl
from attndsl.call.op_encoding import EncodedCall, packed

SIZED = attndsl.compile("""
tensor slope[heads]: float
tensor bias[heads, q_len, kv_len]: float
mask = causal_lower_right()
score = score * slope[h] + bias[h, q, kv] + hkv + kv_heads * 0.1 + b * q_len
weights = dropout(softmax(score), 0.3)
""")
RAGGED = attndsl.compile("""
tensor slope[heads]: float
mask = causal() and kv < kv_len - 2
score = score * slope[h]
""")
LENGTHS, OFFSETS = torch.tensor([20, 40]), torch.tensor([0, 8])


def _rows(q, k, v, slope, bias):
    return SIZED(
        q[:, 4:, 10:].sin(), k[:, 2:], v[:, 2:], slope=slope, bias=bias, seed=5, q_offset=10,
        q_len=32, h_offset=4, heads=8, kv_heads=4,
    )  # fmt: skip


def _shares(q, k, v, slope, bias):
    return SIZED(
        q[:, 4:, 10:].sin(), k[:, 2:], v[:, 2:], slope=slope[4:], bias=bias[4:, 10:], seed=5,
        q_offset=10, q_len=32, h_offset=4, heads=8, kv_heads=4,
    )  # fmt: skip


def _entries(q, k, v, slope, bias):
    return RAGGED(q.sin(), k, v, slope=slope, kv_lengths=LENGTHS, q_offset=OFFSETS)


CALLS = {"rows": _rows, "shares": _shares, "entries": _entries}


def _leaves():
    sizes = (2, 8, 32, 16), (2, 4, 40, 16), (2, 4, 40, 16), (8,), (8, 32, 40)
    return [torch.randn(size, requires_grad=True) for size in sizes]


def _run(function, leaves):
    out = function(*leaves)
    grads = torch.autograd.grad(out.sin().sum(), leaves, allow_unused=True)
    return out, *(grad for grad in grads if grad is not None)


def _same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "dynamic"), [("rows", False), ("shares", True), ("entries", True)]
)
def test_graphs(name, dynamic):
    leaves = _leaves()
    compiled = torch.compile(CALLS[name], backend="aot_eager", fullgraph=True, dynamic=dynamic)
    _same(_run(compiled, leaves), _run(CALLS[name], leaves))


@pytest.mark.parametrize("name", CALLS)
def test_exported_programs(name):
    class Layer(torch.nn.Module):
        def forward(self, *leaves):
            return CALLS[name](*leaves)

    leaves = tuple(_leaves())
    exported = torch.export.export(Layer(), leaves).module()
    torch.testing.assert_close(exported(*leaves), CALLS[name](*leaves))


def _policy(context, operator, *args, **kwargs):
    kept = operator is torch.ops.attndsl.forward.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("name", CALLS)
def test_checkpoints_that_choose(name):
    def checkpointed(*leaves):
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(CALLS[name], *leaves, use_reentrant=False, context_fn=contexts)

    leaves = _leaves()
    _same(_run(checkpointed, leaves), _run(CALLS[name], leaves))


def test_whole_tensors_in_operators():
    """A graph narrows tensors before the operator; others may give them whole."""
    leaves = _leaves()
    q, k, v, slope, bias = (x.detach() for x in leaves)
    operands = q[:, 4:, 10:].sin(), k[:, 2:], v[:, 2:]
    given = EncodedCall(
        SIZED._spec, "cpu", False, *operands, [slope, bias], q_offset=10, seed=5,
        whole=[32, -1, 8, 4, 2, 4, 0, 0, 0],
    )  # fmt: skip
    found, _ = torch.ops.attndsl.forward(*packed(given))
    torch.testing.assert_close(found, _rows(*leaves).detach())


@pytest.mark.parametrize("name", ["kv_lengths", "q_offset"])
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_positions_that_change_before_the_backward(name, kind):
    """They are noticed, or were copied."""
    q, k, v, slope, _ = _leaves()
    options = {"kv_lengths": LENGTHS.to(kind), "q_offset": OFFSETS.to(kind)}
    leaves = (q, k, v, slope)
    wanted = torch.autograd.grad(RAGGED(q, k, v, slope=slope, **options).sum(), leaves)
    out = RAGGED(q, k, v, slope=slope, **options)
    options[name].zero_()
    if kind is torch.int64:
        _same(torch.autograd.grad(out.sum(), leaves), wanted)
        return
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out.sum(), leaves)
