"""The command, run in an empty folder."""

from __future__ import annotations

import sys
from typing import NamedTuple

import pytest

from attndsl import cli


class Done(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def attndsl(monkeypatch, capsys, tmp_path):
    """``attndsl(*arguments)``."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["attndsl", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return Done(code or 0, *capsys.readouterr())

    return call


@pytest.fixture
def tree(tmp_path):
    """``tree({"conf/a.attn": text})`` writes files."""

    def make(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")

    return make
