"""What a configuration of many params costs, and what it may not say."""

from __future__ import annotations

import inspect
import json

import pytest
import torch

import attndsl
from attndsl import cli
from attndsl.call.options import CALL_ARGUMENTS
from attndsl.config import read_config
from attndsl.errors import ArgumentError, ConfigError
from attndsl.runtime.program_store import make_spec


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
    "params",
    "tensors",
    "key",
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
    assert (end.value.code, capsys.readouterr().out) == (0, "12 programs: no errors\n")
    q = torch.zeros(1, 1, 8, 4)
    wanted = attndsl.compile("0 <= q - kv < 4")(q, q, torch.eye(8)[None, None])
    for attention in attndsl.load(path).values():
        assert torch.equal(attention(q, q, torch.eye(8)[None, None]), wanted)


@pytest.mark.parametrize("argument", ["name", "exact", "checked"])
def test_python_says_how_to_give_a_param_called_like_an_argument(argument):
    text = f"param {argument}: int = 1\nq - kv < {argument}"
    with pytest.raises(ArgumentError, match=f"{argument}= is an argument of compile") as caught:
        attndsl.compile(text, **{argument: 4})
    assert f"params={{'{argument}': ...}}" in caught.value.hint
    q = torch.zeros(1, 1, 8, 4)
    given = attndsl.compile(text)(q, q, torch.eye(8)[None, None], **{argument: 4})
    assert torch.equal(given, attndsl.compile("q - kv < 4")(q, q, torch.eye(8)[None, None]))


@pytest.mark.parametrize("name", ARGUMENTS)
def test_mappings_give_names_of_any_kind(name):
    q = torch.randn(1, 2, 8, 4)
    bound = attndsl.compile("mask = q - kv < 4")
    found = attndsl.compile(f"mask = q - kv < {name}", params={name: 4})
    assert torch.equal(found(q, q, q), bound(q, q, q))
    wanted = attndsl.compile("mask = q - kv < 4; score = score * t[h]", t=torch.ones(2))
    text = f"mask = q - kv < 4; score = score * {name}[h]"
    early = attndsl.compile(text, tensors={name: torch.ones(2)})
    late = attndsl.compile(text, tensors={name: attndsl.tensor("heads")})
    assert torch.equal(early(q, q, q), wanted(q, q, q))
    assert torch.equal(late(q, q, q, captures={name: torch.ones(2)}), wanted(q, q, q))


def test_mappings_and_keywords_mean_the_same():
    gain, cap = torch.rand(2), torch.tensor(3.0)
    text = "mask = q - kv < w; score = cap * tanh(gain[h] * score / cap)"
    wanted = attndsl.compile(text, w=4, gain=gain, cap=cap)
    assert attndsl.compile(text, params={"w": 4, "cap": cap}, tensors={"gain": gain}) == wanted
    assert attndsl.compile(text, params={"w": 4}, gain=gain, cap=cap) == wanted
    assert attndsl.compile("causal()", params={}, tensors=None) == attndsl.compile("causal()")


@pytest.mark.parametrize(
    ("given", "message", "hint"),
    [
        ({"params": {"w": 4}, "w": 4}, "w is given twice", "keep one"),
        ({"params": {"w": 4}, "tensors": {"w": torch.ones(2)}}, "w is given twice", "keep one"),
        ({"params": 4}, "params is a int that is no mapping", 'pass params={"name": ...}'),
        ({"tensors": torch.ones(2)}, "tensors is a Tensor that", 'pass tensors={"name": ...}'),
        ({"params": {4: 4}}, "params is a dict that is no mapping from names", "pass params="),
        ({"params": {"w": torch.ones(2)}}, "w in params is a Tensor with dims", "in tensors"),
        ({"params": {"w": attndsl.tensor("heads")}}, "w in params is a TensorSpec", "in tensors"),
        ({"tensors": {"w": 4}}, "w in tensors is a int", "pass numbers and 0-d tensors in params"),
        ({"tensors": {"w": torch.tensor(4)}}, "w in tensors is a Tensor", "0-d tensors in params"),
        ({"params": {"w": "4"}}, "w is a str", "pass a number"),
    ],
    ids=str,
)  # fmt: skip
def test_what_mappings_of_compile_refuse(given, message, hint):
    with pytest.raises(ArgumentError) as caught:
        attndsl.compile("q - kv < w", **given)
    assert caught.value.message.startswith(message)
    assert hint in caught.value.hint


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
