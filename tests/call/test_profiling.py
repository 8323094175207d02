"""Profiles say which program a call, its backward and its operators are of."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import profiler
from torch.utils.flop_counter import FlopCounterMode

import attndsl
from attndsl.call.profiling import name_of

TEXT = "# Gemma 2\nparam w: int = 8\nmask = causal() and q - kv < w\n"
SHORT = "mask = causal() and q - kv < w"

# With torch 2.11 the first profile of a process warns that others have events of their own.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")


def _events(action):
    """Names of the events of this package."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        action()
    return [event.name for event in found.events() if event.name.startswith("attndsl::")]


def _leaves():
    return [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_calls_and_backwards_have_events(backend):
    attention = attndsl.compile(TEXT, name="local", backend=backend)
    leaves = _leaves()
    assert _events(lambda: attention(*leaves).sum().backward()) == [
        "attndsl::local", "attndsl::local backward",
    ]  # fmt: skip
    with torch.no_grad():
        assert _events(lambda: attention(*leaves)) == ["attndsl::local"]
        out, lse = attention(*leaves, return_lse=True)
        assert _events(lambda: attention.backward(*leaves, out, lse, out)) == [
            "attndsl::local backward"
        ]


def test_what_runs_lies_within_the_events():
    attention = attndsl.compile(TEXT, name="local")
    leaves = _leaves()
    with torch.profiler.profile() as found:
        attention(*leaves).sum().backward()
    for name in ("attndsl::local", "attndsl::local backward"):
        (event,) = (each for each in found.events() if each.name == name)
        assert any(child.name.startswith("aten::") for child in event.cpu_children) or any(
            inner.name.startswith("aten::") for child in event.cpu_children
            for inner in child.cpu_children
        )  # fmt: skip


def test_transforms_and_higher_derivatives_have_events():
    attention = attndsl.compile(TEXT, name="local")
    q, k, v = _leaves()
    plain = [x.detach() for x in (q, k, v)]

    def tangents():
        torch.func.jvp(lambda q: attention(q, *plain[1:]), (plain[0],), (plain[0],))

    assert _events(tangents) == ["attndsl::local"]

    def twice():
        (first,) = torch.autograd.grad(attention(q, k, v).square().sum(), q, create_graph=True)
        first.sum().backward()

    assert set(_events(twice)) == {"attndsl::local", "attndsl::local backward"}


def test_an_event_ends_with_an_error():
    attention = attndsl.compile("param p: float\nweights = dropout(softmax(score), p)", name="d")
    leaves = _leaves()

    def wrong():
        with pytest.raises(attndsl.AttnDSLError):
            attention(*leaves, p=1.5)
        with torch.profiler.record_function("attndsl::behind"):
            pass

    with torch.profiler.profile() as found:
        wrong()
    behind = next(event for event in found.events() if event.name == "attndsl::behind")
    assert behind.cpu_parent is None


def test_operators_have_the_name_that_the_program_has_in_the_process():
    attention = attndsl.compile(TEXT, name="in a graph", w=4)
    leaves = _leaves()
    function = torch.compile(attention, backend="aot_eager", fullgraph=True)
    function(*leaves).sum().backward()

    def step():
        function(*leaves).sum().backward()

    assert _events(step) == [
        "attndsl::forward", "attndsl::in a graph",
        "attndsl::backward", "attndsl::in a graph backward",
    ]  # fmt: skip
    # Of two names, neither is right everywhere: they are one operator.
    attndsl.compile(TEXT, name="another", w=4)
    assert _events(step)[1] == f"attndsl::{SHORT}"
    for number in range(100):
        attndsl.compile(TEXT, name=f"l{number}", w=4)
    assert name_of(attention._spec) == SHORT
    torch._dynamo.reset()


def test_dispatch_modes_see_no_event_twice():
    attention = attndsl.compile(TEXT, name="counted", w=5)
    leaves = _leaves()
    with FlopCounterMode(display=False):
        found = _events(lambda: attention(*leaves).sum().backward())
    assert found.count("attndsl::counted") == 1
    assert found.count("attndsl::counted backward") == 1


def test_the_flag_of_the_profiler_is_what_it_is_taken_for():
    """It is private to torch. Without it events would be missing, or cost each call."""
    assert profiler._is_profiler_enabled is False
    with torch.profiler.profile():
        assert profiler._is_profiler_enabled is True
    assert profiler._is_profiler_enabled is False
    seen = []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1)
    with torch.profiler.profile(schedule=schedule) as found:
        for _ in range(3):
            seen.append(profiler._is_profiler_enabled)
            found.step()
    assert seen == [False, False, True]
    with profiler.emit_itt(enabled=False):
        assert profiler._is_profiler_enabled is False
