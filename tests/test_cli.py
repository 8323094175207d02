import json
import os
import resource
import subprocess
import sys
from datetime import datetime
from importlib import metadata
from pathlib import Path

import jsonschema
import pytest
import torch

from attndsl import cli
from attndsl.call.dispatch import BACKENDS
from attndsl.cli import run_command
from attndsl.cli import shared_options as arguments
from attndsl.errors import ConfigError
from attndsl.foundation.caches import CACHES, CacheStatistics, Reason
from attndsl.runtime.disk_cache import KernelCache
from attndsl.runtime.program_store import compiled_program
from attndsl.settings import read_settings

ROOT = Path(__file__).parents[1]
GOOD = "mask = causal() and q - kv < 8\n"
BAD = "mask = causl() and q - kv < 8\nscore = score + missing\n"


@pytest.fixture
def attndsl(monkeypatch, capsys, tmp_path):
    """``attndsl(*arguments, stdin=...)``: exit code, stdout, stderr; run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_command, "_CPU_SECONDS", 0.05)  # Nobody reads the times.

    def call(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["attndsl", *map(str, arguments)])
        if stdin is not None:
            (tmp_path / "stdin").write_text(stdin)
            monkeypatch.setattr(sys, "stdin", (tmp_path / "stdin").open())
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        if stdin is not None:
            sys.stdin.close()
        return code or 0, *capsys.readouterr()

    return call


@pytest.fixture
def write(tmp_path):
    """``write(name, text)``: a file's name, in the folder that commands run in."""

    def make(name, text):
        (tmp_path / name).write_bytes(text.encode())
        return name

    return make


def test_the_package_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-P", "-m", "attndsl", "--version"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("attndsl ")


def test_version_and_help(attndsl):
    code, out, _ = attndsl("--version")
    assert (code, out) == (0, "attndsl 0.2.0\n")
    code, out, _ = attndsl("--help")
    assert code == 0
    for name in ("check", "fmt", "explain", "show", "run", "cache", "schema", "doctor"):
        assert f"\n  {name} " in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("chek",),
        ("check",),
        ("check", "nowhere.attn"),
        ("check", "--jsn", "-"),
        ("run", "-", "--batch", "0"),
        ("show", "-", "--stage", "sorce"),
        ("show", "-", "--stage", "source", "--backend", "cpu"),
        ("check", "-", "-p", "window"),
        ("check", "-", "-p", "7=7"),
        ("check", "-", "-t", "gain(heads)"),
        ("run", "-", "--dtype", "fp8"),
        ("run", "-", "--device", "cuda:99"),
        ("run", "-", "--dim", "n=3"),
        ("run", "-", "--batch", "64", "--q-len", "100000"),
        ("fmt", "model.yaml"),
        ("explain", "two.yaml"),
        ("explain", "two.yaml", "--name", "c"),
    ],
)
def test_wrong_use_exits_with_2(attndsl, write, arguments):
    write("model.yaml", "a: q >= kv\n")
    write("two.yaml", "a: q >= kv\nb: q >= kv\n")
    code, out, err = attndsl(*arguments, stdin="q >= kv")
    assert code == 2
    assert out == ""
    assert err.strip()
    assert "Traceback" not in err


def test_check_passes_what_is_right(attndsl, write):
    config = 'a: causal()\nb:\n  program: "q - kv < w"\n  params: {w: 3}\n'
    code, out, _ = attndsl("check", write("a.attn", GOOD), write("b.yaml", config))
    assert (code, out) == (0, "3 programs: no errors\n")
    assert attndsl("check", "-", stdin="q >= kv")[:2] == (0, "1 program: no errors\n")


def test_check_names_every_error_and_its_place(attndsl, write):
    code, out, _ = attndsl("check", write("bad.attn", BAD), write("good.attn", GOOD))
    assert code == 1
    assert "bad.attn:1:8: there is no function 'causl'" in out
    assert "did you mean 'causal'" in out
    assert "bad.attn:2:17: 'missing'" in out
    assert out.endswith("2 programs: 2 errors\n")


def test_check_goes_on_after_a_damaged_configuration(attndsl, write):
    code, out, _ = attndsl("check", write("a.yaml", "- 1\n"), write("b.attn", BAD))
    assert code == 1
    assert "a.yaml" in out
    assert out.endswith("1 program: 3 errors\n")


