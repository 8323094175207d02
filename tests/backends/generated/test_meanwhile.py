"""Calls by other kernels while the best ones are compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import attndsl
from attndsl.backends.base import Backward, Call, Signature, Wants
from attndsl.backends.generated.backend import GeneratedBackend
from attndsl.backends.generated.meanwhile import Meanwhile
from attndsl.backends.triton.family import Portable
from attndsl.runtime.cache import KernelCache

LOWERED = attndsl.compile("causal()").lowered
GAIN = attndsl.compile("tensor gain[heads]: float; mask = causal(); score = gain[h] * score")


class Slow(Portable):
    """Portable kernels by another name, which are said to take long."""

    name = "slow"
    kernels = tuple(replace(kernel, family="slow") for kernel in Portable.kernels)
    compiles_long = True

    def __init__(self):
        self.ran = []

    def forward(self, layout, lowered, call):
        self.ran.append("forward")
        return super().forward(layout, lowered, call)

    def backward(self, layout, lowered, call, backward):
        self.ran.append("backward")
        return super().backward(layout, lowered, call, backward)


class Compiler:
    """In place of what compiles: says what was begun, and is done when a test says so."""

    def __init__(self, backend, monkeypatch):
        self.begun, self.done = [], False
        real = backend.modules.start

        def start(jobs, *rest):
            if jobs[0].kernel.family == "slow":
                self.begun.append(jobs[0].kernel.name)
            return real(jobs, *rest)

        monkeypatch.setattr(backend.modules, "start", start)
        monkeypatch.setattr(backend.modules, "is_compiled", lambda places: self.done)


@pytest.fixture
def taken_over():
    return []


@pytest.fixture
def store(tmp_path):
    return KernelCache(tmp_path)


@pytest.fixture
def backend(store, taken_over):
    meanwhile = Meanwhile(lambda: taken_over.append(None))
    return GeneratedBackend("auto", (Slow(), Portable()), store, meanwhile=meanwhile)


@pytest.fixture
def compiler(backend, monkeypatch):
    return Compiler(backend, monkeypatch)


def call_of(device, length=20, **options):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, length, 16, device=device)
    sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": length, "kv_len": length}
    return Call(q, k, v, 0.25, {**sizes, "head_dim": 16}, **options)


def is_right(found, call):
    wanted = attndsl.compile("causal()", backend="reference")(call.q, call.k, call.v, scale=0.25)
    torch.testing.assert_close(found[0], wanted, atol=2e-3, rtol=2e-3)


def test_kernels_take_over_once_they_are_there(backend, compiler, taken_over, device):
    call, (slow, _) = call_of(device), backend.families
    is_right(backend.forward(LOWERED, call), call)
    assert not compiler.begun, "a script of one call compiles none of them"
    for _ in range(3):
        is_right(backend.forward(LOWERED, call), call)
    assert compiler.begun == ["forward"]
    assert not slow.ran
    compiler.done = True
    assert not taken_over
    for _ in range(2):
        is_right(backend.forward(LOWERED, call), call)
    assert slow.ran == ["forward"] * 2
    assert len(taken_over) == 1


def test_backwards_wait_for_nothing_either(backend, compiler, taken_over, device):
    call, (slow, _) = call_of(device), backend.families
    out, lse = backend.forward(LOWERED, call)
    backward = Backward(out, lse, torch.ones_like(out), None, Wants())
    found = [backend.backward(LOWERED, call, backward) for _ in range(2)]
    compiler.done = True
    found.append(backend.backward(LOWERED, call, backward))
    assert slow.ran == ["backward"]
    assert compiler.begun[-1] != "forward"
    operands = [x.clone().requires_grad_() for x in (call.q, call.k, call.v)]
    reference = attndsl.compile("causal()", backend="reference")
    wanted = torch.autograd.grad(reference(*operands, scale=0.25).sum(), operands)
    for each in found:
        torch.testing.assert_close((each.q, each.k, each.v), wanted, atol=2e-3, rtol=2e-3)


def test_kernels_that_are_there_are_used_at_once(backend, compiler, store, taken_over, device):
    waits = GeneratedBackend("auto", (Slow(), Portable()), store)
    call = call_of(device)
    waits.forward(LOWERED, call)
    is_right(backend.forward(LOWERED, call), call)
    assert backend.families[0].ran == ["forward"]
    assert not taken_over


def test_calls_of_other_lengths_find_what_was_compiled(backend, compiler, taken_over, device):
    slow = backend.families[0]
    short, long = call_of(device, 20), call_of(device, 40)
    for call in (short, long, short, long):
        backend.forward(LOWERED, call)
    compiler.done = True
    for call in (short, long, long):
        is_right(backend.forward(LOWERED, call), call)
    assert slow.ran == ["forward"] * 3
    assert len(taken_over) == 1


def test_who_waits_by_a_key_that_is_gone_is_forgotten(backend, compiler, device):
    """Graphs find out anew what runs their calls whenever kernels take over."""
    first, second = (call_of(device)._replace(signature=Signature("one")) for _ in range(2))
    for call in (first, second, second):
        backend.forward(LOWERED, call)
    assert len(backend._meanwhile._waiting) == 2
    compiler.done = True
    backend.forward(LOWERED, second)
    assert not backend._meanwhile._waiting


def test_bound_calls_are_bound_to_nothing_that_goes(backend, compiler, device):
    call, slow = call_of(device), backend.families[0]
    backend.forward(LOWERED, call)
    bound = backend.bound_forward(LOWERED, call)
    assert not compiler.begun, "to bind a call is no second call"
    bound((call.q, call.k, call.v))
    compiler.done = True
    is_right(bound((call.q, call.k, call.v)), call)
    assert slow.ran == ["forward"]


def test_what_waits(backend, compiler, monkeypatch, device):
    slow = backend.families[0]
    call = call_of(device, deterministic=True)
    is_right(backend.forward(LOWERED, call), call)
    assert slow.ran == ["forward"]
    monkeypatch.setattr("attndsl.backends.generated.meanwhile._is_captured", lambda: True)
    call = call_of(device)
    backend.forward(LOWERED, call)
    assert slow.ran == ["forward"] * 2


def test_gradients_of_captures_wait(backend, compiler, device):
    call = call_of(device, tensors={"gain": torch.tensor([0.5, 2.0], device=device)})
    out, lse = backend.forward(GAIN.lowered, call)
    wants = Wants(tensors=frozenset({"gain"}))
    found = backend.backward(
        GAIN.lowered, call, Backward(out, lse, torch.ones_like(out), None, wants)
    )
    assert backend.families[0].ran == ["backward"]
    assert found.tensors["gain"].shape == (2,)


def test_what_fails_to_compile_is_told_of(backend, compiler, monkeypatch, device):
    """Nothing falls back on other kernels for good."""
    call = call_of(device)
    for _ in range(2):
        backend.forward(LOWERED, call)
    compiler.done = True

    def fail(jobs, *_):
        raise RuntimeError(f"no {jobs[0].kernel.family} kernels")

    monkeypatch.setattr(backend.modules, "prepare", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no slow kernels"):
            backend.forward(LOWERED, call)


def test_a_setting_asks_for_it(monkeypatch):
    from attndsl.runtime import dispatch

    made = []
    monkeypatch.setattr(
        "attndsl.backends.generated.for_hopper.fastest_backend", lambda *x: made.append(x)
    )
    for value, asked in (("0", None), ("1", dispatch._other_kernels)):
        monkeypatch.setenv("ATTNDSL_QUICK_START", value)
        dispatch._fastest(False)
        assert made[-1][1] is asked


def test_the_log_says_what_runs_a_call(backend, compiler, device, caplog):
    with caplog.at_level("INFO", logger="attndsl"):
        backend.forward(LOWERED, call_of(device, 21))
    said = "forward by triton kernels until slow kernels are compiled"
    assert any(said in message for message in caplog.messages)
