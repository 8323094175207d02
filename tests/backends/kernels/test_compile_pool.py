"""Compilations side by side, on a machine that stands in for a GPU."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from support.fork_server import run_python
from triton.runtime.errors import OutOfResources

import attndsl
from attndsl.backends.base import Wants
from attndsl.backends.engine import backend as generated
from attndsl.backends.engine.backend import generated_backend
from attndsl.backends.kernels import compile as compiling
from attndsl.backends.kernels import compile_pool, modules
from attndsl.backends.kernels.compile_failures import KernelError
from attndsl.backends.kernels.compile_pool import Compilations, Turn
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.kernels.target import machine_of
from attndsl.backends.triton.captures import extra_tasks
from attndsl.errors import BackendError
from attndsl.runtime.program_store import default_cache

SECONDS = 20
"""More than any of these takes, and less than a test may."""
BY_DOCUMENTS = "tensor doc[batch, kv_len]: int\nmask = doc[b, q] == doc[b, kv]"


class Compiler:
    """Stands in for Triton's: each call waits until ``together`` of them run."""

    def __init__(self, together: int, spills: int = 0) -> None:
        self.barrier = threading.Barrier(together)
        self.spills = spills
        self.names: list[str] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self, function, arguments, config, target, shared):
        self.threads.add(threading.current_thread())
        self.names.append(function.__name__)
        self.barrier.wait(SECONDS)
        return SimpleNamespace(
            _init_handles=lambda: None, n_spills=self.spills, metadata_group={}, hash="",
            config=config,
        )  # fmt: skip


@pytest.fixture
def on_gpu(tmp_path, monkeypatch):
    """A backend that takes this machine for one with a GPU; call it with a compiler."""
    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(tmp_path))
    machine = machine_of("cuda:90")
    monkeypatch.setattr(compile_pool, "processors", lambda: 16)
    for module in (modules, generated):
        monkeypatch.setattr(module, "current_machine", lambda device: machine)

    def with_compiler(compiler):
        for module in (modules, compiling):
            monkeypatch.setattr(module, "compile_kernel", compiler)
        return generated_backend(("triton",), default_cache())

    return with_compiler


def call_of(text):
    lowered = attndsl.compile(text).lowered
    return lowered, example_call(lowered, 64, 64, torch.bfloat16, {})


def prepared(backend, text, task, wanted=None):
    lowered, call = call_of(text)
    grad_out = None if wanted is None else call.q
    (family,) = backend.families
    jobs = family.jobs(lowered, call, task, grad_out, wanted)
    fixed = () if wanted is None else family.fixed
    return backend.modules.prepare(jobs, fixed, call.q.device, False).executables


def test_kernels_of_a_backward(on_gpu):
    compiler = Compiler(together=3)
    found = prepared(on_gpu(compiler), "causal()", Task.BACKWARD, Wants())
    assert set(found) == {"backward_kv", "backward_q", "row_statistics"}
    assert len(compiler.threads) == 3


def test_a_backward_meanwhile(on_gpu):
    """The forward asks for its own kernel alone, and the others are there when they are needed."""
    compiler = Compiler(together=4)
    backend = on_gpu(compiler)
    backend.start(*call_of("causal()"), Wants())
    prepared(backend, "causal()", Task.FORWARD)
    prepared(backend, "causal()", Task.BACKWARD, Wants())
    assert len(compiler.names) == 4
    assert backend.kernels_built == 4


LEARNED = {
    "bias": ("tensor t[heads, q_len, kv_len]: float\nscore = score + t[h, q, kv]", 1),
    "distances": ("tensor t[heads, n]: float\nscore = score + t[h, q - kv]", 1),
    "gathered": ("tensor t[8, 8]: float\nscore = score * t[q % 8, kv % 8]", 1),
    "of weights": ("tensor t[8, 8]: float\nweights = sigmoid(score) * t[q % 8, kv % 8]", 2),
}
"""Programs, and how many kernels make the gradient of ``t`` beside those of q, k and v."""


