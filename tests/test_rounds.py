"""Measurements on GPUs that one has for minutes: what is missing, what is kept, what is ended."""

import importlib
import json
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fork_server import run_script

FOLDER = Path(__file__).parents[1] / "benchmarks"
STUB = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
output = Path(sys.argv[sys.argv.index("--output") + 1])
begin = time.time()


def write(*rows, machine="GPU X", benchmark="stub", torch="2"):
    versions = {"torch": torch, "triton": "3", "commit": "new"}
    output.write_text(json.dumps({
        "benchmark": benchmark, "machine": machine, "date": "2026", "versions": versions,
        "rows": list(rows),
    }))


"""


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The modules, and ``go(code, ...)``: the outcomes of stubs."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("kept_rows", "rounds", "lanes", "run")
    found = SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    found.into, found.committed = tmp_path / "into", tmp_path / "committed"
    found.committed.mkdir()
    found.folders = (found.into, found.committed)
    found.here = found.kept_rows.Machine(("0",), "GPU X", {"torch": "2", "triton": "3"})

    def stub(code, name="stub", **more):
        path = tmp_path / f"{name}.py"
        path.write_text(STUB + code)
        shape = found.kept_rows.Shape(("name",), "ms")
        more = {"rows": ("a", "b", "c"), "least": 0.1, "stem": "stub"} | more
        return found.rounds.Round(name, 10.0, shape=shape, script=str(path), **more)

    def go(*plan, seconds=30.0, gpus=("0",), since=None):
        here = found.kept_rows.Machine(gpus, found.here.name, found.here.versions)
        since = found.rounds.Since(since)
        return found.run.measure_missing(plan, here, seconds, found.folders, since)

    found.stub, found.go = stub, go
    monkeypatch.setattr(found.lanes, "_POLL", 0.05)
    # What does not end when it is asked to is waited for less.
    short = [(number, patience / 3) for number, patience in found.lanes._PATIENCE]
    monkeypatch.setattr(found.lanes, "_PATIENCE", short)
    return found


def results(rows, machine="GPU X", commit="old"):
    versions = {"torch": "2", "triton": "3", "commit": commit}
    return {"benchmark": "stub", "machine": machine, "versions": versions, "rows": rows}


def rows_in(path):
    return {row["name"]: row for row in json.loads(path.read_text())["rows"]}


def test_new_rows_stand_beside_old_ones(bench, capsys):
    old = [{"name": "a", "ms": 1.0}, {"name": "b", "ms": 2.0}, {"name": "c", "why": "time was up"}]
    committed = bench.committed / "stub.json"
    committed.write_text(json.dumps(results(old)))
    before = committed.read_bytes()
    code = """
print(sys.argv)
assert sys.argv[1:3] == ["--rows", "c"]
write({"name": "c", "ms": 3.0}, {"name": "a", "why": "a fault"}, {"name": "b", "ms": None})
"""
    assert bench.go(bench.stub(code, choose="--rows")) == 0
    assert rows_in(bench.into / "stub.json") == {
        "a": {"name": "a", "ms": 1.0, "commit": "old"},
        "b": {"name": "b", "ms": 2.0, "commit": "old"},
        "c": {"name": "c", "ms": 3.0, "commit": "new"},
    }
    assert committed.read_bytes() == before
    assert "stub               done" in capsys.readouterr().out
    assert bench.go(bench.stub("sys.exit(1)")) == 0
    assert "nothing is missing" in capsys.readouterr().out


def test_what_hangs_is_ended_with_all_that_it_started(bench, capsys, monkeypatch):
    code = """
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"],
                         start_new_session=True)