def test_check_as_json(attndsl, write):
    code, out, _ = attndsl("check", "--json", write("bad.attn", BAD))
    found = json.loads(out)
    assert (code, found["ok"], found["programs"]) == (1, False, 1)
    first = found["errors"][0]
    assert {key: first[key] for key in ("file", "line", "column", "end_line", "end_column")} == {
        "file": "bad.attn", "line": 1, "column": 8, "end_line": 1, "end_column": 15,
    }  # fmt: skip
    assert first["kind"] == "NameResolutionError"
    assert "causal" in first["hint"]
    code, out, _ = attndsl("check", "--json", write("good.attn", GOOD))
    assert code == 0
    assert json.loads(out) == {
        "ok": True, "programs": 1, "errors": [], "warnings": [], "descriptions": [], "skipped": [],
    }  # fmt: skip


def test_every_command_takes_imports(attndsl, write):
    write("near.attn", "param reach: int = 8\ndef near(x, y) = abs(x - y) < reach\n")
    write("local.attn", 'import "near.attn"\nmask = causal() and near(q, kv)\n')
    write("model.yaml", 'local: |\n  import "local.attn"\n  score = softcap(score, 9.0)\n')
    for file in ("local.attn", "model.yaml"):
        assert attndsl("check", file)[:2] == (0, "1 program: no errors\n")
        lengths = ("--q-len", "32", "-p", "reach=4")
        assert "kv <= q and abs(q - kv) < 4" in attndsl("show", file, "-p", "reach=4")[1]
        assert "live pairs" in attndsl("plot", file, *lengths)[1]
        assert "q - kv" in attndsl("explain", file, "--verbose", *lengths[:2])[1]
        assert attndsl("run", file, *lengths, "--device", "cpu")[0] == 0
    assert attndsl("fmt", "--check", "local.attn", "near.attn")[0] == 0
    write("near.attn", "def near(x, y) = abs(x - z) < 8\n")
    code, out, _ = attndsl("check", "model.yaml", "near.attn", "--json")
    assert code == 1
    (found,) = json.loads(out)["errors"]
    assert (found["file"], found["line"], found["column"]) == ("near.attn", 1, 26)
    code, out, _ = attndsl("check", "-", stdin='import "near.attn"\nmask = near(q, kv)')
    assert code == 1
    assert "<stdin>:1:1: 'near.attn' cannot be found: this text stands in no file" in out


def test_names_declared_on_the_command_line(attndsl, write):
    file = write("a.attn", "mask = q - kv < window\nscore = gain[h] * score")
    assert attndsl("check", file)[0] == 1
    declared = ("-p", "window=8", "-t", "gain[heads]: float")
    assert attndsl("check", file, *declared)[0] == 0
    code, out, _ = attndsl("show", file, *declared)
    assert code == 0
    assert "q - kv < 8" in out
    assert "tensor gain[heads]: float" in out


def test_errors_of_a_configuration_name_its_lines(attndsl, write):
    text = "good: causal()\nbad:\n  program: |\n    # a comment\n    mask = causl()\n"
    code, out, _ = attndsl("check", write("a.yaml", text))
    assert code == 1
    assert "a.yaml:5:" in out


def test_fmt_in_place_check_and_diff(attndsl, write, tmp_path):
    file = write("a.attn", "mask=q>=kv  # causal\n")
    code, out, _ = attndsl("fmt", "--check", file)
    assert (code, out) == (1, "would reformat a.attn\n")
    code, out, _ = attndsl("fmt", "--diff", file)
    assert code == 1
    assert "-mask=q>=kv  # causal\n" in out
    assert (tmp_path / file).read_text() == "mask=q>=kv  # causal\n"
    assert attndsl("fmt", file)[:2] == (0, "reformatted a.attn\n")
    assert (tmp_path / file).read_text() == "mask = q >= kv  # causal\n"
    assert attndsl("fmt", file)[:2] == (0, "")
    assert attndsl("fmt", "--check", "--diff", file)[:2] == (0, "")
    assert attndsl("fmt", "-", stdin="q>=kv")[:2] == (0, "q >= kv\n")


def test_fmt_leaves_a_program_with_errors_alone(attndsl, write, tmp_path):
    code, out, err = attndsl("fmt", write("a.attn", "mask = (q >= kv\n"))
    assert (code, out) == (1, "")
    assert "a.attn:1:" in err
    assert (tmp_path / "a.attn").read_text() == "mask = (q >= kv\n"