@pytest.mark.parametrize("name", LEARNED)
def test_kernels_for_gradients_of_captures_meanwhile(on_gpu, name):
    """Forward, three of the backward and these are compiled together, and not again."""
    text, more = LEARNED[name]
    compiler = Compiler(together=4 + more)
    backend = on_gpu(compiler)
    lowered, call = call_of(text)
    wanted = Wants(tensors=frozenset({"t"}))
    backend.start(lowered, call, wanted)
    prepared(backend, text, Task.FORWARD)
    plan = backend._plan(lowered, call, wanted)
    prepared(backend, text, Task.BACKWARD, plan.lines)
    for task, own in extra_tasks(lowered, plan):
        jobs = backend.families[0].jobs(lowered, call, task, call.q, own)
        backend.modules.prepare(jobs, (), call.q.device, False)
    assert len(compiler.names) == 4 + more


def test_kernels_that_list_tiles(on_gpu):
    compiler = Compiler(together=5)
    backend = on_gpu(compiler)
    (forward,) = prepared(backend, BY_DOCUMENTS, Task.FORWARD).values()
    lowered, call = call_of(BY_DOCUMENTS)
    (job,) = backend.families[0].jobs(lowered, call, Task.FORWARD, None, None)
    backend.modules.tile_lists(job, forward.config, call.q.device)
    assert len(compiler.names) == 5


def test_programs_of_several_threads(on_gpu):
    compiler = Compiler(together=3)
    backend = on_gpu(compiler)
    texts = ("causal()", "softcap(score, 30.0)", "q - kv < 7")
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda text: prepared(backend, text, Task.FORWARD), texts))
    assert [set(each) for each in found] == [{"forward"}] * 3


def test_one_program_of_several_threads(on_gpu):
    compiler = Compiler(together=1)
    backend = on_gpu(compiler)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: prepared(backend, "causal()", Task.FORWARD), range(4)))
    assert len(compiler.names) == 1
    assert all(each["forward"] is found[0]["forward"] for each in found)


def test_at_most_two_attempts_in_a_row(on_gpu):
    compiler = Compiler(together=1, spills=1000)

    def compiled(function, arguments, config, target, shared):
        if compiler.names:
            compiler.barrier = others
        return compiler(function, arguments, config, target, shared)

    others = threading.Barrier(2)
    backend = on_gpu(compiled)
    (found,) = prepared(backend, "score = score + cos(q - kv)", Task.FORWARD).values()
    # All are as bad, and the first of such is kept.
    assert len(compiler.names) == 3
    lowered, call = call_of("score = score + cos(q - kv)")
    (job,) = backend.families[0].jobs(lowered, call, Task.FORWARD, None, None)
    machine = machine_of("cuda:90")
    assert found.config == job.kernel.configs(job.on(machine), machine)[0]
    assert not backend.modules._begun


def test_no_more_than_there_are_processors(monkeypatch):
    monkeypatch.setattr(compile_pool, "processors", lambda: 2)
    found, running, most = Compilations(), [], []
    lock = threading.Lock()

    def compiled():
        with lock:
            running.append(1)
            most.append(len(running))
        threading.Event().wait(0.05)
        with lock:
            running.pop()

    for place in range(6):
        found.begin(place, "a kernel", compiled)
    for place in range(6):
        found.take(place)
    assert max(most) == 2


def test_what_does_not_fit_costs_a_tile_size(on_gpu):
    asked = []

    def compiled(function, arguments, config, target, shared):
        asked.append(config)
        if len(asked) == 1:
            raise OutOfResources(300000, 232448, "shared memory")
        return Compiler(1)(function, arguments, config, target, shared)

    (found,) = prepared(on_gpu(compiled), "causal()", Task.FORWARD).values()
    assert found.config != asked[0]
    assert found.config in asked[1:]


def test_none_that_fits(on_gpu):
    def compiled(function, arguments, config, target, shared):
        raise OutOfResources(300000, 232448, "shared memory")

    with pytest.raises(BackendError, match="no tile size of this kernel fits"):
        prepared(on_gpu(compiled), "causal()", Task.FORWARD)


def test_no_other_tile_size_is_tried_of_a_text_that_does_not_compile(on_gpu):
    asked = []

    def compiled(function, arguments, config, target, shared):
        asked.append(config)
        raise KernelError("Triton cannot compile it")

    with pytest.raises(BackendError, match="Triton cannot compile it"):
        prepared(on_gpu(compiled), "causal()", Task.FORWARD)
    assert len(asked) == 1