Path(os.environ["STUB_PID"]).write_text(str(child.pid))
write({"name": "a", "ms": 1.0})
time.sleep(300)
"""
    pid = bench.committed / "pid"
    monkeypatch.setenv("STUB_PID", str(pid))
    begin = time.monotonic()
    assert bench.go(bench.stub(code, timeout=3.0)) == 1
    assert time.monotonic() - begin < 20
    assert rows_in(bench.into / "stub.json")["a"]["ms"] == 1.0
    assert "stub               cut" in capsys.readouterr().out
    stat, end = Path(f"/proc/{pid.read_text()}/stat"), time.monotonic() + 5
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < end
        time.sleep(0.05)


def test_what_dies_says_why_and_keeps_its_rows(bench, capsys):
    code = 'write({"name": "a", "ms": 1.0})\nraise RuntimeError("no memory")'
    assert bench.go(bench.stub(code), bench.stub("write()", "other", stem="other")) == 1
    out = capsys.readouterr().out
    assert "failed (1)" in out
    assert "    RuntimeError: no memory" in out
    assert "RuntimeError: no memory" in (bench.into / "logs" / "stub.log").read_text()
    assert list(rows_in(bench.into / "stub.json")) == ["a"]


@pytest.mark.parametrize(
    "written",
    [
        'output.write_text("{")', 'output.write_text("[]")', "output.write_bytes(b'\\xff')",
        'write(1, machine="GPU X")', 'write({"name": "b", "ms": 1.0}, benchmark="decode")',
        'output.write_text("[" * 100000)',
    ],
)  # fmt: skip
def test_a_broken_file_costs_no_old_row(bench, capsys, written):
    committed = bench.into / "stub.json"
    committed.parent.mkdir()
    committed.write_text(json.dumps(results([{"name": "a", "ms": 1.0}])))
    code = f'write({{"name": "b", "ms": 2.0}})\ntime.sleep(0.5)\n{written}'
    assert bench.go(bench.stub(code)) == 1
    assert "failed (results)" in capsys.readouterr().out
    assert list(rows_in(committed)) == ["a", "b"]
    assert bench.go(bench.stub('write({"name": "c", "ms": 3.0})')) == 0
    assert list(rows_in(committed)) == ["a", "b", "c"]
    assert len(list((bench.into / "logs").glob("stub.*.broken.json"))) == 1


def test_an_old_file_that_cannot_be_read_is_left(bench, capsys):
    bench.into.mkdir()
    (bench.into / "stub.json").write_text('{"rows": [')
    assert bench.go(bench.stub('write({"name": "a", "ms": 1.0})')) == 1
    assert (bench.into / "stub.json").read_text() == '{"rows": ['
    assert "cannot be read" in capsys.readouterr().out


def test_rows_of_another_machine_go_beside(bench):
    old = json.dumps(results([{"name": "a", "ms": 1.0}], machine="GPU Y"))
    (bench.committed / "stub.json").write_text(old)
    for name in "ab":
        code = f'write({{"name": "{name}", "ms": 2.0}})'
        assert bench.go(bench.stub(code)) == 0
    (found,) = bench.into.glob("*.json")
    assert found.name == "stub.GPU-X-torch-2-triton-3.json"
    assert list(rows_in(found)) == ["a", "b"]


def test_rows_that_a_lost_machine_has_left_are_taken(bench):
    work = bench.into / "work" / "stub"
    work.mkdir(parents=True)
    (work / "results.json").write_text(json.dumps(results([{"name": "a", "ms": 1.0}])))
    code = 'assert "b;c" in sys.argv and not output.exists()\nwrite({"name": "b", "ms": 2.0})'
    assert bench.go(bench.stub(code, choose="--rows")) == 0
    assert list(rows_in(bench.into / "stub.json")) == ["a", "b"]


def test_two_runs_do_not_share_a_folder(bench):
    with bench.lanes.locked(bench.into), pytest.raises(bench.lanes.Busy, match="another run"):
        bench.go(bench.stub("write()"))
    assert not (bench.into / "stub.json").exists()
    assert bench.go(bench.stub("write()")) == 0


TIMED = """
time.sleep(0.6)
row = [os.environ["CUDA_VISIBLE_DEVICES"], begin, time.time()]
write({"name": "a", "ms": row}, benchmark=output.parent.name)
"""


def test_scripts_run_side_by_side_and_some_alone(bench):
    names = ("one", "two", "all", "last")
    plan = [bench.stub(TIMED, name, stem=name, alone=name == "all") for name in names]
    plan.append(bench.stub("write()", "four", stem="four", gpus=4))
    assert bench.go(*plan, gpus=("3", "GPU-7")) == 1
    assert not (bench.into / "four.json").exists()
    one, two, alone, last = (rows_in(bench.into / f"{name}.json")["a"]["ms"] for name in names)
    assert (one[0], two[0], alone[0], last[0]) == ("3", "GPU-7", "3,GPU-7", "3")
    assert max(one[1], two[1]) < min(one[2], two[2])
    assert alone[1] > max(one[2], two[2])
    assert last[1] > alone[2]


def test_a_run_ends_in_time(bench, capsys):
    code = 'write({"name": "a", "ms": 1.0})\ntime.sleep(300)'
    begin = time.monotonic()
    assert bench.go(bench.stub(code), bench.stub("write()", "next", stem="next"), seconds=4.0) == 1
    assert time.monotonic() - begin < 10
    out = capsys.readouterr().out
    assert "stub               cut" in out
    assert "next               not begun" in out
    assert list(rows_in(bench.into / "stub.json")) == ["a"]


def test_progress_is_told(bench, capsys, monkeypatch):
    monkeypatch.setattr(bench.lanes, "EVERY", 0.2)
    bench.go(bench.stub('write({"name": "a", "ms": 1.0})\ntime.sleep(1)'))
    assert "1 rows on 0; 0 wait" in capsys.readouterr().out


def test_long_logs_keep_their_ends(bench, monkeypatch):
    monkeypatch.setattr(bench.lanes, "_MOST_LOG", 10_000)
    monkeypatch.setattr(bench.lanes, "_KEPT_LOG", 100)
    code = 'print("x" * 50_000)\nprint("the end", flush=True)\nsys.exit(3)'
    assert bench.go(bench.stub(code)) == 1
    log = (bench.into / "logs" / "stub.log").read_bytes()
    assert len(log) == 100
    assert log.endswith(b"the end\n")


def test_what_comes_before_a_script_has_to_succeed(bench, capsys):
    first = ("-c", "import sys; open(sys.argv[1], 'w').close()", "{work}/made")
    code = 'assert (output.parent / "made").exists()\nwrite({"name": "a", "ms": 1.0})'
    assert bench.go(bench.stub(code, before=first)) == 0
    assert bench.go(bench.stub(code, before=("-c", "exit(7)"))) == 1
    assert "failed (7)" in capsys.readouterr().out


def test_a_script_with_a_record_of_its_own_goes_on_at_its_commit(bench, monkeypatch):
    code = 'import sys\nopen(sys.argv[1], "a").write("{}\\n" * 3)'
    own = bench.stub("", "tests", stem=None, arguments=("{record}",))
    own.path.write_text(code)
    for commit, lines in (("a" * 40, 3), ("a" * 40, 6), ("b" * 40, 3)):
        monkeypatch.setenv("ATTNDSL_COMMIT", commit)
        assert bench.go(own) == 0
        assert (bench.into / f"tests.{commit[:12]}.jsonl").read_text() == "{}\n" * lines


def test_rows_of_older_commits_are_missing(bench, tmp_path, monkeypatch):
    def git(*words):
        command = ["git", "-c", "user.name=x", "-c", "user.email=x", *words]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    rounds = bench.rounds
    monkeypatch.setattr(rounds, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    rounds._git.cache_clear()
    assert rounds.Since("abcdef1").is_older("1234567")
    assert not rounds.Since("abcdef1234").is_older("abcdef1+")
    rounds._git.cache_clear()
    git("init", "-q")
    commits = []
    for number in range(3):
        git("commit", "-q", "--allow-empty", "-m", str(number))
        commits.append(git("rev-parse", "HEAD"))
    since = rounds.Since(commits[1][:9])
    since.check()
    older = [since.is_older(commit) for commit in (*commits, f"{commits[2][:8]}+", None, "fffffff")]
    assert older == [True, False, False, False, True, True]
    with pytest.raises(rounds.Unknown, match="knows no commit"):
        rounds.Since("fffffff").check()
    found = results([{"name": "a", "ms": 1, "commit": commits[2]}, {"name": "b", "ms": 1}],
                    commit=commits[0])  # fmt: skip
    assert bench.stub("").missing(found, since) == ("b", "c")
    assert bench.stub("").missing(found, rounds.Since()) == ("c",)
    rounds._git.cache_clear()


def test_the_plan_is_of_scripts_that_there_are(bench):
    """Rows, options and fields of the plan are those of the scripts and of committed files."""
    for own in bench.rounds.PLAN:
        names = own.names()
        assert len(set(names)) == len(names)
        assert not any(own.between in name for name in names), own.name
        options = [word for word in (own.choose, *own.arguments) if word.startswith("--")]
        done = run_script(own.path, "--help")
        assert done.returncode == 0, done.stderr
        said = done.stdout
        assert all(option in said for option in options), own.name
        assert own.file is None or "--output" in said
        file = FOLDER / "results" / f"{own.file}.json"
        if file.exists():
            rows = bench.kept_rows.read(file)["rows"]
            measured = [row for row in rows if own.shape.has_figure(row)]
            assert measured, own.name
            assert {own.item, *own.shape.same} <= set(measured[0])
            assert {str(row[own.item]) for row in measured} <= set(names), own.name
            assert len({own.shape.key(row) for row in rows}) == len(rows)


def test_the_plan_can_be_listed():
    done = run_script(FOLDER / "run.py", "--list", "decode", "tests")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[1:3]] == ["decode", "tests"]
    for words, said in ((["--missing"], "needs --minutes"), (["--list", "x"], "has no 'x'"),
                        (["--minutes", "3"], "go with --missing"),
                        (["--list", "--since", "fffffffff"], "")):  # fmt: skip
        done = run_script(FOLDER / "run.py", *words)
        assert done.returncode == 2
        assert said in done.stderr
