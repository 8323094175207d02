"""The hooks for pre-commit: what it would run, run as commands."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from support.fork_server import COMMAND, run_python

HOOKS = {
    hook["id"]: hook
    for hook in yaml.safe_load((Path(__file__).parents[1] / ".pre-commit-hooks.yaml").read_text())
}
CONFIG = "model: {attention: {a: causal(), b: {program: 'causl()'}}}\n"


@pytest.fixture
def run(tmp_path):
    """``run(id, *arguments)``: the hook's command, run in a folder of its own."""

    def done(hook, *arguments):
        program, *entry = shlex.split(HOOKS[hook]["entry"])
        assert program == "attndsl"
        return run_python(COMMAND, *entry, *arguments, cwd=tmp_path)

    return done


def test_hooks_are_of_the_form_that_pre_commit_reads():
    assert list(HOOKS) == ["attndsl-check", "attndsl-fmt"]
    for hook in HOOKS.values():
        assert {"id", "name", "entry", "language"} <= set(hook)
        assert hook["language"] == "system"
        assert re.search(hook["files"], "layers/local.attn")
        assert not re.search(hook["files"], "conf/train.yaml")


def test_check(run, tmp_path):
    (tmp_path / "good.attn").write_text("causal()\n")
    (tmp_path / "bad.attn").write_text("causl()\n")
    assert run("attndsl-check", "good.attn").returncode == 0
    done = run("attndsl-check", "good.attn", "bad.attn")
    assert done.returncode == 1
    assert done.stdout.startswith("bad.attn:1:1: there is no function 'causl'")
    (tmp_path / "train.yaml").write_text(CONFIG)
    done = run("attndsl-check", "--key", "model.attention", "train.yaml", "good.attn")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "3 programs: 1 error")


def test_fmt(run, tmp_path):
    (tmp_path / "a.attn").write_text("mask=q>=kv")
    assert run("attndsl-fmt", "a.attn").stdout == "reformatted a.attn\n"
    assert (tmp_path / "a.attn").read_text() == "mask = q >= kv\n"
    assert run("attndsl-fmt", "a.attn").stdout == ""
