"""Calls of graphs: exactly the launches that other calls have, and results of the same kind."""

from __future__ import annotations

import pytest
import torch
from support.hopper_launches import OTHERS, backend_of, call_of, tensors, without_addresses

from attndsl.backends.base import Backward, Wants
from attndsl.backends.hopper.bound_launch import BackwardLaunch, ForwardLaunch
from attndsl.backends.kernels.bound_calls import allocator
from attndsl.pipeline import lower
from attndsl.source import Source

PROGRAMS = {
    "plain": ("score", {}),
    "captures": (
        "tensor t[heads]: float\ntensor ends[batch]: int\nmask = kv % 64 < 60 or q < ends[b]\n"
        "score = score * t[h]",
        {"t": lambda: torch.rand(4), "ends": lambda: torch.tensor([50, 17], dtype=torch.int32)},
    ),
    "one tensor by two names": (
        "tensor x[heads]: float\ntensor y[heads]: float\nscore = score * x[h] + y[h]",
        {"x": lambda: torch.ones(4), "y": None},
    ),
}
BACKWARDS = {
    "all": (Wants(), False),
    "keys alone": (Wants(q=False), False),
    "of lse too": (Wants(), True),
    "wide": (Wants(wide=True), False),
}


def made(name, same):
    """A program and a call of it; with ``same`` some captures are one tensor."""
    text, captures = PROGRAMS[name]
    lowered = lower(Source(text), {})
    found = {key: make() for key, make in captures.items() if make is not None}
    for key, make in captures.items():
        if make is None:
            found[key] = found["x"] if same else torch.zeros(4)
    call = call_of(*tensors())._replace(tensors={key: found[key] for key in captures})
    return lowered, call


def added(monkeypatch, call):
    """Launchers take so many numbers more."""
    for name in ("forward", "backward_kv"):
        monkeypatch.setitem(OTHERS, name, OTHERS[name] + 2 * len(call.tensors))


def addresses(*more):
    return {x.data_ptr() for x in more if x is not None}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_forwards_are_launched_alike(functions, monkeypatch, name, persistent):
    lowered, first = made(name, same=True)
    added(monkeypatch, first)
    backend = backend_of(monkeypatch, persistent=persistent)
    bound = backend.bound_forward(lowered, first)
    assert type(bound) is ForwardLaunch
    assert not [x for x in bound.last.values if isinstance(x, torch.Tensor)]
    _, call = made(name, same=False)
    operands = [call.q, call.k, call.v, *call.tensors.values()]
    functions.launched.clear()
    out, lse = bound(operands)
    found = without_addresses(functions.launched, addresses(*operands))
    functions.launched.clear()
    wanted_out, wanted_lse = backend.forward(lowered, call)
    assert found == without_addresses(functions.launched, addresses(*operands))
    for one, other in ((out, wanted_out), (lse, wanted_lse)):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("asked", BACKWARDS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_backwards_are_launched_alike(functions, monkeypatch, name, asked):
    wanted, has_dlse = BACKWARDS[asked]
    lowered, first = made(name, same=True)
    added(monkeypatch, first)
    backend = backend_of(monkeypatch)

    def results(call):
        out, lse = backend.forward(lowered, call)
        return Backward(
            out, lse, torch.randn_like(out), torch.randn_like(lse[0]) if has_dlse else None, wanted
        )

    bound = backend.bound_backward(lowered, first, results(first))
    assert type(bound) is BackwardLaunch
    _, call = made(name, same=False)
    operands, given = [call.q, call.k, call.v, *call.tensors.values()], results(call)
    known = addresses(*operands, *given[:4])
    functions.launched.clear()
    found = bound(operands, given)
    launched = without_addresses(functions.launched, known)
    functions.launched.clear()
    other = backend.backward(lowered, call, given)
    assert launched == without_addresses(functions.launched, known)
    for one, two in zip(found[:3], other[:3], strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            assert (one.shape, one.stride(), one.dtype) == (two.shape, two.stride(), two.dtype)
    assert not found.tensors
    assert not found.params


def test_what_has_more_to_do_is_called_as_a_whole(functions, monkeypatch):
    """Backwards in turns, captures without elements, an output with room."""
    lowered, call = made("captures", same=False)
    added(monkeypatch, call)
    backend = backend_of(monkeypatch)
    out, lse = backend.forward(lowered, call)
    given = Backward(out, lse, out, None, Wants())
    turns = call._replace(deterministic=True)
    assert type(backend.bound_backward(lowered, turns, given)) is not BackwardLaunch
    with_room = call._replace(room=torch.empty_like(out))
    assert type(backend.bound_forward(lowered, with_room)) is not ForwardLaunch
    empty = lower(Source("tensor t[n]: float\nscore = score + t[q - kv]"), {})
    without = call._replace(tensors={"t": torch.zeros(0)}, sizes={**call.sizes, "n": 0})
    assert type(backend.bound_forward(empty, without)) is not ForwardLaunch


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_rooms_are_made_as_asked(kind):
    """Also where torch has no function of Inductor's for a kind of device."""
    found = allocator(kind)((2, 3), (1, 2), torch.bfloat16)
    assert (found.shape, found.stride(), found.dtype) == ((2, 3), (1, 2), torch.bfloat16)
    assert found.device.type == kind
