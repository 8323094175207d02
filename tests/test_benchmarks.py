"""What benchmarks compare is the same thing, and a row that fails costs itself alone."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import attndsl

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """``script(name)``: a benchmark as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


CASES = [
    "full", "causal", "causal_where", "window1024", "prefix1024", "documents1000",
    "neighbourhood128x6", "alibi", "softcap", "head_gain",
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_flex_attention_gets_the_same_program(script, case):
    attention = script("attention")
    assert list(attention.CASES) == CASES
    heads, length = 2, 2100
    q, k, v = (torch.randn(1, heads, length, 4) for _ in range(3))
    doc, gain = torch.arange(length) // 1000, torch.randn(heads)
    score, mask = attention.flex_functions(attention.CASES[case].flex, heads, doc, gain)
    b, h = torch.tensor(0), torch.arange(heads)[:, None, None]
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
    dense = q[0] @ k[0].mT / 2
    if score is not None:
        dense = score(dense, b, h, rows, columns)
    if mask is not None:
        dense = torch.where(mask(b, h, rows, columns), dense, -torch.inf)
    expected = torch.softmax(dense, -1) @ v[0]
    captures = {"documents1000": {"doc": doc.int()}, "head_gain": {"gain": gain}}
    compiled = attndsl.compile(attention.CASES[case].program, backend="reference")
    found = compiled(q, k, v, **captures.get(case, {}))[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_sdpa_runs_only_what_it_can(script):
    attention = script("attention")
    able = {name for name, case in attention.CASES.items() if case.is_causal is not None}
    assert able == {"full", "causal", "causal_where"}
    bench = attention.Bench(quick=True)
    assert bench._why_not("cudnn", "alibi")
    assert bench._why_not("cudnn", "causal") is None
    assert bench._why_not("attndsl", "alibi") is None


def test_shapes_of_the_command_line_and_of_the_grid(script):
    attention = script("attention")
    assert attention.parse_shape("1x16x4096x128") == (1, 16, 16, 4096, 128)
    assert attention.parse_shape("2x32/8x8192x64") == (2, 32, 8, 8192, 64)
    for text in ("1x16x4096", "1xax4096x64", "1x32/5x4096x64", "0x1x1x1"):
        with pytest.raises(ValueError, match=text):
            attention.parse_shape(text)
    shapes = attention.grid()
    assert len(set(shapes)) == 36
    assert {(heads // kv_heads, dim) for _, heads, kv_heads, _, dim in shapes} == {
        (group, dim) for group in (1, 4) for dim in (64, 128, 256)
    }
    assert all(heads * dim == 2048 for _, heads, _, _, dim in shapes)
    bench = attention.Bench(quick=True)
    assert bench._why_not("deterministic", "causal", "forward")
    assert bench._why_not("deterministic", "causal", "backward") is None


WORKER = """
import json, os, sys, time
cells = json.loads(sys.argv[sys.argv.index("--worker") + 1])
for cell in cells:
    print(json.dumps({"start": cell}), flush=True)
    if cell["column"] == "dies":
        os._exit(9)
    if cell["column"] == "hangs":
        time.sleep(60)
    faulty = cell["column"] == "faulty"
    found = {"why": "a fault"} if faulty else {"ms": 1.0}
    print(json.dumps({"cell": cell, "found": found}), flush=True)
    if faulty:
        sys.exit(75)
"""


def test_a_cell_that_dies_or_hangs_costs_itself_alone(script, tmp_path, monkeypatch):
    attention = script("attention")
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(attention, "__file__", str(worker))
    monkeypatch.setattr(attention, "CELL_SECONDS", 1.5)
    columns = ["a", "dies", "b", "hangs", "c", "faulty", "d"]
    cells = [{"column": column} for column in columns]
    found = {cell["column"]: result for cell, result in attention._measure(cells, quick=False)}
    assert list(found) == columns
    assert {name for name, result in found.items() if "ms" in result} == set("abcd")
    assert found["dies"] == {"why": "the process ended with code 9"}
    assert found["hangs"] == {"why": "no answer within 2 s"}
    assert found["faulty"] == {"why": "a fault"}


def test_results_are_written_row_by_row(script, tmp_path):
    common = script("common")
    path = tmp_path / "sub" / "name.json"
    for rows in ([{"a": 1}], [{"a": 1}, {"a": None}]):
        common.write("name", "cpu", rows, path)
        assert json.loads(path.read_text())["rows"] == rows
    assert [each.name for each in path.parent.iterdir()] == ["name.json"]


def test_every_benchmark_can_be_run(script):
    run = script("run")
    assert {"frontend", "start"} <= set(run.EVERYWHERE)
    described = (FOLDER.parent / "docs" / "benchmarks.md").read_text("utf-8")
    for name in (*run.EVERYWHERE, *run.ON_GPUS):
        assert (FOLDER / f"{name}.py").exists(), name
        assert f"| `{name}.py` |" in described
    done = subprocess.run(
        [sys.executable, FOLDER / "run.py", "atention"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "there is no benchmark 'atention'" in done.stderr


@pytest.mark.slow
def test_start_is_measured_in_processes_of_its_own(script, tmp_path):
    start = script("start")
    rows = start.row("attndsl", "cpu", 1)
    assert [row["cache"] for row in rows] == ["cold", "warm"]
    assert all(row["first_output_ms"] > 0 for row in rows)


def test_the_overhead_of_calls_is_measured(tmp_path):
    output = tmp_path / "found.json"
    command = [sys.executable, FOLDER / "call_overhead.py", "--quick", "--output", output]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads(output.read_text())["rows"]
    assert len(done.stdout.splitlines()) == len(rows) + 1
    assert all(
        value > 0 for row in rows for key, value in row.items() if key.endswith(("us", "ms"))
    )
