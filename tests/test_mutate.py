"""Runs of mutants: what is changed, who judges, what is recorded, what a run goes on with."""

import json
import subprocess

import mutants
import mutate
import pytest

SOURCE = '''"""A module."""

import triton


def bound(a, b, near):
    """Text of 1 and 2."""
    if not near:
        raise ValueError(f"{a + b} of {1}")
    return a < b + 1 and max(a, b) > 0


@triton.jit
def kernel(x):
    return x + 1


class Thing:
    def __repr__(self):
        return 1 + 2

    def go(self):
        self.stop(3)
'''
TESTS = """
from attndsl.thing import bound


def test_bound():
    assert bound(1, 1, True)
    assert not bound(3, 1, True)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project of one module, with its tests."""
    for path, text in {
        "attndsl/__init__.py": "", "attndsl/thing.py": SOURCE.replace("@triton.jit", ""),
        "backends/__init__.py": "", "grammar/__init__.py": "", "tests/test_thing.py": TESTS,
        "pyproject.toml": "", ".gitignore": "build/",
    }.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text.replace("import triton\n", ""))
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    monkeypatch.setattr(mutate, "BUILD", tmp_path / "build")
    monkeypatch.setattr(mutate, "TIMES", tmp_path / "build" / "files.jsonl")
    monkeypatch.setattr(mutate, "TESTS", {"": ("tests/test_thing.py",)})
    return tmp_path


def changes():
    return {
        (each.kind, each.line): each.applied(SOURCE).splitlines()[each.line - 1].strip()
        for each in mutants.mutants_of("attndsl/thing.py", SOURCE)
    }


def test_what_is_changed():
    found = changes()
    assert found == {
        ("negation", 8): "if (near):",
        ("comparison", 10): "return a < b + 1 and max(a, b) >= 0",
        ("connective", 10): "return (a < b + 1 or max(a, b) > 0)",
        ("operand dropped", 10): "return a < (b) and max(a, b) > 0",
        ("arithmetic", 10): "return a < (b - 1) and max(a, b) > 0",
        ("constant", 10): "return a < b + 1 and max(a, b) > 1",
        ("arguments", 10): "return a < b + 1 and max(b, a) > 0",
        ("statement", 23): "pass",
        ("constant", 23): "self.stop(4)",
    }


def test_a_draw_is_the_same_each_time_and_has_all_kinds(project):
    first = mutants.drawn(3, 7)
    assert first == mutants.drawn(3, 7)
    assert len({each.kind for each in first}) == 7
    assert first != mutants.drawn(4, 7)
    assert mutants.drawn(3, 7, ["backends"]) == []


def test_files_that_mention_a_module_judge_it_first():
    found = mutate.tests_of("attndsl/runtime/disk_cache.py", mutate.ROOT)
    assert found[0] == "tests/runtime/test_disk_cache.py"
    assert len(found) == len(set(found))


def test_each_package_has_tests_that_exist():
    for path in mutants.sources():
        assert any(path.startswith(package) for package in mutate.TESTS), path
    for place in {place for places in mutate.TESTS.values() for place in places}:
        assert (mutate.ROOT / place).exists(), place


def test_a_run_its_record_and_another_that_goes_on(project, monkeypatch, capsys):
    record = project / "build" / "record.jsonl"
    source = (project / "attndsl" / "thing.py").read_text()

    def run(*options):
        monkeypatch.setattr("sys.argv", ["mutate", "--record", str(record), *options])
        return mutate.main(), capsys.readouterr().out

    mutants_of_file = mutants.mutants_of("attndsl/thing.py", source)
    by_kind = {each.kind: each for each in mutants_of_file if each.line < 12}
    chosen = [by_kind["negation"], by_kind["arguments"]]
    monkeypatch.setattr(mutate, "drawn", lambda *_: chosen)
    code, said = run("--part", "1/2")
    assert code == 0
    assert "1 of 1 that change something are killed (100.0%)" in said
    record.write_text(record.read_text() + '{"mutant": "cut o')
    code, said = run()
    assert code == 1
    assert "1 of 2 mutants to judge" in said
    name = chosen[1].name
    assert f"SURVIVED {name}\n--- attndsl/thing.py" in said
    lines = mutate.read(record)
    assert [line["outcome"] for line in lines] == ["killed", "survived"]
    assert lines[0]["by"] == "tests/test_thing.py::test_bound"
    assert (project / "attndsl" / "thing.py").read_text() == source
    assert run("--report")[0] == 1
    code, said = run("--survivors")
    assert "1 of 1 mutants to judge" in said
    code, said = run("--equivalent", name, "--reason", "max takes them in any order")
    assert code == 0
    assert f"EQUIVALENT {name}: max takes them in any order" in said
    with pytest.raises(SystemExit, match="name of a mutant"):
        run("--equivalent", "no such", "--reason", "x")


def test_tests_that_fail_anyway_judge_nothing(project, monkeypatch, capsys):
    (project / "tests" / "test_thing.py").write_text(TESTS + "    assert 0\n")
    monkeypatch.setattr("sys.argv", ["mutate", "--count", "1", "--record", str(project / "r")])
    assert mutate.main() == 0
    assert "judges nothing" in capsys.readouterr().out
    assert json.loads((project / "r").read_text())["outcome"] == "unjudged"