@pytest.mark.parametrize(
    ("stage", "part"),
    [
        ("tree", "Assign("),
        ("ir", "where("),
        ("simplified", "where("),
        ("split", "mask = kv <= q"),
        ("derivative", "d score / d score"),
        ("tiles", "forward:"),
        ("json", '"nodes"'),
        ("source", "def attention_forward"),
        ("source-backward", "def attention_backward_kv"),
        ("source-tangent", "def attention_tangent"),
    ],
)
def test_show_prints_every_stage(attndsl, write, stage, part):
    program = "score = where(q >= kv, 2 * score, -inf)"
    code, out, _ = attndsl("show", write("a.attn", program), "--stage", stage)
    assert code == 0
    assert part in out
    assert f"\n{stage} " in "\n" + attndsl("show", "a.attn", "--stage", "list")[1]


def test_a_file_that_cannot_be_written_stays_as_it_is(attndsl, write, tmp_path, monkeypatch):
    file = write("a.attn", "q>=kv")
    before = os.stat(tmp_path / file).st_mode

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        code, _, err = attndsl("fmt", file)
    assert code == 1
    assert "cannot write a.attn: No space left on device" in err
    assert (tmp_path / file).read_text() == "q>=kv"
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        assert "cannot write a.attn: Permission denied" in attndsl("fmt", file)[2]
    assert os.listdir(tmp_path) == [file]
    (tmp_path / "link.attn").symlink_to(tmp_path / file)
    assert attndsl("fmt", "link.attn")[0] == 0
    assert (tmp_path / "link.attn").is_symlink()
    assert (tmp_path / file).read_text() == "q >= kv\n"
    assert os.stat(tmp_path / file).st_mode == before


