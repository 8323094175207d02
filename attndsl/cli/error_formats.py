"""The formats in which errors of programs are printed for other software."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from attndsl.config import SUFFIXES
from attndsl.errors import ConfigError, visible


class Format(StrEnum):
    """Formats in which ``attndsl check`` prints its findings."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    """Workflow commands, which GitHub shows beside the lines that they are about."""


def github_line(file: str, problem: dict[str, Any], level: str = "error") -> str:
    """A workflow command.

    The form and its escapes are those of GitHub's own toolkit, ``actions/core/src/command.ts``.

    Args:
        file: The file that was read.
        problem: As :func:`attndsl.cli.check_command.describe` gives it.
        level: ``error``, ``warning`` or ``notice``.
    """
    message = problem["message"]
    where = {"file": file}
    if problem["file"] != file and problem["file"].startswith(f"{file}:"):
        # The text is a string of JSON or TOML, whose lines are not lines of the file.
        message = f"{problem['file']}:{problem['line']}:{problem['column']}: {message}"
    elif problem["line"] is not None:
        where = {"file": problem["file"], "line": problem["line"]}
        # Columns within a program of a configuration are those of its own text.
        if problem["kind"] == ConfigError.__name__ or not file.lower().endswith(SUFFIXES):
            where["col"] = problem["column"]
    if problem["hint"]:
        message += f"\nhint: {problem['hint']}"
    told = ",".join(f"{name}={_property(str(value))}" for name, value in where.items())
    return f"::{level} {told}::{_data(message)}"


def _data(text: str) -> str:
    shown = "\n".join(map(visible, text.replace("\r", "\n").split("\n")))
    return shown.replace("%", "%25").replace("\n", "%0A")


def _property(text: str) -> str:
    return visible(text).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