def test_errors_are_those_of_the_compilation(on_gpu):
    def compiled(function, arguments, config, target, shared):
        raise ZeroDivisionError("in a thread")

    with pytest.raises(ZeroDivisionError, match="in a thread"):
        prepared(on_gpu(compiled), "causal()", Task.FORWARD)


def test_the_thread_that_compiles_a_kernel_has_its_launcher_made(on_gpu, monkeypatch):
    compiler, made = Compiler(together=1), []

    def launcher(source, metadata):
        made.append((threading.current_thread(), source, metadata))
        raise RuntimeError("whoever loads the kernel is told")

    def compiled(*arguments):
        kernel = compiler(*arguments)
        kernel.src, kernel.metadata = "source", "metadata"
        return kernel

    driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher))
    monkeypatch.setattr(compiling.triton.runtime, "driver", driver)
    found = prepared(on_gpu(compiled), "causal()", Task.FORWARD)
    assert found["forward"].kernel.src == "source"
    ((thread, *what),) = made
    assert what == ["source", "metadata"]
    assert compiler.threads == {thread}
    assert thread is not threading.current_thread()


class Read:
    """A kernel's text, as Triton reads it."""

    name = "forward"

    def make_ir(self, *given: object) -> object:
        return SimpleNamespace(get_tensordesc_metadata=lambda: ["descriptor"])


class InTurn(compiling._InTurn, Read):
    """One whose launcher is made meanwhile."""


@pytest.mark.parametrize(("old", "kind"), [(True, "cuda"), (True, "hip"), (False, "cuda")])
def test_old_tritons_make_a_launcher_while_they_lower_the_kernel(monkeypatch, old, kind):
    lowered, made = threading.Event(), []

    def launcher(source, metadata):
        assert lowered.wait(SECONDS)
        made.append((source, metadata.tensordesc_meta))
        raise AttributeError("more is not known")

    driver = SimpleNamespace(active=SimpleNamespace(launcher_cls=launcher))
    monkeypatch.setattr(compiling.triton.runtime, "driver", driver)
    monkeypatch.setattr(compiling, "HAS_LAUNCHERS", old)
    source = InTurn()
    assert source.make_ir(SimpleNamespace(backend=kind)).get_tensordesc_metadata()
    assert made == []
    lowered.set()
    source.join()
    assert made == ([(source, ["descriptor"])] if old and kind == "cuda" else [])


