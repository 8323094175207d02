"""Warnings of ``attndsl check``, in its three formats, and ``--strict``."""

import json


def test_check_prints_warnings_and_passes(attndsl, tree):
    tree({"a.attn": "near = q - kv\nmask = causal()\n", "b.attn": "mask = causal()\n"})
    done = attndsl("check", "a.attn")
    assert done.code == 0
    assert done.out == (
        "a.attn:1:1: warning: nothing reads 'near'\n"
        "    near = q - kv\n"
        "    ^^^^\n"
        "  hint: use it, as in 'mask = near', or remove the line\n"
        "\n"
        "1 program: no errors, 1 warning (--strict makes the exit code 1)\n"
    )
    strict = attndsl("check", "a.attn", "--strict")
    assert strict.code == 1
    assert strict.out.endswith("\n1 program: no errors, 1 warning\n")
    assert attndsl("check", "b.attn", "--strict") == (0, "1 program: no errors\n", "")


def test_warnings_for_other_software(attndsl, tree):
    tree({"m.yaml": "a:\n  program: |\n    mask = q < kv and kv < q\nb: 'x ='\n"})
    done = attndsl("check", "m.yaml", "--json")
    found = json.loads(done.out)
    assert done.code == 1
    assert len(found["errors"]) == 1
    (warning,) = found["warnings"]
    assert warning["kind"] == "ProgramWarning"
    assert (warning["line"], warning["message"]) == (3, "the mask is false for all pairs")
    lines = attndsl("check", "m.yaml", "--format", "github").out.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["::warning", "::error", "2"]
    assert lines[-1] == "2 programs: 1 error, 1 warning"


def test_ok_is_about_errors(attndsl, tree):
    tree({"a.attn": ""})
    done = attndsl("check", "a.attn", "--json", "--strict")
    assert done.code == 1
    assert json.loads(done.out)["ok"]
    assert json.loads(done.out)["warnings"][0]["message"].startswith("the program is empty")
