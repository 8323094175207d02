"""Activation checkpointing: gradients are the same bits as without, dropout included."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import attndsl
from attndsl import scaled_dot_product_attention
from attndsl.backends.dense import vjp
from attndsl.backends.tiled.cpu import CPUBackend
from attndsl.flex import flex_attention
from attndsl.foundation.caches import CACHES, Reason

PLAIN = "tensor gain[heads]: float; mask = causal(); score = score * gain[h]"
GAIN = attndsl.compile(PLAIN)
DROPPED = attndsl.compile(f"{PLAIN}; weights = dropout(softmax(score), 0.3)")
MODULE = attndsl.nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)


def _module(q, k, v, gain):
    x, y = q[:, 0], k[:, 0]
    out, weights = MODULE(x, y, y)
    return out * gain[0] + weights.sum() + v.sum()


def _flex(q, k, v, gain):
    return flex_attention(q.sin(), k, v, lambda s, b, h, i, j: s * gain[h])


BLOCKS = {
    "gain": lambda q, k, v, gain: GAIN(q.sin(), k.cos(), v, gain=gain.exp()),
    "lse": lambda q, k, v, gain: GAIN(q.sin(), k, v.cos(), gain=gain, return_lse=True)[1] + v.sum(),
    "dropout": lambda q, k, v, gain: DROPPED(q.sin(), k, v, gain=gain.exp()),
    "sdpa": lambda q, k, v, gain: scaled_dot_product_attention(
        q.sin(), k, v, dropout_p=0.3, is_causal=True
    ) * gain[:, None, None],
    "flex": _flex,
    "module": _module,
}  # fmt: skip


def _saves(*operators):
    """A policy that saves what ``operators`` give, and computes all else again."""

    def policy(context, operator, *args, **kwargs):
        kept = operator in operators
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


ATEN = torch.ops.aten
WAYS = {
    "reentrant": (2, {"use_reentrant": True}),
    "not reentrant": (2, {"use_reentrant": False}),
    "attention saved": (
        1, {"use_reentrant": False, "context_fn": _saves(torch.ops.attndsl.forward.default)},
    ),
    # The products within the backend are no operations of the model.
    "products saved": (
        2, {"use_reentrant": False, "context_fn": _saves(ATEN.mm.default, ATEN.bmm.default)},
    ),
}  # fmt: skip


@pytest.fixture
def forwards(monkeypatch):
    """One element for each forward of the CPU backend."""
    runs = []
    real = CPUBackend.forward

    def counted(self, lowered, call):
        runs.append(1)
        return real(self, lowered, call)

    monkeypatch.setattr(CPUBackend, "forward", counted)
    # Calls that are known have the method that was there before.
    CACHES.invalidate(Reason.KERNELS)
    yield runs
    CACHES.invalidate(Reason.KERNELS)


def _gradients(block, leaves, run):
    torch.manual_seed(3)
    for leaf in leaves:
        leaf.grad = None
    MODULE.zero_grad()
    run(block, *leaves).sin().sum().backward()
    return [x.grad for x in (*leaves, *MODULE.parameters())]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_are_the_same_bits(forwards, name, way):
    wanted_forwards, options = WAYS[way]
    leaves = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(2, requires_grad=True))
    wanted = _gradients(BLOCKS[name], leaves, lambda block, *inputs: block(*inputs))
    forwards.clear()
    found = _gradients(BLOCKS[name], leaves, partial(checkpoint, **options))
    for one, other in zip(found, wanted, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert len(forwards) == wanted_forwards


@pytest.mark.parametrize(
    "way", [pytest.param("not reentrant", marks=pytest.mark.slow), "attention saved"]
)
def test_in_a_graph(graphs, way):
    """torch.compile partitions by the same policy."""
    _, options = WAYS[way]
    leaves = [torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(2, requires_grad=True))

    compiled = graphs(lambda *inputs: checkpoint(BLOCKS["gain"], *inputs, **options))
    found, wanted = (
        torch.autograd.grad(f(*leaves).sin().sum(), leaves) for f in (compiled, BLOCKS["gain"])
    )
    torch.testing.assert_close(found, wanted)


def _along(q, k, v, gain):
    """Tangents by ``torch.func``, along ``q`` and ``gain``."""
    moved = torch.ones_like(q), torch.ones_like(gain)
    return torch.func.jvp(lambda q, gain: GAIN(q, k, v, gain=gain), (q, gain), moved)[1]


def _dual(q, k, v, gain):
    with forward_ad.dual_level():
        out = GAIN(forward_ad.make_dual(q, torch.ones_like(q)), k, v, gain=gain)
        return forward_ad.unpack_dual(out).tangent


def _gradient(q, k, v, gain):
    return torch.autograd.grad(GAIN(q, k, v, gain=gain).sin().sum(), q, create_graph=True)[0]


def _second(q, k, v, gain):
    return torch.autograd.grad(_gradient(q, k, v, gain).sin().sum(), gain, create_graph=True)[0]


def _mapped(q, k, v, gain):
    return torch.vmap(_along, in_dims=(0, 0, 0, None))(q[:, None], k[:, None], v[:, None], gain)


DERIVATIVES = {
    "torch.func": _along, "dual": _dual, "gradient": _gradient, "second": _second, "vmap": _mapped
}  # fmt: skip


def _kept_elsewhere(block, *inputs):
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return block(*inputs)


@pytest.mark.parametrize(
    "run", [partial(checkpoint, use_reentrant=False), _kept_elsewhere], ids=["checkpoint", "hooks"]
)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_under_hooks(name, run):
    leaves = [torch.randn(2, 2, 5, 4, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(2, requires_grad=True))
    plain = DERIVATIVES[name](*leaves)
    under = run(DERIVATIVES[name], *leaves)
    torch.testing.assert_close(under, plain)
    found, wanted = (torch.autograd.grad(out.sin().sum(), leaves) for out in (under, plain))
    torch.testing.assert_close(found, wanted)


def test_hooks_are_there_again_in_their_order():
    seen = []

    def hooks(name):
        return torch.autograd.graph.saved_tensors_hooks(
            lambda x: (seen.append(name), x)[1], lambda x: x
        )

    x = torch.randn(2, requires_grad=True)
    with hooks("outer"):
        with hooks("inner"):
            with pytest.raises(ZeroDivisionError):
                vjp.pulled(lambda x: 1 / 0, (x,), (x,))
            assert not seen
            x.sin()
        x.sin()
    x.sin()
    assert seen == ["inner", "outer"]


def test_a_checkpoint_keeps_its_inputs_alone():
    kept = []

    def pack(x):
        kept.append(x)
        return x

    x = torch.randn(2, 5, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        MODULE(x, x, x)
        without = len(kept)
        kept.clear()
        checkpoint(lambda x: MODULE(x, x, x)[0], x, use_reentrant=False)
    assert without > 5
    assert all(each is x for each in kept)