def test_what_is_no_text_is_said_to_be_none(attndsl, write, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert "it is closed" in attndsl("check", "-")[1]
    Path("bytes").write_bytes(b"causal()\xff")
    with open("bytes", encoding="latin-1") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert (
            "<stdin> is not UTF-8 text: invalid start byte at byte 8" in (attndsl("check", "-")[1])
        )
    digits = "1" * 6000
    assert "is not JSON: Exceeds the limit" in attndsl("check", write("a.json", f"[{digits}]"))[1]
    assert "is not TOML: Exceeds the limit" in attndsl("check", write("a.toml", f"a={digits}"))[1]
    assert (
        "b.json: the key 'a' stands twice"
        in (attndsl("check", write("b.json", '{"a": "causal()", "a": "score"}'))[1])
    )


def test_programs_come_through_pipes(attndsl, tmp_path):
    def pipe(text: bytes) -> str:
        ends = os.pipe()
        os.write(ends[1], text)
        os.close(ends[1])
        return f"/dev/fd/{ends[0]}"

    assert attndsl("check", pipe(b"causal()"))[0] == 0
    assert "where(" in attndsl("show", pipe(b"where(q > kv, score, 0)"), "--stage", "ir")[1]
    assert attndsl("fmt", pipe(b"q>=kv"))[:2] == (0, "q >= kv\n")
    assert attndsl("fmt", "--check", pipe(b"q>=kv"))[0] == 1
    (tmp_path / "-").mkdir()
    assert attndsl("check", "-", stdin="causal()")[0] == 0
    code, _, err = attndsl("run", str(tmp_path))
    assert code == 2
    assert "is a folder" in err
    code, _, err = attndsl("check", str(tmp_path / "none.attn"))
    assert code == 2
    assert "there is no file" in err


def test_exact_forms_on_request(attndsl, write):
    file = write("cap.attn", "score = 5 * tanh(score / 5)\n")
    assert "tanh_approx(" in attndsl("show", file, "--stage", "source")[1]
    assert "tanh_approx(" not in attndsl("show", file, "--stage", "source", "--exact")[1]
    assert "tanh.approx" in attndsl("explain", file, "--verbose")[1]
    assert "exact forms everywhere" in attndsl("explain", file, "--exact", "-v")[1]
    assert attndsl("run", file, "--exact", "--q-len", "8", "--head-dim", "8")[0] == 0


def test_kernels_of_a_backend(attndsl, write):
    show = ("show", write("a.attn", GOOD), "--stage", "source-backward", "--backend", "hopper")
    code, out, _ = attndsl(*show, "--head-dim", "128")
    assert code == 0
    assert "warp_specialize" in out
    assert "warp_specialize" not in attndsl(*show[:-2])[1]
    code, out, err = attndsl(*show, "--head-dim", "264")
    assert (code, out) == (1, "")
    assert "head dims up to 256" in err
    assert "backend='triton'" in err


def test_explain(attndsl, write):
    code, out, _ = attndsl("explain", write("a.yaml", "a: q >= kv\nb: score\n"), "--name", "a")
    assert code == 0
    assert out.startswith("Tiles whose pairs are all masked out cost nothing.")
    assert "cpu on cpu" in out
    assert len(out.splitlines()) < 8
    assert "for q tile i" not in out
    assert "for q tile i" in attndsl("explain", "a.yaml", "--name", "a", "--verbose")[1]
    code, out, _ = attndsl("explain", "a.yaml", "--name", "a", "--q-len", "9", "--head-dim", "32")
    assert code == 0
    assert "1 x 1 heads of 32" in out


def test_explain_makes_up_what_the_mask_reads_alone(attndsl, write):
    bias = "tensor bias[q_len, kv_len]: float; tensor doc[batch, kv_len]: int\n"
    text = bias + "mask = doc[b, q] == doc[b, kv]; score = score + bias[q, kv]"
    long = ("--q-len", 10_000_000)
    code, out, _ = attndsl("explain", write("a.attn", text), *long)
    assert code == 0
    assert "not counted: there are 12207031250 tiles" in out
    assert out.endswith("\n  made up    doc: random, documents of about 100 positions\n")
    text = "tensor seen[q_len, kv_len]: bool; mask = seen[q, kv]"
    code, _, err = attndsl("explain", write("b.attn", text), *long)
    assert code == 2
    assert err.startswith("'seen' of 10000000 x 10000000 elements does not fit in memory\n")


def test_run_times_and_checks(attndsl, write):
    text = (
        "param cap: float\ntensor doc[batch, kv_len]: int\ntensor lengths[batch]: int\n"
        "tensor gain[heads]: float\ntensor seen[n]: bool\ntensor near[heads, 2 * kv_len]: float\n"
        "mask = doc[b, q] == doc[b, kv] and kv < lengths[b] and (seen[kv % 4] or q == kv)\n"
        "score = softcap(score, cap) * gain[h] + near[h, q - kv + kv_len]"
    )
    arguments = (
        "run", write("a.attn", text), "-p", "cap=20.0", "--dim", "n=4", "--batch", 2, "--heads", 4,
        "--kv-heads", 2, "--q-len", 24, "--head-dim", 16, "--value-dim", 8, "--backward",
    )  # fmt: skip
    code, out, _ = attndsl(*arguments)
    assert code == 0, out
    for part in ("cpu on cpu", "forward", "backward", "out", "dq", "dk", "dv", "ok"):
        assert part in out
    assert "\x1b" not in out
    code, out, _ = attndsl(*arguments, "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["backend"]) == (0, True, "cpu")
    assert [each["direction"] for each in found["timings"]] == ["forward", "backward"]
    assert all(each["ms"] > 0 and each["tflops"] > 0 for each in found["timings"])


LEARNED = (
    "param p: float = 0.2\nparam cap: float = 5.0\ntensor s[heads]: float\n"
    "tensor gain[heads, kv_len]: float\ntensor near[kv_len]: float\n"
    "mask = causal() and near[kv] < 1\nscore = softcap(score, cap) * gain[h, kv]\n"
    "sink = s[h] + cap\nweights = dropout(softmax(score), p)\n"
)


def test_run_holds_gradients_of_captures_to_the_reference(attndsl, write, monkeypatch):
    arguments = ("run", write("a.attn", LEARNED), "--backward", "--json", "--q-len", 24,
                 "--heads", 2, "--head-dim", 8)  # fmt: skip
    code, out, _ = attndsl(*arguments)
    assert code == 0, out
    checks = {each["name"]: each for each in json.loads(out)["checks"]}
    assert list(checks) == ["out", "dq", "dk", "dv", "ds", "dgain", "dnear", "dp", "dcap"]
    assert all(each["ok"] for each in checks.values())
    assert checks["dnear"]["allowed"] < 1e-5  # It is 0: the mask alone reads it.
    right = run_command.results
    for name in ("ds", "dgain", "dp", "dcap"):

        def wrong(attention, case, name=name):
            found = right(attention, case)
            found[name] = found[name] * 1.01
            return found

        monkeypatch.setattr(run_command, "results", wrong)
        code, out, _ = attndsl(*arguments)
        assert code == 1
        failed = [each["name"] for each in json.loads(out)["checks"] if not each["ok"]]
        assert failed == [name]


def test_explain_names_all_that_receives_gradients(attndsl, write):
    code, out, _ = attndsl("explain", write("a.attn", LEARNED))
    assert code == 0
    lines = out.splitlines()
    at = lines.index("gradients    q, k, v, s, gain, p, cap")
    assert lines[at + 1 : at + 4] == [
        "  by score   gain, cap", "  by sink    s, cap", "  by dropout p",
    ]  # fmt: skip
    assert "  dropout    of the weights, p = p" in lines
    text = (
        "tensor t[n]: int; tensor a[n]: float; param x: float\nweights = a[t[kv % n]] * score + x"
    )
    _, out, _ = attndsl("explain", write("b.attn", text))
    assert "gradients    q, k, v, a, x\n  by weights a, x\n" in out


def test_run_can_leave_the_check_out(attndsl, write):
    code, out, _ = attndsl("run", write("a.attn", GOOD), "--no-check", "--q-len", 16)
    assert code == 0
    assert "not checked" in out


def test_run_fails_when_the_result_is_wrong(attndsl, write, monkeypatch):
    right = run_command.results

    def wrong(attention, case):
        return {"out": right(attention, case)["out"] * 1.01}

    monkeypatch.setattr(run_command, "results", wrong)
    code, out, _ = attndsl("run", write("a.attn", GOOD), "--q-len", 16)
    assert code == 1
    assert "FAILED" in out


def test_run_reports_the_programs_errors(attndsl, write):
    code, out, err = attndsl("run", write("bad.attn", BAD))
    assert (code, out) == (1, "")
    assert "bad.attn:2:17" in err


def test_cache_commands(attndsl, write, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(tmp_path / "cache"))
    assert attndsl("cache", "path")[1] == f"{tmp_path / 'cache'}\n"
    assert "entries  0" in attndsl("cache", "stats")[1]
    attndsl("explain", write("a.attn", "q - kv < 1234"))
    assert "program" in attndsl("cache", "list")[1]
    assert "entries  1" in attndsl("cache", "stats")[1]
    nothing = f"removed 0 entries, 0 bytes, from {tmp_path / 'cache'}\n"
    assert attndsl("cache", "prune", "--limit", "10")[1] == nothing
    assert attndsl("cache", "prune", "--limit", "0")[1].startswith("removed 1 entry, ")
    attndsl("explain", write("b.attn", "q - kv < 4321"))
    (tmp_path / "cache" / "notes.py").write_text("mine")
    code, out, _ = attndsl("cache", "clear")
    assert code == 0
    assert out.startswith("removed 1 entry, ")
    assert out.endswith("\n1 not of the cache was left alone: notes.py\n")
    assert (tmp_path / "cache" / "notes.py").read_text() == "mine"
    assert attndsl("cache", "list")[1] == ""


def test_the_cache_is_listed_in_words(attndsl, write, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(folder))
    compiled_program.cache_clear()
    CACHES.invalidate(Reason.BACKENDS)
    file = write("a.attn", "# near\nparam w: int\nmask = q >= kv and q - kv < w\n")
    code, _, err = attndsl(
        "run", file, "-p", "w=3", "--backend", "triton", "--q-len", 8, "--head-dim", 8,
        "--value-dim", 4,
    )  # fmt: skip
    assert code == 0, err
    code, out, _ = attndsl("cache", "list", "--json")
    found = json.loads(out)
    assert code == 0
    text = "mask = q >= kv and q - kv < w  # w = 3"
    (program,) = (entry for entry in found if entry["kind"] == "program")
    (kernel,) = (entry for entry in found if entry["kernel"])
    assert program["text"] == kernel["text"] == text
    assert program["program"] == kernel["program"]
    said = {name: kernel[name] for name in ("kernel", "target", "dtype", "head_dim", "value_dim")}
    assert said == {
        "kernel": "triton forward", "target": "interpreter", "dtype": "fp32", "head_dim": 8,
        "value_dim": 4,
    }  # fmt: skip
    assert all(len(entry["key"]) == 64 and entry["bytes"] > 0 for entry in found)
    assert datetime.fromisoformat(kernel["used"]).tzinfo is not None
    lines = attndsl("cache", "list")[1].splitlines()
    assert len(lines) == len(found)
    (line,) = (line for line in lines if line.startswith(kernel["key"][:16]))
    assert line.endswith(f"  triton forward interpreter fp32 D8/4  {text}")
    # No path is kept, and the text of a kernel whose program is gone is that of its expressions.
    assert not any(str(tmp_path) in path.read_text() for path in folder.iterdir())
    (folder / f"{program['key']}.json").unlink()
    assert attndsl("cache", "list")[1].splitlines()[0].endswith("kv <= q and q - kv < 3")


def test_hostile_entries_of_the_cache_are_listed_without_harm(attndsl, tmp_path, monkeypatch):
    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(tmp_path / "cache"))
    cache = KernelCache(tmp_path / "cache")
    about = {"text": "\x1b[31mred\nline\u202e", "program": "x", "kernel": "\x07", "head_dim": -3}
    for number, meta in enumerate(({"about": about, "kind": "\x1b[2J"}, {"about": [1]}, {})):
        cache.save(f"{number:064x}", "", meta)
    (tmp_path / "cache" / f"{9:064x}.json").write_text("[" * 1000)
    code, out, _ = attndsl("cache", "list")
    assert code == 0
    assert out.count("\n") == 4
    assert out.replace("\n", "").isprintable()
    assert "damaged" in out
    assert len(json.loads(attndsl("cache", "list", "--json")[1])) == 4
    code, out, _ = attndsl("cache", "stats")
    assert code == 0
    assert out.replace("\n", "").isprintable()


def test_stats_of_the_caches_of_a_process(attndsl):
    code, out, _ = attndsl("cache", "stats", "--memory", "--program", "mask = q - kv < 77")
    head, *rows = out.splitlines()
    assert (code, head.split()) == (0, [*CacheStatistics._fields])
    place = head.index("bound")
    found = {row[:place].rstrip(): row[place:].split() for row in rows}
    assert int(found["compiled programs"][1]) >= 1
    assert (
        found["backends of torch operations"][0],
        found["backends of torch operations"][-1],
    ) == ("few", "backends")


def test_stats_of_a_program_with_errors(attndsl):
    code, out, err = attndsl("cache", "stats", "--memory", "--program", "mask = nothing")
    assert (code, out) == (1, "")
    assert "nothing" in err


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_stats_say_why_nothing_is_kept(attndsl, monkeypatch, tmp_path, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ATTNDSL_CACHE_DIR", str(tmp_path / place))
    code, out, _ = attndsl("cache", "stats")
    assert code == 0
    assert f"enabled  no: {tmp_path / 'file'} is no folder" in out


@pytest.mark.parametrize("name", ["ATTNDSL_CACHE", "ATTNDSL_CHECKED", "ATTNDSL_VERIFY"])
def test_switches_are_on_or_off(monkeypatch, name):
    field = name.partition("_")[2].lower()
    for text, wanted in (("1", True), ("on", True), ("0", False), ("No", False)):
        monkeypatch.setenv(name, text)
        assert getattr(read_settings(), field) is wanted
    monkeypatch.setenv(name, "")
    assert getattr(read_settings(), field) is (field == "cache")
    monkeypatch.setenv(name, "nonsense")
    with pytest.raises(ConfigError, match=f"{name} is 'nonsense'"):
        read_settings()


def test_schema_describes_the_examples(attndsl):
    import yaml

    code, out, _ = attndsl("schema")
    assert code == 0
    schema = json.loads(out)
    jsonschema.Draft202012Validator.check_schema(schema)
    for path in sorted(ROOT.glob("examples/**/*.yaml")):
        jsonschema.validate(yaml.safe_load(path.read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"a": {"programm": "q >= kv"}}, schema)


def test_doctor(attndsl, monkeypatch):
    monkeypatch.setenv("ATTNDSL_LOG", "in\x1b[31mfo")
    monkeypatch.setenv("ATTNDSL_CACHE_MB", "")
    assert read_settings().cache_bytes == 256 << 20
    monkeypatch.setenv("ATTNDSL_CACHE_MB", "100")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    code, out, _ = attndsl("doctor")
    assert code == 0
    assert "reference  cpu      works" in out
    assert f"\ntorch        {metadata.version('torch')}\n" in out
    assert "\n  torch is built for " in out
    assert "\n  ATTNDSL_CACHE_MB=100\n" in out
    assert "\n  ATTNDSL_LOG=in\\x1b[31mfo\n" in out
    assert "secret" not in out
    assert f"\ncache        {os.environ['ATTNDSL_CACHE_DIR']}\n" in out
    found = json.loads(attndsl("doctor", "--json")[1])
    assert found["backends"]["reference"]["cpu"] is None
    assert found["versions"]["attndsl"] == "0.2.0"
    assert found["environment"]["ATTNDSL_CACHE_MB"] == "100"
    assert "SOME_TOKEN" not in found["environment"]
    assert found["cache"]["writable"]


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("attndsl ca", ["cache"]),
        ("attndsl cache pr", ["prune"]),
        ("attndsl plot --bl", ["--block-m", "--block-n"]),
        ("attndsl run --dtype f", ["fp16", "fp32", "fp64"]),
        ("attndsl run --backend h", ["hopper"]),
        ("attndsl show --stage source-", ["source-backward", "source-tangent"]),
    ],
)
def test_shells_complete_words(words, completed):
    asked = {"_ATTNDSL_COMPLETE": "complete_bash", "COMP_WORDS": words}
    asked["COMP_CWORD"] = str(words.count(" "))
    code = "import sys; sys.argv[0] = 'attndsl'; from attndsl.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={**os.environ, **asked}, capture_output=True,
        text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == completed
    assert done.stderr == ""


