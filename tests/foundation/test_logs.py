"""The log says what is compiled, what is cached, and which kernels run."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time

import pytest
import torch
from support.fork_server import run_python

import attndsl
from attndsl.backends.triton import tiles
from attndsl.foundation import logs
from attndsl.foundation.caches import CACHES, Reason
from attndsl.runtime.program_store import compiled_program

CONFIGS = tiles.INTERPRETED
TEXT = "tensor doc[batch, kv_len]: int\nmask = q >= kv and doc[b, q] == doc[b, kv]"


@pytest.fixture
def told(caplog):
    """``told(level, action)``: messages of the log, as a fresh process would have them."""

    def listen(level, action):
        logs.tell_once.cache_clear()
        compiled_program.cache_clear()
        caplog.clear()
        with caplog.at_level(level, "attndsl"):
            action()
        return [record.getMessage() for record in caplog.records if record.name == "attndsl"]

    return listen


def _call(attention, **captures):
    q = torch.randn(1, 2, 16, 8, requires_grad=True)
    attention(q, q, q, **captures).sum().backward()


def test_backends_are_told_once_a_signature(told):
    def calls():
        attention = attndsl.compile("causal()", name="layer")
        for _ in range(3):
            _call(attention)
        q = torch.randn(1, 1, 4, 8, dtype=torch.float64)
        attention(q, q, q)

    assert told(logging.INFO, calls) == [
        "layer: q (1, 2, 16, 8), 16 keys, float32 on cpu: backend cpu, the default for cpu tensors",
        "layer: q (1, 1, 4, 8), 4 keys, float64 on cpu: backend cpu, the default for cpu tensors",
    ]
    assert told(logging.WARNING, calls) == []


def test_graphs_are_told_of_too(told):
    attention = attndsl.compile("causal() and q - kv < 3", name="in a graph")
    function = torch.compile(attention, backend="aot_eager", fullgraph=True)
    q = torch.randn(1, 2, 16, 8)
    function(q, q, q)
    (said,) = told(logging.INFO, lambda: [function(q, q, q) for _ in range(3)])
    assert said.startswith("in a graph: q (1, 2, 16, 8), 16 keys, float32 on cpu: backend cpu")
    torch._dynamo.reset()


def test_families_and_their_objections_are_told(told, own_cache):
    doc = torch.arange(16)[None] // 6
    attention = attndsl.compile(TEXT, name="packed", backend="short")
    said = told(logging.INFO, lambda: _call(attention, doc=doc))
    assert "packed: forward by short kernels" in said
    assert "packed: backward by short kernels" in said
    attention = attndsl.compile(TEXT, name="packed", backend="short")
    long = torch.randn(1, 1, 1100, 8)
    doc = torch.arange(1100)[None] // 300
    said = told(logging.INFO, lambda: attention(long, long, long, doc=doc))
    (line,) = (line for line in said if "forward by" in line)
    assert re.fullmatch("packed: forward by triton kernels; no short kernels: .*keys.*", line)
    (line,) = (line for line in said if "tiles by lists" in line)
    assert "doc" in line


def test_the_cache_is_told_of(told, own_cache):
    def compiled():
        return attndsl.compile("causal() and kv < 5", backend="triton")

    def keys(said, found):
        return [line.split()[2] for line in said if line.startswith(f"cache: {found} ")]

    begin = time.perf_counter()
    first = told(logging.DEBUG, lambda: _call(compiled()))
    spent = (time.perf_counter() - begin) * 1e3
    assert len(keys(first, "no")) >= 4
    assert keys(first, "found") == []
    (line,) = (line for line in first if line.startswith("compiled program "))
    assert 0 < float(line.partition(" in ")[2].split()[0]) < spent
    CACHES.invalidate(Reason.BACKENDS)
    again = told(logging.DEBUG, lambda: _call(compiled()))
    assert keys(again, "no") == []
    assert set(keys(again, "found")) == set(keys(first, "no"))
    assert not any(line.startswith("compiled program ") for line in again)


def test_nothing_is_formatted_while_the_log_is_off(monkeypatch):
    def never(*_):
        raise AssertionError("formatted")

    monkeypatch.setattr("attndsl.call.dispatch.tell_once", never)
    monkeypatch.setattr("attndsl.runtime.program_store.short_form", never)
    monkeypatch.setattr("attndsl.backends.engine.backend.tell_once", never)
    assert not logs.LOG.isEnabledFor(logging.INFO)
    for backend in ("cpu", "triton"):
        _call(attndsl.compile("causal() and kv < 6", backend=backend))


PROGRAM = """
import attndsl, torch
q = torch.zeros(1, 1, 4, 8)
attndsl.compile("causal()", name="layer")(q, q, q)
"""


def _printed(value, program=PROGRAM):
    environment = {**os.environ, "ATTNDSL_CACHE": "0", "ATTNDSL_LOG": value}
    done = run_python(program, env=environment)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr.splitlines()


def test_the_environment_prints_the_log():
    line = r"attndsl \d\d:\d\d:\d\d\.\d\d\d {} {}"
    said = _printed("Debug")
    assert re.fullmatch(line.format("INFO   ", r"layer: .*backend cpu.*"), said[-1])
    assert re.fullmatch(line.format("DEBUG  ", "cache: no .*"), said[0])
    # Who prints the log already does so alone.
    own = f"import logging\nlogging.basicConfig(format='own %(message)s')\n{PROGRAM}"
    (said,) = _printed("info", own)
    assert said.startswith("own layer: ")
    (said,) = _printed("loud\x1b[31m", "import attndsl")
    assert re.fullmatch(
        line.format("WARNING", r"ATTNDSL_LOG is 'loud\\x1b\[31m': write info, debug or off"), said
    )


@pytest.mark.parametrize("value", [None, "", "0", "off", " Off "])
def test_the_environment_may_say_no(value, monkeypatch):
    monkeypatch.delenv("ATTNDSL_LOG", raising=False)
    if value is not None:
        monkeypatch.setenv("ATTNDSL_LOG", value)
    before = list(logs.LOG.handlers)
    logs.set_up()
    assert logs.LOG.handlers == before


def test_the_package_stays_light():
    code = (
        "import sys, attndsl\n"
        "early = {'logging', 'pathlib', 'attndsl.foundation.logs'} & set(sys.modules)\n"
        "assert not early, early\n"
    )
    command = [sys.executable, "-S", "-P", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"]
    environment = {k: v for k, v in os.environ.items() if k != "ATTNDSL_LOG"}
    subprocess.run(command, env=environment, check=True, timeout=60)
