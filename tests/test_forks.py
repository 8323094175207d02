"""Forks while other threads compile."""

from __future__ import annotations

import subprocess
import sys

import pytest

_FORK = """
import os, signal, threading
from attndsl import ir

begun, go = threading.Event(), threading.Event()

def hold():
    with ir._intern_lock:
        begun.set()
        go.wait()

threading.Thread(target=hold, daemon=True).start()
begun.wait()
child = os.fork()
if child == 0:
    signal.alarm(20)
    ir.const(12345)
    os._exit(7)
go.set()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ir.const(12345).value)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there are no forks")
def test_a_child_compiles_whatever_other_threads_did() -> None:
    command = [sys.executable, "-c", _FORK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "7 12345\n", done.stderr