def test_completed_backends_are_all_there_are():
    assert set(arguments.BACKENDS) == {"auto", *BACKENDS}
    assert tuple(run_command.DTYPES) == arguments.DTYPES


_MAIN = [sys.executable, "-c", "from attndsl.cli import main; main()"]


def _process(*arguments, **options):
    return subprocess.run([*_MAIN, *arguments], capture_output=True, text=True, **options)


def _least_seconds(command):
    """Processor seconds of a command, the least of three runs: other tests run beside this one."""
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(spent)


def test_check_is_quick():
    # It takes 2.5 times what its libraries take to start, on any machine. torch takes 10 times.
    start = _least_seconds([sys.executable, "-c", "import typer, pydantic, lark, yaml"])
    check = _least_seconds([*_MAIN, "check", str(ROOT / "examples" / "model.yaml")])
    assert check < 4 * start


def test_a_reader_that_leaves_early_is_no_error():
    code = (
        "import subprocess, sys\n"
        "run = [sys.executable, '-c', 'from attndsl.cli import main; main()', 'show', '-',"
        " '--stage', 'tree']\n"
        "p = subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE,"
        " stderr=subprocess.PIPE, text=True)\n"
        "p.stdout.close()\n"
        "p.stdin.write('; '.join(f'a{i} = {i}' for i in range(400)) + '; q >= kv')\n"
        "p.stdin.close()\n"
        "print(p.wait(), p.stderr.read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "Traceback" not in done.stdout
    assert "Exception" not in done.stdout


def test_the_command_is_installed():
    command = Path(sys.executable).with_name("attndsl")
    done = subprocess.run([command, "--version"], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "attndsl 0.2.0\n"


@pytest.mark.parametrize("backend", ["auto", "triton", "hopper"])
def test_explain_of_a_gpu_that_is_not_there(attndsl, write, backend):
    count = torch.cuda.device_count()
    code, out, _ = attndsl(
        "explain", write("a.attn", "causal()"), "--backend", backend, "--device", f"cuda:{count}"
    )
    assert code == 0
    asked = "triton" if backend == "auto" else backend
    assert f"backend      none on cuda: the {asked} backend cannot run on cuda:{count}" in out
    assert f"torch sees {count} GPU(s) here" in out


def test_rates_count_two_products_of_a_forward_and_five_of_a_backward():
    shapes = run_command.Shapes(2, 3, 3, 5, 7, 11, 13, "fp32", "cpu")
    pairs = 2 * 3 * 5 * 7
    assert run_command._flops(shapes, "forward") == 2 * pairs * (11 + 13)
    assert run_command._flops(shapes, "backward") == 2 * pairs * (3 * 11 + 2 * 13)
