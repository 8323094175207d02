"""``attndsl plot``: what it prints and writes, and how it ends."""

from pathlib import Path

import pytest

import attndsl
from attndsl import cli
from attndsl.picture import Frame, picture_data, text


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """``command(program, *arguments)``: exit code, stdout, stderr, in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def call(program, *arguments):
        Path("a.attn").write_text(program)
        monkeypatch.setattr("sys.argv", ["attndsl", "plot", "a.attn", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code
        return code or 0, *capsys.readouterr()

    return call


def test_command_prints_text(command):
    code, out, err = command("causal() and q - kv < w\n", "-p", "w=20", "--heads", 1)
    assert (code, err) == (0, "")
    # Declared names are no part of the heading, which is the program's own text.
    program = "causal() and q - kv < w"
    lowered = attndsl.compile(program, w=20).lowered
    data = picture_data(lowered, Frame(64, 64, 16, 16), title=program)
    assert out == text(data)
    code, out, _ = command(
        "score + alibi()", "--q-len", 8, "--kv-len", 24, "--block-m", 4, "--head", 3
    )
    assert "head 3 of 4, tiles of 4 x 16" in out
    assert "\n4 ##\n" in out
    code, out, _ = command("q >= kv", "--q-offset", 48, "--q-len", 16, "--kv-len", 64)
    assert "\n48 ###+\n" in out


def test_command_writes_pictures(command, tmp_path):
    for suffix in ("svg", "png", "html", "txt"):
        code, out, _ = command("mask = causal(); score = score + alibi()", "-o", f"p.{suffix}")
        assert (code, out) == (0, f"wrote p.{suffix}\n")
        assert (tmp_path / f"p.{suffix}").stat().st_size
    assert 'data-panel="score"' in (tmp_path / "p.svg").read_text()


def test_command_makes_tensors_up_and_says_so(command):
    program = (
        "tensor doc_of[batch, n]: int\ntensor lengths[batch]: int\ntensor gain[heads]: float\n"
        "tensor seen[kv_len]: bool\n"
        "mask = q >= kv and doc_of[b, q] == doc_of[b, kv] and kv < lengths[b] + 64 and seen[0]\n"
        "score = gain[h] * score"
    )
    arguments = ("--batch-entry", 1, "--dim", "n=64", "--seed", 1)
    code, out, err = command(program, *arguments)
    assert code == 0
    assert err.startswith("made up, seed 1: doc_of (sorted ids), lengths (ints from ")
    assert "gain (normal numbers), seen (fair coins)" in err
    assert "batch entry 1 of 2" in out
    assert command(program, *arguments)[1] == out


@pytest.mark.parametrize(
    ("program", "arguments", "part"),
    [
        ("q >= kv", ("-o", "a.jpeg"), ".svg, .png, .html, .txt"),
        ("q >= kv", ("--head", 4), "0 to 3"),
        ("q >= kv", ("--batch", 2, "--batch-entry", 2), "0 to 1"),
        ("q >= kv", ("--q-len", 0), "q-len"),
        ("q >= kv", ("--q-len", 5000), "4096"),
        ("q >= kv", ("--q-len", 4096, "--block-m", 1), "at least 16"),
        ("q >= kv", ("--dim", "n=3"), "'n'"),
        ("param w: int\nq - kv < w", (), "-p w=..."),
        ("q >= kv", ("-o", "nowhere/a.svg"), "cannot write"),
    ],
)
def test_wrong_use_of_the_command_exits_with_2(command, program, arguments, part):
    code, out, err = command(program, *arguments)
    assert (code, out) == (2, "")
    assert part in err
    assert "Traceback" not in err


def test_command_reports_the_programs_errors(command):
    code, out, err = command("mask = causl()")
    assert (code, out) == (1, "")
    assert "a.attn:1:8" in err
