"""Where the command's output goes: full devices, closed pipes, encodings without some letters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
LETTERS = "# né\nmask = q  >= kv\n"
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full or /proc")


@pytest.fixture
def run(tmp_path):
    """``run(*arguments, **options)``: the command's process, in an empty folder, when it ended."""

    def done(*arguments, stdout=subprocess.PIPE, unbuffered=False, **environment):
        environment = {**os.environ, **environment, "PYTHONUNBUFFERED": "1" * unbuffered}
        return subprocess.run(
            [sys.executable, "-P", "-m", "attndsl", *map(str, arguments)],
            stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, env=environment,
            cwd=tmp_path, timeout=100, check=False,
        )  # fmt: skip

    return done


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "a.attn"
    path.write_text(LETTERS, "utf-8")
    return path.name


@on_linux
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    "arguments", [("check",), ("fmt", "--diff"), ("show", "--stage", "ir"), ("--help",)]
)
def test_full_devices(run, program, arguments, unbuffered):
    with FULL.open("wb") as full:
        done = run(*arguments, program, stdout=full, unbuffered=unbuffered)
    assert done.stderr == b"cannot write the output: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("unbuffered", [False, True])
def test_readers_that_have_gone(run, program, unbuffered):
    read, write = os.pipe()
    os.close(read)
    done = run("show", program, "--stage", "json", stdout=write, unbuffered=unbuffered)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_letters_that_the_output_lacks_are_escaped(run, tmp_path):
    (tmp_path / "bad.attn").write_text("mask = q >= kvé", "utf-8")
    done = run("check", "bad.attn", PYTHONIOENCODING="ascii")
    assert done.stdout.startswith(b"bad.attn:1:15: '\\xe9' is not part of the language")
    assert (done.returncode, done.stderr) == (1, b"")


@on_linux
def test_programs_are_written_as_they_are_or_not(run, program):
    read, write = os.pipe()
    os.write(write, LETTERS.encode())
    os.close(write)
    done = run("fmt", f"/proc/{os.getpid()}/fd/{read}", PYTHONIOENCODING="ascii")
    os.close(read)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"in ascii, which has no '\\xe9'\n  hint: set PYTHONIOENCODING=utf-8\n" in done.stderr
    done = run("fmt", "--diff", program, PYTHONIOENCODING="ascii")
    assert b"n\\xe9\n-mask = q  >= kv\n+mask = q >= kv\n" in done.stdout
