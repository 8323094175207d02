"""Errors of Triton's compiler, as a user is told of them."""

from __future__ import annotations

import ast
import os
from typing import TYPE_CHECKING

import pytest
from support.fork_server import run_script
from triton import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

import attndsl
from attndsl.backends.kernels.compile_failures import reason_of

if TYPE_CHECKING:
    from pathlib import Path


def _compilation_error(words: str | None, cause: BaseException | None = None) -> CompilationError:
    error = CompilationError("x = 1\ny = 2", ast.parse("x = 1\ny = 2").body[1], words)
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (_compilation_error("no such\nname"), "name"),
        (_compilation_error(None), "CompilationError"),
        (
            _compilation_error("", _compilation_error(None, TypeError("an int\n\nhas none\n"))),
            "TypeError: has none",
        ),
        (
            PTXASError("an error\nstderr:\nptxas fatal : (C7600) 32\n\nRepro command: ptxas"),
            "PTXASError: ptxas fatal : (C7600) 32",
        ),
        (
            OutOfResources(300, 200, "shared memory"),
            "OutOfResources: out of resource: shared memory, Required: 300, Hardware limit: 200. "
            "Reducing block sizes or `num_stages` may help.",
        ),
        (RuntimeError("PassManager::run failed"), "RuntimeError: PassManager::run failed"),
    ],
    ids=["words", "no words", "causes", "ptxas", "resources", "pass"],
)  # fmt: skip
def test_the_reason_is_the_last_line_of_the_first_cause(error: Exception, reason: str) -> None:
    assert reason_of(error) == reason


def test_a_text_that_does_not_compile_is_told_of_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    text = attndsl.compile("score = score + 0.5 * (q - kv)").source(backend="triton")
    line = "return score + 0.5 * (q - kv).to(tl.float32)"
    wrong = f"{line}.to(tl.int77)"
    assert text.count(line) == 1
    path.write_text(text.replace(line, wrong), "utf-8")
    number = path.read_text("utf-8").split("\n").index(f"    {wrong}") + 1
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = run_script(path, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    message = done.stderr.strip()
    assert message.startswith("Triton cannot compile attention_forward of ")
    first = message.splitlines()[0]
    assert f"{path}:{number}, at '{wrong}': AttributeError(" in first
    assert first.endswith("has no attribute 'int77'\")")
    assert "hint: report this with the program" in message
