"""What ``attndsl check`` prints for other software, and programs at a key in all commands."""

from __future__ import annotations

import json
import re

import pytest

CONFIG = """
model:
  attention:
    near:
      program: |
        mask = q - kv < window and causal()
      params: {window: 3}
      description: Rows near the diagonal.
    far: causal()
"""


def _commands(out):
    """Workflow commands as GitHub reads them: level, properties, message."""
    found = []
    for line in out.splitlines():
        match = re.fullmatch(r"::(\w+) ([^:]*)::(.*)", line)
        if match is not None:
            told = dict(part.split("=", 1) for part in match[2].split(","))
            found.append((match[1], {k: _plain(v) for k, v in told.items()}, _plain(match[3])))
    return found


def _plain(text):
    for code, letter in (("%2C", ","), ("%3A", ":"), ("%0A", "\n"), ("%0D", "\r"), ("%25", "%")):
        text = text.replace(code, letter)
    return text


def test_github_shows_errors_at_their_lines(attndsl, tree):
    name = "100%, a:b.attn"
    tree({name: "mask = q >= kv\nscore = scor % 2\n", "good.attn": "causal()"})
    done = attndsl("check", name, "good.attn", "--format", "github")
    assert done.code == 1
    assert _commands(done.out) == [
        (
            "error",
            {"file": name, "line": "2", "col": "9"},
            "'scor' is not declared\nhint: did you mean 'score'?",
        )
    ]
    assert done.out.endswith("\n2 programs: 1 error\n")
    assert attndsl("check", "good.attn", "--format", "github").out == "1 program: no errors\n"


@pytest.mark.parametrize(
    ("name", "text", "told", "message"),
    [
        (
            "a.yaml",
            "a: |\n  mask = q >= kv\n  score = causl()\n",
            {"line": "3"},
            "there is no function",
        ),
        ("a.yaml", "a:\n  b: 3\n", {"line": "2", "col": "3"}, "'a' has an unknown key 'b'"),
        ("a.yaml", "a: 3\n", {"line": "1", "col": "4"}, "the program of 'a' is no text"),
        (
            "a.json",
            '{"a": "mask = q >= kv\\nscore = causl()"}',
            {},
            "a.json:a:2:9: there is no function",
        ),
        ("a.toml", 'm.b = "causl()"', {}, "a.toml is no mapping"),
        ("a.json", '{"a": 3}', {}, "the program of 'a.json:a' is no text"),
        ("a.json", '{"a":', {"line": "1", "col": "5"}, "not JSON"),
        ("a.attn", "causal() \x1b[31m", {"line": "1", "col": "10"}, "control character"),
    ],
)
def test_places_that_github_gets_are_those_of_the_file(attndsl, tree, name, text, told, message):
    tree({name: text})
    done = attndsl("check", name, "--format", "github")
    level, properties, said = _commands(done.out)[0]
    assert (level, properties) == ("error", {"file": name, **told})
    assert message in said
    assert all(c.isprintable() or c == "\n" for c in done.out)


def test_nothing_in_a_file_is_a_command(attndsl, tree):
    hostile = "x\n::error::mine\n::set-output name=a::b%0A::warning::c"
    tree({"a.json": json.dumps({hostile: "causl()", "b": {hostile: 1, "program": hostile}})})
    done = attndsl("check", "a.json", "--format", "github")
    lines = done.out.splitlines()
    assert all(line.startswith("::error file=a.json::") for line in lines[:-1])
    assert len(lines) == 1 + done.out.count("::error file=")
    assert "warning::c" not in [line[2:12] for line in lines]


def test_one_format_at_a_time(attndsl, tree):
    tree({"a.attn": "causal()"})
    assert (
        attndsl("check", "a.attn", "--json").out
        == attndsl("check", "a.attn", "--format", "json").out
    )
    assert attndsl("check", "a.attn", "--json", "--format", "json").code == 0
    assert attndsl("check", "a.attn", "--format", "text").out == "1 program: no errors\n"
    done = attndsl("check", "a.attn", "--json", "--format", "github")
    assert (done.code, done.out) == (2, "")
    assert "--json and --format github are both given" in done.err
    assert attndsl("check", "a.attn", "--format", "xml").code == 2


def test_json_has_descriptions(attndsl, tree):
    tree({"train.yaml": CONFIG})
    found = json.loads(attndsl("check", "train.yaml", "--key", "model.attention", "--json").out)
    assert found["descriptions"] == [
        {"file": "train.yaml", "name": "near", "description": "Rows near the diagonal."}
    ]


SIZES = ("--q-len", "16", "--head-dim", "8")


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (("check",), "2 programs: no errors"),
        (("show", "--name", "near", "--stage", "ir"), "q - kv < 3"),
        (("explain", "--name", "near", "--verbose"), "q - kv < 3"),
        (("run", "--name", "near", "--no-check", *SIZES), "near: cpu on cpu"),
        (("plot", "--name", "near"), "Rows near the diagonal."),
        (("plot", "--name", "far"), "causal()"),
        (("warmup", "--device", "cpu", "--dtype", "fp32", *SIZES), "2 programs on cpu"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_every_command_that_reads_configurations_takes_a_key(attndsl, tree, command, part):
    tree({"train.yaml": CONFIG})
    name, *options = command
    done = attndsl(name, "train.yaml", "--key", "model.attention", *options)
    assert done.code == 0, done.err
    assert part in done.out
    done = attndsl(name, "train.yaml", "--key", "model.atention", *options)
    assert done.code == 1
    assert "did you mean 'attention'? its keys are: attention" in done.out + done.err
    done = attndsl(name, "train.yaml", "--key", "model..attention", *options)
    assert (done.code, done.out) == (2, "")
    assert "no names with dots between them" in " ".join(done.err.split())
    if name != "check":  # It takes files of both kinds together.
        tree({"a.attn": "causal()"})
        done = attndsl(name, "a.attn", "--key", "model.attention")
        assert (done.code, done.out) == (2, "")
        assert "--key is given, and a.attn is no configuration" in done.err
    done = attndsl(name, "train.yaml", *options)
    assert done.code == 1
    assert "programs stand at model.attention" in done.out + done.err
