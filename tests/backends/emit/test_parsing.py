"""Texts are parsed while other threads parse: Python 3.11 says of some that it lost count."""

from __future__ import annotations

import ast
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from attndsl.backends.emit.parsing import parsing
from attndsl.backends.kernels.compile import compile_kernel
from attndsl.backends.kernels.config import Config
from attndsl.backends.kernels.target import machine_of

SAID = "AST constructor recursion depth mismatch (before=66, after=134)"


def failing(times, error):
    """A call that fails for some ``times``, and a list of its calls."""
    calls = []

    def call():
        calls.append(None)
        if len(calls) <= times:
            raise error
        return "parsed"

    return call, calls


def wrapped():
    try:
        raise SystemError(SAID)
    except SystemError as error:
        try:
            raise ValueError("at 19:4") from error
        except ValueError as outer:
            return outer


@pytest.mark.parametrize("error", [SystemError(SAID), wrapped()])
def test_a_text_is_parsed_again(error):
    call, calls = failing(3, error)
    assert parsing(call) == "parsed"
    assert len(calls) == 4


@pytest.mark.parametrize("error", [SystemError("another"), SyntaxError("(")])
def test_other_errors_are_raised_at_once(error):
    call, calls = failing(1, error)
    with pytest.raises(type(error)):
        parsing(call)
    assert len(calls) == 1


def test_whoever_never_parses_is_told():
    call, calls = failing(1000, SystemError(SAID))
    with pytest.raises(SystemError, match="mismatch"):
        parsing(call)
    assert len(calls) == 20


class Cycle:
    """Garbage whose finalizer is Python, so that other threads run while it is collected."""

    def __init__(self):
        self.own = self

    def __del__(self):
        sum(range(50))


def test_threads_that_parse_at_the_same_time():
    """Python 3.11 fails here without a second try: 38 of 600 times, in one run."""
    text = Path(ast.__file__).read_text("utf-8")
    found, interval = [], sys.getswitchinterval()

    def deep(depth):
        if depth:
            return deep(depth - 1)
        _ = [Cycle() for _ in range(200)]
        return len(parsing(partial(ast.parse, text)).body)

    def work(depth):
        found.extend(deep(depth) for _ in range(20))

    threads = [threading.Thread(target=work, args=(20 * i,)) for i in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [len(ast.parse(text).body)] * 80


def test_kernels_are_compiled_again(monkeypatch):
    call, calls = failing(1, SystemError(SAID))
    source = SimpleNamespace(join=lambda: None)
    monkeypatch.setattr("attndsl.backends.kernels.compile._source", lambda *_: source)
    monkeypatch.setattr("triton.compile", lambda *_, **named: call())
    machine = machine_of("cuda:90")
    with pytest.raises(AttributeError, match="metadata"):  # A text is no kernel.
        compile_kernel(None, (), Config(64, 64, 4, 2), machine.target, 1)
    assert len(calls) == 2
