"""``benchmarks/start.py``: lanes, rows of what fails, and what is written when."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import pytest
from support.scripts import loader

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def start(monkeypatch):
    return loader(monkeypatch, FOLDER)("start")


def options(device="cuda"):
    return argparse.Namespace(device=device, runs=2, flex_runs=1, seconds=60.0)


@pytest.mark.parametrize("processors", [16, 64])
def test_systems_have_processors_of_their_own(start, monkeypatch, processors):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(processors)), raising=False)
    ours, theirs = start.lanes_of(options())
    assert (ours.system, ours.runs, theirs.system, theirs.runs) == ("attndsl", 2, "flex", 1)
    assert len(ours.processors) == len(theirs.processors) == processors // 2
    assert not set(ours.processors) & set(theirs.processors)
    code = start.code_of(start.PROGRAMS["causal"], "flex", "cuda", theirs.processors)
    assert f"os.sched_setaffinity(0, {list(theirs.processors)})" in code
    compile(code, "start", "exec")


def test_few_processors_are_not_shared(start, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert [lane.processors for lane in start.lanes_of(options())] == [(), ()]
    assert [lane.system for lane in start.lanes_of(options("cpu"))] == ["attndsl"]
    alone = argparse.Namespace(**{**vars(options()), "flex_runs": 0})
    assert [lane.system for lane in start.lanes_of(alone)] == ["attndsl"]


def test_what_fails_or_comes_too_late_says_why(start, monkeypatch):
    lane = start.Lane("attndsl", "cpu", 2, end=time.monotonic() - 1)
    rows = start.row("causal", lane)
    assert [row["cache"] for row in rows] == list(start.STATES)
    assert all(row["why"] == "no time was left" and "first_step_ms" not in row for row in rows)
    broken, lane = start.PROGRAMS["causal"], start.Lane("attndsl", "cpu", 1)
    monkeypatch.setitem(start.BODIES, "attndsl", "raise ValueError('of this test')\n")
    with pytest.raises(RuntimeError, match="ValueError: of this test"):
        start.measure(broken, lane, Path())
    monkeypatch.setattr(start, "PROCESS_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="no answer within"):
        start.measure(broken, lane, Path())


def test_rows_of_a_program_are_those_of_all_its_runs(start, monkeypatch):
    times = iter([30.0, 3.0, 10.0, 1.0])
    monkeypatch.setattr(start, "measure", lambda *_: {"first_step_ms": next(times)})
    cold, warm = start.row("causal", start.Lane("attndsl", "cpu", 2, (0, 1)))
    assert (cold["first_step_ms"], warm["first_step_ms"]) == (20.0, 2.0)
    assert cold["runs"] == cold["processors"] == 2


def test_a_run_on_a_cpu(start, monkeypatch, tmp_path, capsys):
    path = tmp_path / "start.json"
    arguments = ["--device", "cpu", "--programs", "causal", "--runs", "1", "--output", str(path)]
    monkeypatch.setattr("sys.argv", ["start.py", *arguments])
    assert start.main() == 0
    cold, warm = json.loads(path.read_text())["rows"]
    assert (cold["cache"], warm["cache"]) == ("cold", "warm")
    assert cold["first_step_ms"] > cold["first_output_ms"] > 0
    assert "causal" in capsys.readouterr().out
