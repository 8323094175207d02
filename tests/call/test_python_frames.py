"""Python frames of an eager call that is like the one before: they are most of its host time."""

from __future__ import annotations

import sys

import pytest
import torch
from support.hopper_launches import backend_of, call_of, remembering

import attndsl
from attndsl.call.guarded_launch import Differences, GuardedLaunch
from attndsl.pipeline import lower
from attndsl.source import Source

FRAMES = {"forward": 10, "recorded": 14, "backward": 20, "step": 11}
"""Most frames of a call on Hopper, in Python 3.11. Without a GPU a backward launches three kernels,
and no graph of them."""


def frames_of(run):
    """Names of the functions of Python that ``run`` calls, in order."""
    found = []

    def see(frame, event, argument):
        if event == "call":
            found.append(frame.f_code.co_qualname if hasattr(frame.f_code, "co_qualname") else "")

    for _ in range(20):  # Tensor maps are made for each address of a result.
        run()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found[1:]


def prepared(monkeypatch, learned, given):
    """A launch on Hopper whose C functions only remember, and its operands."""
    remembering(monkeypatch)
    backend, lowered = backend_of(monkeypatch), lower(Source("causal()"), {})
    operands = tuple(torch.randn(2, 4, 64, 64, dtype=torch.bfloat16) for _ in range(3))
    operands = tuple(x.requires_grad_(learned) for x in operands)
    call = call_of(*operands)._replace(q_offset=given.get("q_offset", 0))
    return GuardedLaunch(backend, lowered, call, given, given, Differences(steps=True)), operands


@pytest.mark.parametrize("way", ["forward", "step"])
def test_a_forward_calls_few_functions(monkeypatch, way):
    given = {"q_offset": 3} if way == "step" else {}
    launch, operands = prepared(monkeypatch, False, given)
    found = frames_of(lambda: launch(operands, given, given))
    assert 5 < len(found) <= FRAMES[way], found


def test_a_node_of_autograd_calls_few_functions(monkeypatch):
    launch, operands = prepared(monkeypatch, True, {})
    out = launch(operands, {}, {})
    grad = torch.randn_like(out)
    found = frames_of(lambda: launch(operands, {}, {}))
    assert 5 < len(found) <= FRAMES["recorded"], found
    saved = out.grad_fn.saved_tensors
    with torch.no_grad():
        found = frames_of(lambda: launch.gradients((True,) * 3, saved, grad, None))
    assert 5 < len(found) <= FRAMES["backward"], found


def test_a_call_goes_straight_to_its_launch():
    """Nothing is looked up before."""
    attention = attndsl.compile("causal()", backend="triton")
    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    for _ in range(3):
        attention(q, k, v)
    found = frames_of(lambda: attention(q, k, v))
    place = next(i for i, name in enumerate(found) if name.endswith("GuardedLaunch.__call__"))
    assert place <= 2, found[: place + 1]
