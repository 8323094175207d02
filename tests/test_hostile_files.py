"""Files that no model has: each ends in one clear error, at once, and commands no terminal."""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from pathlib import Path

import pytest

import attndsl
from attndsl import AttnDSLError, cli, config
from attndsl.config import read_config
from attndsl.config.json_toml import _TOML_TOKENS, check_nesting
from attndsl.errors import ConfigError, visible
from attndsl.foundation import bounded_io

SECONDS = 1.0
NAMED = {"json": "{{{}}}", "yaml": "{{{}}}", "toml": "{}"}


@pytest.fixture
def check(tmp_path, monkeypatch, capsys):
    """``check(path)``: exit code and all output of the command."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["attndsl", "check", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return end.value.code, "".join(capsys.readouterr())

    return run


def _entries(suffix: str, count: int) -> str:
    pairs = [f'"a{i}"{"=" if suffix == "toml" else ": "}"causal()"' for i in range(count)]
    return NAMED[suffix].format(("\n" if suffix == "toml" else ",").join(pairs))


@pytest.mark.parametrize("suffix", NAMED)
def test_a_file_has_as_many_entries_as_its_schema_says(tmp_path, suffix):
    schema = json.loads((Path(__file__).parents[1] / "grammar/config.schema.json").read_text())
    assert schema["$defs"]["programs"]["maxProperties"] == config.MAX_ENTRIES
    path = tmp_path / f"model.{suffix}"
    path.write_text(_entries(suffix, config.MAX_ENTRIES))
    assert len(read_config(path)) == config.MAX_ENTRIES
    path.write_text(_entries(suffix, config.MAX_ENTRIES + 1))
    with pytest.raises(ConfigError, match="more than 1000 entries"):
        read_config(path)


@pytest.mark.parametrize("suffix", NAMED)
def test_entries_of_all_their_keys_are_not_too_many(tmp_path, suffix):
    path = tmp_path / f"model.{suffix}"
    entry = {"program": "q - kv < near and kv - q < far", "params": {"near": 3, "far": 4}}
    if suffix == "toml":
        table = f'program = "{entry["program"]}"\nparams = {{near = 3, far = 4}}\n'
        path.write_text("".join(f"[a{i}]\n{table}" for i in range(1000)))
    else:
        path.write_text(json.dumps({f"a{i}": entry for i in range(1000)}))
    assert [e.params["far"].value for e in read_config(path)] == [4] * 1000


HOSTILE = {
    "dots.toml": "a" + ".a" * 50_000,
    "quoted dots.toml": "a" + " . 'a'" * 50_000 + " = 1",
    "dots of a table.toml": "[a" + ".a" * 50_000 + "]",
    "brackets.toml": "a = " + "[" * 100_000,
    "tables.toml": "a = " + "{a=" * 100_000,
    "strings.toml": '"""\\' * 100_000,
    "brackets.json": "[" * 500_000,
    "objects.json": '{"a":' * 100_000,
    "strings.json": '"\\' * 200_000,
    "keys.json": json.dumps({"a": {f"k{i}": 1 for i in range(50_000)}}),
    "constant.json": '{"a": {"program": "q - kv < w", "params": {"w": NaN}}}',
    "infinite.json": '{"a": {"program": "q - kv < w", "params": {"w": 1e999}}}',
    "infinite.toml": 'a = {program = "q - kv < w", params = {w = 1e999}}',
    "twice.json": '{"a": {"program": "q - kv < w", "params": {"w": 1, "w": 2}}}',
    "half a letter.json": '{"a": "causal() # \\ud800"}',
    "brackets.yaml": "[" * 100_000,
    "questions.yaml": "? " * 100_000,
    "base 60.yaml": "a: {program: q - kv < w, params: {w: 1" + ":0" * 5_000 + "}}",
    "time.yaml": "a: {program: q - kv < w, params: {w: 1:30}}",
    "empty int.yaml": "a: {program: q - kv < w, params: {w: !!int ''}}",
    "empty float.yaml": "a: {program: q - kv < w, params: {w: !!float ''}}",
    "no bool.yaml": "a: {program: q - kv < w, params: {w: !!bool x}}",
    "empty.yaml": "",
    "empty.json": "",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_at_once(tmp_path, name, quickest):
    path = tmp_path / name
    path.write_text(HOSTILE[name])

    def refuse() -> None:
        with pytest.raises(ConfigError) as caught:
            read_config(path)
        assert len(str(caught.value)) < 1000

    assert quickest(refuse) < SECONDS


def test_strings_of_toml_hide_what_they_hold(tmp_path):
    path, many = tmp_path / "model.toml", "[{" * (config.MAX_DEPTH + 1)
    path.write_text(
        f'a = "q >= kv # {many} {".a" * 80}"  # {many}\n'
        '[b."c.d"]\n'
        f'[c]\nprogram = """\n# {many} "quoted" \\" {".a" * 80}\nq >= kv # """""\n'
        f"[d]\nprogram = '''\nq >= kv # {many} ''''\nparams.w = 1.5\n"
    )
    text = path.read_text()
    check_nesting(text, "model.toml", _TOML_TOKENS)
    assert set(tomllib.loads(text)) == {"a", "b", "c", "d"}


