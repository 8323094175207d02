"""What a configuration of many params costs, and what it may not say."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

import attndsl
from attndsl import cli
from attndsl.config import read_config
from attndsl.errors import ArgumentError, ConfigError
from attndsl.frontend.declare import CALL_ARGUMENTS
from attndsl.runtime.programs import make_spec


def test_params_of_a_long_line_do_not_carry_it_each(tmp_path):
    path = tmp_path / "many.yaml"
    params = ", ".join(f"w{number}: 1" for number in range(400))
    path.write_text(f"{{a: {{program: 'q >= kv', params: {{{params}}}}}}} # {'x' * 40_000}")
    (entry,) = read_config(path)
    assert len(entry.params) == 400
    assert len(make_spec(entry.text, entry.params)) < 100_000


def test_a_param_stands_once(tmp_path):
    path = tmp_path / "twice.yaml"
    path.write_text("a:\n  program: q - kv < w\n  params: {w: 3, w: 4}\n")
    with pytest.raises(ConfigError, match="'w' stands twice"):
        attndsl.load(path)


ARGUMENTS = (
    "text",
    "backend",
    "name",
    "checked",
    "exact",
    "first_line",
    "names",
    "path",
    "options",
)


@pytest.mark.parametrize("suffix", ["json", "yaml", "toml"])
def test_params_may_be_called_like_arguments_of_compile(tmp_path, monkeypatch, capsys, suffix):
    entries = {arg: {"program": f"0 <= q - kv < {arg}", "params": {arg: 4}} for arg in ARGUMENTS}
    path = tmp_path / f"model.{suffix}"
    tables = (f'[{arg}]\nprogram = "0 <= q - kv < {arg}"\nparams.{arg} = 4' for arg in entries)
    path.write_text("\n".join(tables) if suffix == "toml" else json.dumps(entries))
    monkeypatch.setattr("sys.argv", ["attndsl", "check", str(path)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert (end.value.code, capsys.readouterr().out) == (0, "9 programs: no errors\n")
    q = torch.zeros(1, 1, 8, 4)
    wanted = attndsl.compile("0 <= q - kv < 4")(q, q, torch.eye(8)[None, None])
    for attention in attndsl.load(path).values():
        assert torch.equal(attention(q, q, torch.eye(8)[None, None]), wanted)


@pytest.mark.parametrize("argument", ["name", "exact", "checked"])
def test_python_says_how_to_give_a_param_called_like_an_argument(argument):
    text = f"param {argument}: int = 1\nq - kv < {argument}"
    with pytest.raises(ArgumentError, match=f"{argument}= is an argument of compile") as caught:
        attndsl.compile(text, **{argument: 4})
    assert f"param {argument}: int = 4" in caught.value.hint
    q = torch.zeros(1, 1, 8, 4)
    given = attndsl.compile(text)(q, q, torch.eye(8)[None, None], **{argument: 4})
    assert torch.equal(given, attndsl.compile("q - kv < 4")(q, q, torch.eye(8)[None, None]))


@pytest.mark.parametrize("text", ["param mask: float", "score = tanh(where(q > kv, score, -inf))"])
def test_what_load_refuses_check_refuses(tmp_path, monkeypatch, capsys, text):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"a": text}))
    with pytest.raises(attndsl.AttnDSLError) as caught:
        attndsl.load(path)
    monkeypatch.setattr("sys.argv", ["attndsl", "check", str(path)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert str(caught.value) in capsys.readouterr().out


def test_calls_have_the_arguments_that_names_are_held_to():
    names = set(inspect.signature(attndsl.Attention.__call__).parameters)
    assert names - {"named"} == CALL_ARGUMENTS