def test_without_threads_a_launcher_is_made_later(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(compiling, "HAS_LAUNCHERS", True)
    source = InTurn()
    assert source.make_ir(SimpleNamespace(backend="cuda")) is not None
    source.join()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_hears_of_long_ones(monkeypatch, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(compile_pool, "_QUIET", 0.02)
    monkeypatch.setattr(compile_pool, "_TICK", 0.01)
    done = threading.Event()
    found = Compilations()
    found.begin("place", "a kernel", lambda: done.wait(SECONDS))
    threading.Timer(0.3, done.set).start()
    assert found.take("place")
    text = stream.getvalue()
    assert ("attndsl: compiling 1 kernel, 0 s" in text) is terminal
    assert text.endswith("\r\033[K") is terminal
    assert not found.has("place")


def test_the_log_says_what_took_how_long(monkeypatch):
    said = []
    log = logging.getLogger("attndsl")
    monkeypatch.setattr(log, "info", lambda text, *values: said.append(text % values))
    found = Compilations()
    found.begin("place", "forward for cuda:90", lambda: 3)
    assert found.take("place") == 3
    assert said == [
        "compiling forward for cuda:90", "compiled forward for cuda:90 in 0.0 s",
    ]  # fmt: skip


def test_without_threads_the_caller_compiles(on_gpu, monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    compiler = Compiler(together=1)
    backend = on_gpu(compiler)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    prepared(backend, "causal()", Task.BACKWARD, Wants())
    assert compiler.threads == {threading.current_thread()}
    assert len(compiler.names) == 3


def test_what_is_dropped_is_nobodys():
    found, release = Compilations(), threading.Event()
    found.begin(("a", 1), "a kernel", lambda: release.wait(SECONDS))
    found.begin(("b", 1), "a kernel", lambda: 5)
    found.drop(lambda place: place[0] == "a")
    release.set()
    assert not found.has(("a", 1))
    assert found.take(("b", 1)) == 5


def test_one_at_a_time_has_the_turn():
    """Until it is over, which may be before the statement ends, and is whatever is raised."""
    seen, mine = [], Turn()

    def other():
        with Turn():
            seen.append("other")

    thread = threading.Thread(target=other)
    with mine:
        thread.start()
        thread.join(0.1)
        seen.append("first")
        mine.end()
        thread.join()
        seen.append("still here")
    assert seen == ["first", "other", "still here"]
    with pytest.raises(ValueError, match="nothing"), Turn():
        raise ValueError("nothing")
    other()
    assert seen[-1] == "other"


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_has_turns_of_its_own():
    """Its parent's thread, which had the turn, is not there to end it."""
    begun, over = threading.Event(), threading.Event()

    def parent():
        with Turn():
            begun.set()
            over.wait()

    thread = threading.Thread(target=parent)
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        with Turn():
            os._exit(0)
    deadline = time.monotonic() + 20
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.01)
    over.set()
    thread.join()
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert ended == (child, 0)


def test_threads_compile_what_one_alone_does(tmp_path):
    """The same PTX: for real, with another compiler's cache each."""
    code = f"""
import os, threading
from pathlib import Path
import torch, attndsl
from attndsl.backends.kernels.compile import compile_kernel, load_module
from attndsl.backends.kernels.example import example_call
from attndsl.backends.kernels.kernel import Task
from attndsl.backends.kernels.target import machine_of
from attndsl.backends.emit.template import IEEE
from attndsl.backends.triton.family import Portable

machine = machine_of("cuda:90")
work = []
for number, text in enumerate(("causal()", "score = 5 * tanh(score)")):
    lowered = attndsl.compile(text).lowered
    call = example_call(lowered, 16, 16, torch.bfloat16, {{}})
    (job,) = Portable().jobs(lowered, call, Task.FORWARD, None, None)
    job = job.on(machine)
    config = job.kernel.configs(job, machine)[-1]
    path = Path({str(tmp_path)!r}) / f"kernel_{{number}}.py"
    path.write_text(job.kernel.text(job, config, job.plan(config), IEEE))
    function = getattr(load_module(path, path.stem), job.kernel.entry)
    work.append((function, job.kernel.arguments(function, job.facts, config), config))

def compiled(folder, found, number):
    found[number] = compile_kernel(*work[number], machine.target, machine.shared).asm["ptx"]

alone, together = {{}}, {{}}
os.environ["TRITON_CACHE_DIR"] = {str(tmp_path / "together")!r}
threads = [threading.Thread(target=compiled, args=(None, together, n)) for n in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
os.environ["TRITON_CACHE_DIR"] = {str(tmp_path / "alone")!r}
for number in range(2): compiled(None, alone, number)
assert alone == together and len(alone) == 2
print("equal")
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    found = run_python(code, env=environment)
    assert found.stdout == "equal\n", found.stderr


@pytest.fixture
def started(monkeypatch):
    """What calls start: the gradients that may be wanted."""
    found = []
    monkeypatch.setattr(
        generated.GeneratedBackend, "start", lambda self, lowered, call, wants: found.append(wants)
    )
    return found


def test_calls_with_gradients_start_their_backward_once(started):
    attention = attndsl.compile(
        "tensor gain[heads]: float\nscore = gain[h] * score", backend="triton"
    )
    q, k, v = (torch.randn(1, 2, 16, 16) for _ in range(3))
    gain = torch.ones(2, requires_grad=True)
    q.requires_grad_()
    with torch.no_grad():
        attention(q, k, v, gain=gain)
    assert not started
    attention = attndsl.compile(
        "tensor gain[heads]: float\nscore = 2 * gain[h] * score", backend="triton"
    )
    for _ in range(2):
        attention(q, k, v, gain=gain)
    assert started == [Wants(True, False, False, frozenset({"gain"}))]


def test_what_a_backward_refuses_stops_no_forward(monkeypatch):
    def refuse(self, lowered, call, wants):
        raise BackendError("no such backward")

    monkeypatch.setattr(generated.GeneratedBackend, "start", refuse)
    q = torch.randn(1, 2, 16, 16, requires_grad=True)
    out = attndsl.compile("causal()", backend="triton")(q, q, q)
    assert out.shape == q.shape
