"""Runs of the tests that need a GPU: what is recorded, what runs again, who takes which tests."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import gpu_tests
import gpu_worker

TOOLS = Path(gpu_tests.__file__).parent
CASES = """
import os
import pytest

runs = []


@pytest.mark.parametrize("number", [1, 2])
def test_numbers(number):
    assert number == 1


def test_ends_its_process():
    os._exit(3)


def test_finds_memory_at_last():
    runs.append(None)
    if len(runs) < 3:
        raise RuntimeError("CUDA out of memory")


@pytest.fixture
def bad():
    yield
    raise RuntimeError("in a fixture")


def test_of_a_bad_fixture(bad):
    pass


def test_skipped():
    pytest.skip("not here")


@pytest.mark.several_gpus
def test_of_several():
    pass
"""


def run_pytest(folder, *options):
    (folder / "test_cases.py").write_text(CASES)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = several_gpus\n")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-p", "gpu_worker", "-p", "no:cacheprovider", "-q",
         *options],
        cwd=folder, env=environment | {"PYTHONPATH": str(TOOLS)}, capture_output=True, timeout=120,
    )  # fmt: skip


def test_each_result_is_recorded(tmp_path):
    """With a worker that ends, another takes its place; without memory a test begins again."""
    record = tmp_path / "record.jsonl"
    run_pytest(tmp_path, "-n", "1", "--dist", "worksteal", "--record", record)
    lines = {line["test"].partition("::")[2]: line for line in gpu_tests.read(record)}
    assert {name: line["outcome"] for name, line in lines.items()} == {
        "test_numbers[1]": "passed", "test_numbers[2]": "failed", "test_of_several": "passed",
        "test_ends_its_process": "failed", "test_finds_memory_at_last": "passed",
        "test_of_a_bad_fixture": "failed", "test_skipped": "skipped",
    }  # fmt: skip
    assert lines["test_finds_memory_at_last"]["attempts"] == 3
    assert "assert 2 == 1" in lines["test_numbers[2]"]["text"]
    assert "crashed" in lines["test_ends_its_process"]["text"]
    assert lines["test_of_a_bad_fixture"]["phase"] == "teardown"


def test_tests_are_listed_and_chosen_by_name(tmp_path):
    listed, only, record = (tmp_path / name for name in ("listed", "only", "record"))
    run_pytest(tmp_path, "--collect-only", "--list", listed)
    found = json.loads(listed.read_text())
    assert found["several"] == ["test_cases.py::test_of_several"]
    assert len(found["one"]) == 6
    only.write_text("test_cases.py::test_numbers[1]\ntest_cases.py::test_skipped")
    record.write_text('{"test": "cut')
    run_pytest(tmp_path, "--only", only, "--record", record)
    assert [(line["test"], line["outcome"]) for line in gpu_tests.read(record)] == [
        ("test_cases.py::test_numbers[1]", "passed"), ("test_cases.py::test_skipped", "skipped"),
    ]  # fmt: skip


def item(nodeid, /, **indices):
    callspec = {"callspec": SimpleNamespace(indices=indices)} if indices else {}
    return SimpleNamespace(nodeid=nodeid, **callspec)


def test_tests_of_one_program_follow_each_other_and_slow_ones_begin_pieces():
    parts = [
        item(f"a.py::test[{name}-{split}]", name=name, split=split)
        for split in range(2) for name in range(2)
    ]  # fmt: skip
    slow = [item(f"tests/fuzz/test_fuzz.py::test[{number}]", number=number) for number in range(2)]
    found = [each.nodeid for each in gpu_worker.spread([*slow, *parts], 2)]
    assert found == [
        "tests/fuzz/test_fuzz.py::test[0]", "a.py::test[0-0]", "a.py::test[0-1]",
        "tests/fuzz/test_fuzz.py::test[1]", "a.py::test[1-0]", "a.py::test[1-1]",
    ]  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 20])
@pytest.mark.parametrize(("slow", "others"), [(5, 9), (0, 3), (4, 0), (9, 2)])
def test_more_slow_ones_than_workers_are_shared_evenly(slow, others, workers):
    items = [item(f"g.py::test_the_grid_in_kernels[{number}]") for number in range(slow)]
    items += [item(f"a.py::test[{number}]") for number in range(others)]
    found = gpu_worker.spread(items, workers)
    assert sorted(each.nodeid for each in found) == sorted(each.nodeid for each in items)
    ends = [len(items) * number // workers for number in range(workers + 1)]
    pieces = [found[begin:end] for begin, end in itertools.pairwise(ends)]
    shares = [[gpu_worker.is_slow(each) for each in piece] for piece in pieces]
    assert all(share == sorted(share, reverse=True) for share in shares)
    assert max(map(sum, shares)) <= -(-slow // workers)


def record_of(path, **outcomes):
    lines = [
        {"test": name, "outcome": outcome, "text": f"why {name}"}
        for name, several in outcomes.items() for outcome in several
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"test": "cut')
    return path


@pytest.mark.parametrize(
    ("selected", "status", "said"),
    [
        ("ab", 0, "gpu_tests: 1 passed, 1 skipped; 0 failed once and then passed"),
        ("ac", 0, "gpu_tests: 2 passed; 1 failed once and then passed"),
        ("ad", 1, "gpu_tests: 1 failed, 1 passed; 1 failed once and then passed"),
        ("ae", 1, "gpu_tests: 1 not run, 1 passed; 1 failed once and then passed"),
    ],
)
def test_the_summary(tmp_path, capsys, selected, status, said):
    outcomes = {"a": ["passed"], "b": ["skipped"]}
    if selected != "ab":
        outcomes |= {"c": ["failed", "passed"], "d": ["failed", "failed"]}
    record = record_of(tmp_path / "record", **outcomes)
    run = SimpleNamespace(record=record, selected=list(selected), seconds=1.0)
    assert gpu_tests.summarise(run, 0) == status
    out = capsys.readouterr().out
    assert said in out
    assert ("FAILED d\nwhy d" in out) == (selected == "ad")
    assert ("FAILED ONCE c" in out) == (selected != "ab")


def test_what_failed_in_the_run_before_has_not_failed_again(tmp_path, capsys):
    """There was no time for it: the record alone knows of it."""
    record = record_of(tmp_path / "record", a=["failed"], b=["failed"])
    before = len(gpu_tests.read(record))
    text = record.read_text().rpartition("\n")[0]
    more = json.dumps({"test": "b", "outcome": "failed", "text": "why now"})
    record.write_text(f"{text}\n{more}\n")
    run = SimpleNamespace(record=record, selected=["a", "b"], seconds=1.0)
    assert gpu_tests.summarise(run, before) == 1
    out = capsys.readouterr().out
    assert "gpu_tests: 1 failed, 1 failed before and not run" in out
    assert "FAILED b\nwhy now" in out
    assert "FAILED a" not in out


def test_files_that_may_have_such_tests():
    found = gpu_tests.files_with_gpu_tests()
    assert {"tests/backends/triton/test_parts.py", "tests/parallel/test_dtensor.py"} <= set(found)
    assert "tests/frontend/test_statements.py" not in found
