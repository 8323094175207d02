"""Tile sizes are measured, chosen, and remembered."""

from __future__ import annotations

import pytest
import torch

import attndsl
from attndsl.backends.kernels import modules
from attndsl.backends.kernels.compile import Executable
from attndsl.backends.kernels.config import Config
from attndsl.call.dispatch import get_backend
from attndsl.errors import ArgumentError, UnsupportedError
from attndsl.foundation.caches import CACHES, Reason
from attndsl.runtime import tuning

CONFIGS = (Config(32, 32, 4, 1), Config(16, 16, 4, 1), Config(16, 32, 4, 1))
PROGRAM = "tensor gain[heads]: float\nmask = q >= kv\nscore = gain[h] * score"


def inputs(requires_grad=True):
    torch.manual_seed(0)
    tensors = [torch.randn(1, 2, 24, 16) for _ in range(3)]
    return [x.requires_grad_(requires_grad) for x in tensors], torch.ones(2)


def config_of(name):
    """The config that a call's kernel was built with last."""
    found = [
        executable.config
        for place, executable in get_backend("triton", False).modules._executables.items()
        if place[1] == name
    ]
    assert len(found) == 1
    return found[0]


def test_the_fastest_is_chosen_and_remembered(own_cache, monkeypatch):
    times = iter([3.0, 1.0, 2.0, 1.0, 2.0, 3.0, 2.0, 2.0, 0.5])
    monkeypatch.setattr(tuning, "milliseconds", lambda run, device: run() and next(times))
    attention, lines = attndsl.compile(PROGRAM, backend="triton"), []
    qkv, gain = inputs()
    expected = attndsl.compile(PROGRAM, backend="reference")(*qkv, gain=gain)
    found = attention.tune(*qkv, gain=gain, progress=lines.append)
    assert [m.kernel for m in found.measurements] == (
        ["forward"] * 3 + ["backward_kv"] * 3 + ["backward_q"] * 3
    )
    assert [m.chosen for m in found.measurements] == [
        False, True, False, True, False, False, False, False, True,
    ]  # fmt: skip
    assert len(lines) == 9
    assert str(found).count("<- chosen") == 3
    assert "16 x 16 tiles, 1 stages, 4 warps" in lines[1]
    names = ("forward", "backward_kv", "backward_q")
    chosen = dict(zip(names, (CONFIGS[1], CONFIGS[0], CONFIGS[2]), strict=True))
    for _ in range(2):
        out = attention(*qkv, gain=gain)
        out.sum().backward()
        torch.testing.assert_close(out, expected, atol=2e-3, rtol=2e-3)
        assert {name: config_of(name) for name in names} == chosen
        # Another process finds the choice on disk.
        CACHES.invalidate(Reason.BACKENDS)
        attention = attndsl.compile(PROGRAM, backend="triton")


def test_graphs_run_what_was_chosen(own_cache, monkeypatch):
    """They had a kernel before."""
    attention = attndsl.compile(PROGRAM, backend="triton")
    qkv, gain = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: attention(*x[:3], gain=x[3]), fullgraph=True, backend="aot_eager"
    )
    for _ in range(2):
        compiled(*qkv, gain).sum().backward()
    before = config_of("forward")
    times = iter([3.0, 1.0, 2.0] * 3)
    monkeypatch.setattr(tuning, "milliseconds", lambda run, device: run() and next(times))
    attention.tune(*qkv, gain=gain)
    chosen, launched = config_of("forward"), []
    assert chosen != before
    real = Executable.launch
    monkeypatch.setattr(
        Executable, "launch", lambda own, *x: launched.append(own.config) or real(own, *x)
    )
    compiled(*qkv, gain)
    assert launched == [chosen]


def test_without_gradients_the_forward_alone_is_tuned(own_cache):
    qkv, gain = inputs(requires_grad=False)
    found = attndsl.compile(PROGRAM, backend="triton").tune(*qkv, gain=gain)
    assert {m.kernel for m in found.measurements} == {"forward"}
    assert sum(m.chosen for m in found.measurements) == 1
    assert all(m.milliseconds > 0 for m in found.measurements)


def test_what_does_not_fit_is_said_and_loses_nothing(own_cache, monkeypatch):
    attention = attndsl.compile(PROGRAM, backend="triton")
    qkv, gain = inputs(requires_grad=False)
    before = attention(*qkv, gain=gain)
    build = modules.build

    def refuse(function, arguments, configs, *rest, **options):
        if configs[0] != CONFIGS[2]:
            raise modules.BackendError("too large")
        return build(function, arguments, configs, *rest, **options)

    monkeypatch.setattr(modules, "build", refuse)
    found = attention.tune(*qkv, gain=gain)
    assert [m.why for m in found.measurements] == ["too large", "too large", ""]
    assert "too large" in str(found)
    monkeypatch.setattr(modules, "build", lambda *rest, **options: refuse(None, None, CONFIGS))
    with pytest.raises(modules.BackendError, match="no config of forward fits: too large"):
        attention.tune(*qkv, gain=gain)
    monkeypatch.setattr(modules, "build", build)
    torch.testing.assert_close(attention(*qkv, gain=gain), before, atol=2e-3, rtol=2e-3)
    assert config_of("forward") == CONFIGS[2]


def test_an_interrupted_run_keeps_the_best_so_far(own_cache, monkeypatch):
    def times():
        yield from (1.0, 2.0)
        raise KeyboardInterrupt

    timer = times()
    monkeypatch.setattr(tuning, "milliseconds", lambda run, device: next(timer))
    attention = attndsl.compile(PROGRAM, backend="triton")
    qkv, gain = inputs(requires_grad=False)
    with pytest.raises(KeyboardInterrupt):
        attention.tune(*qkv, gain=gain)
    attention(*qkv, gain=gain)
    assert config_of("forward") == CONFIGS[0]

    def interrupted(*rest, **options):
        raise KeyboardInterrupt

    build = modules.build
    monkeypatch.setattr(modules, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attention.tune(*qkv, gain=gain)
    monkeypatch.setattr(modules, "build", build)
    CACHES.invalidate(Reason.BACKENDS)
    attndsl.compile(PROGRAM, backend="triton")(*qkv, gain=gain)
    assert config_of("forward") == CONFIGS[0]


def test_other_backends_have_nothing_to_tune():
    qkv, gain = inputs()
    for backend in ("reference", "cpu"):
        with pytest.raises(UnsupportedError, match=f"the {backend} backend has one way"):
            attndsl.compile(PROGRAM, backend=backend).tune(*qkv, gain=gain)
    with pytest.raises(ArgumentError, match="gain"):
        attndsl.compile(PROGRAM).tune(*qkv)


def test_times_are_medians():
    calls = []
    found = tuning.milliseconds(lambda: calls.append(None), torch.device("cpu"))
    assert 0 <= found < 10
    assert len(calls) >= 6