@pytest.mark.parametrize("suffix", ["attn", "yaml", "toml", "json"])
def test_only_files_and_pipes_with_writers_are_read(tmp_path, check, suffix):
    zero, pipe = tmp_path / f"zero.{suffix}", tmp_path / f"pipe.{suffix}"
    zero.symlink_to("/dev/zero")
    os.mkfifo(pipe)
    begin = time.perf_counter()
    assert check(zero)[0] == 1
    assert "zero" in check(zero)[1]
    assert "is no regular file" in check(zero)[1]
    assert "is an empty pipe that nobody writes to" in check(pipe)[1]
    assert time.perf_counter() - begin < 10 * SECONDS
    large = tmp_path / f"large.{suffix}"
    large.write_bytes(b" " * (bounded_io.MAX_TEXT + 1))
    assert "is larger than 1048576 bytes" in check(large)[1]
    with pytest.raises(ConfigError, match="is a folder"):
        bounded_io.read_text(tmp_path)
    with pytest.raises(ConfigError, match="embedded null byte"):
        bounded_io.read_text("a\0b")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.attn", "causal()"),
        ("a.yaml", "a: causal()"),
        ("a.toml", 'a = "causal()"'),
        ("a.json", '{"a": "causal()"}'),
    ],
)
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, check, name, text):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert check(name) == (0, "1 program: no errors\n")


ESCAPE = "\x1b[31m\u202e\n[bold]"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", json.dumps({ESCAPE: "causl()"})),
        ("a.json", json.dumps({"a": f"causl() # {ESCAPE}"})),
        ("a.json", json.dumps({"a": {ESCAPE: 1, "program": "causal()"}})),
        ("a.json", json.dumps({"a": {"program": "causal()", "params": {ESCAPE: 1}}})),
        ("a.json", json.dumps({ESCAPE: 3})),
        ("a.yaml", json.dumps({ESCAPE: "causl()"})),
        ("a.yaml", json.dumps({ESCAPE: 3})),
        ("a.attn", f"mask = q >= kv {ESCAPE}"),
        ("a.attn", f"mask = q >= kv # {ESCAPE}"),
        (f"{ESCAPE}.attn", "causl()"),
        (f"{ESCAPE}.json", "["),
    ],
)
def test_nothing_in_a_file_reaches_the_terminal(tmp_path, check, name, text):
    (tmp_path / name).write_text(text)
    code, out = check(name)
    assert code == 1
    assert all(c.isprintable() or c == "\n" for c in out), repr(out)
    assert not any(line.startswith("[bold]") for line in out.splitlines())


def test_what_is_visible_stays_and_the_rest_is_escaped():
    assert visible("né [bold] 漢") == "né [bold] 漢"
    assert visible("\x1b\n\t\u202e\ud800") == "\\x1b\\n\\t\\u202e\\ud800"


@pytest.mark.parametrize("value", ["9223372036854775808", "9" * 400, ".nan"])
def test_params_have_values_that_a_literal_could_have(tmp_path, check, value):
    path = tmp_path / "a.yaml"
    path.write_text(f"a: {{program: q - kv < w, params: {{w: {value}}}}}")
    code, out = check(path)
    assert code == 1
    assert "'w' is bound in the params of 'a', and its value" in out
    with pytest.raises(AttnDSLError):
        attndsl.load(path)


@pytest.mark.parametrize(
    "given", ["n=1e999", "n=nan", "n=2.5", "n=true", "n=-1", "n=" + "9" * 5000]
)
def test_sizes_on_the_command_line_are_whole_numbers(given):
    from attndsl.cli.program_inputs import read_sizes
    from attndsl.cli.usage_errors import UsageError

    with pytest.raises(UsageError) as caught:
        read_sizes([given])
    assert len(str(caught.value)) < 200
    assert read_sizes(["n=8"]) == {"n": 8}


_DIGITS = "0x" + "f" * 5000
"""An int that Python writes no text of."""


@pytest.mark.parametrize(
    "text",
    [
        f"a = {_DIGITS}",
        f'[a]\nprogram = {_DIGITS}',
        f'[a]\nprogram = "q - kv < w"\nparams = {{w = {_DIGITS}}}',
        f'[a]\nprogram = "q - kv < w"\nparams = {{w = 0o{"7" * 7000}}}',
        f'a = {"9" * 5000}',
    ],
)  # fmt: skip
def test_ints_of_thousands_of_digits_are_refused(tmp_path, text):
    path = tmp_path / "model.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"64 bits|is not TOML"):
        attndsl.load(path)


def test_numbers_of_thousands_of_digits_are_refused():
    number = int(_DIGITS, 16)
    with pytest.raises(AttnDSLError, match="does not fit 64 bits"):
        attndsl.compile("q - kv < w", w=number)
    with pytest.raises(AttnDSLError, match="q_len has 20000 bits"):
        attndsl.compile("q >= kv").explain(q_len=number, kv_len=8)
    with pytest.raises(ConfigError, match="64 bits"):
        attndsl.load({"a": {"program": "q - kv < w", "params": {"w": -number}}})
