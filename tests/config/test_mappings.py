"""Programs in mappings: dicts, whatever else is a Mapping, and OmegaConf's configs."""

from __future__ import annotations

import json
from collections import UserDict
from types import MappingProxyType

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

import attndsl
from attndsl.config import read_config
from attndsl.errors import ArgumentError, AttnDSLError, ConfigError, ProgramErrors

PROGRAMS = {
    "global": "causal()",
    "local": {"program": "causal() and q - kv < window", "params": {"window": 4}},
}


@pytest.mark.parametrize("kind", [dict, UserDict, MappingProxyType, OmegaConf.create])
def test_every_mapping_is_taken(kind):
    found = attndsl.load(kind(PROGRAMS))
    assert list(found) == ["global", "local"]
    assert found["local"] == attndsl.compile(PROGRAMS["local"]["program"], window=4)
    whole = {"model": {"attention": PROGRAMS}, "rest": [None, object(), {3: 4}]}
    if kind is not OmegaConf.create:
        assert attndsl.load(kind(whole), key="model.attention") == found


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_file_may_name_a_number_of_its_own_by_its_key(tmp_path, suffix):
    local = {"program": "q - kv < window", "params": {"window": "${model.sizes.0}"}}
    path = tmp_path / f"train.{suffix}"
    path.write_text(json.dumps({"model": {"sizes": [4], "attention": {"local": local}}}))
    found = attndsl.load(path, key="model.attention")
    assert found["local"] == attndsl.compile("q - kv < window", window=4)


@pytest.mark.parametrize(
    "text", ["${nothing}", "${a}", "${a.n.params.w}", "${.x}", "${oc.env:HOME}", "${x}0", "${word}"]
)
def test_what_no_number_of_the_file_is_stays_an_error(text):
    config = {"a": {"n": {"program": "q < w", "params": {"w": text}}}, "x": 3, "word": "three"}
    with pytest.raises(ConfigError, match="are not all names with numbers") as caught:
        attndsl.load(config, key="a")
    assert "stands for a number of this file" in caught.value.hint


def test_interpolations_are_resolved():
    config = OmegaConf.create(
        """
        model:
          window: 4
          unset: "???"
          attention:
            local: {program: causal() and q - kv < window, params: {window: "${model.window}"}}
            other: "causal() and q - kv < ${model.window}"
            third: {program: "${model.attention.other}"}
        broken: "${nothing}"
        """
    )
    wanted = attndsl.compile("causal() and q - kv < window", window=4)
    q = torch.randn(1, 1, 9, 4)
    for found in (
        attndsl.load(config.model.attention),
        attndsl.load(config, key="model.attention"),
    ):
        assert list(found) == ["local", "other", "third"]
        for attention in found.values():
            assert torch.equal(attention(q, q, q), wanted(q, q, q))
    with pytest.raises(ConfigError, match="has no key 'atention'") as caught:
        attndsl.load(config, key="model.atention")
    assert "did you mean 'attention'? its keys are: window, unset, attention" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {program: q < w, params: {w: '${nothing}'}}", "'w' cannot be read: InterpolationKey"),
        ("a: {program: '${nothing}'}", "'program' cannot be read: InterpolationKey"),
        ("a: '${nothing}'", "'a' cannot be read: InterpolationKeyError"),
        ("a: '???'", "'a' cannot be read: MissingMandatoryValue"),
    ],
)
def test_what_a_mapping_cannot_give_is_told(text, message):
    with pytest.raises(ConfigError, match=f"^<mapping>: {message}"):
        attndsl.load(OmegaConf.create(text))


class Hostile(dict):
    def __iter__(self):
        raise RuntimeError("no\nkeys")


class Endless(dict):
    def __iter__(self):
        while True:
            yield "a"


def test_mappings_that_do_not_behave():
    with pytest.raises(
        ConfigError, match="<mapping>: a mapping has no keys: RuntimeError: no keys"
    ):
        attndsl.load(Hostile())
    with pytest.raises(ConfigError, match="more than 1000 entries"):
        attndsl.load(Endless(a="causal()"))
    circle = {"a": "causal()"}
    circle["b"] = circle
    with pytest.raises(ProgramErrors, match="unknown key 'a'"):
        attndsl.load({"c": circle})
    assert list(attndsl.load({"rest": circle, "m": PROGRAMS}, key="m")) == ["global", "local"]


@pytest.mark.parametrize("window", [16, 16.0, 1e1, np.int64(16), np.float32(16), np.array(16)])
def test_numbers_of_mappings(window):
    text = "param window: int; mask = q - kv < window"
    found = attndsl.load({"a": {"program": text, "params": {"window": window}}})["a"]
    assert found.lowered.digest == attndsl.compile(text, window=int(window)).lowered.digest
    bound = read_config({"a": {"program": text, "params": {"w": np.bool_(True)}}})[0].params["w"]
    assert bound.value is True


@pytest.mark.parametrize("number", ["1e3", "1000.0", "1000", "1E+3"])
@pytest.mark.parametrize("suffix", ["yaml", "toml", "json"])
def test_numbers_of_files(tmp_path, suffix, number):
    text = '{"a": {"program": "param w: int; q - kv < w", "params": {"w": NUMBER}}}'
    if suffix == "toml":
        text = 'a = {program = "param w: int; q - kv < w", params = {w = NUMBER}}'
    path = tmp_path / f"a.{suffix}"
    path.write_text(text.replace("NUMBER", number))
    wanted = attndsl.compile("param w: int; q - kv < w", w=1000)
    assert attndsl.load(path)["a"].lowered.digest == wanted.lowered.digest
    path.write_text(text.replace("NUMBER", "16.5"))
    with pytest.raises(AttnDSLError, match=r"'w' is of type int, and 16\.5 is not"):
        attndsl.load(path)


def test_errors_of_mappings_come_at_once_and_name_the_program():
    bad = {"a": "causl()", "b": {"program": "q - kv < w", "params": {"v": 1}}, "c": "causal()"}
    with pytest.raises(ProgramErrors) as caught:
        attndsl.load({"model": bad}, key="model")
    assert [str(error).splitlines()[0] for error in caught.value.errors] == [
        "<mapping>:model.a:1:1: there is no function 'causl'",
        "'v' is bound in the params of '<mapping>:model.b', but the program never uses it",
        "<mapping>:model.b:1:10: 'w' is not declared",
    ]


BAD = [
    ({3: "causal()"}, "a name in <mapping> is no text", "write 'name: program'"),
    ({"a": 3}, "the program of '<mapping>:a' is no text: 3", "write the program as a string"),
    ({"a": None}, "the program of '<mapping>:a' is no text: nothing", "write the program"),
    ({"a": ["q"]}, "the program of '<mapping>:a' is no text: a list", "write the program"),
    ({"a": {}}, "'<mapping>:a' has no program", "write program: "),
    ({"a": {"progam": "q"}}, "'<mapping>:a' has an unknown key 'progam'", "mean 'program'?"),
    ({"a": {"program": {"b": "q"}}}, "the program of '<mapping>:a' is no text: a mapping", "write"),
    ({"a": {"program": "q", "params": {"w": torch.tensor(3)}}}, "the params of '<mapping>:a'", ""),
    ({"a": {"program": "q", "params": {"w": "${x}"}}}, "the params of '<mapping>:a'", "OmegaConf"),
    ({"a": {"program": "q", "params": {3: 3}}}, "the params of '<mapping>:a' are not all", "write"),
    ({"a": {"program": "q", "params": [3]}}, "the params of '<mapping>:a' are not all", "write"),
    ({"a.b": 3}, "the program of '<mapping>:a.b' is no text", "write the program"),
    ({"program": "q < w", "params": {"w": 3}}, "<mapping> holds one program, which has", "{name: "),
]


@pytest.mark.parametrize(("given", "message", "hint"), BAD, ids=str)
def test_what_is_not_of_the_form(given, message, hint):
    with pytest.raises(ConfigError) as caught:
        attndsl.load(given)
    assert caught.value.message.startswith(message)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("given", "kind", "hint"),
    [
        ("a: causal()\n", ConfigError, "load(yaml.safe_load(text))"),
        ("a: causal()", ConfigError, "load(yaml.safe_load(text))"),
        ('{"a": "causal()"}', ConfigError, "load(json.loads(text))"),
        ('a = "causal()"', ConfigError, "load(tomllib.loads(text))"),
        ("a: causal()\n" * 1000, ConfigError, "load(yaml.safe_load(text))"),
        ("causal()", ConfigError, "attndsl.compile(text)"),
        (None, ArgumentError, "pass the path"),
        (b"model.yaml", ArgumentError, "pass the path"),
        (["causal()"], ArgumentError, "pass the path"),
    ],
    ids=str,
)
def test_what_is_neither_a_path_nor_a_mapping(given, kind, hint):
    with pytest.raises(kind) as caught:
        attndsl.load(given)
    assert hint in caught.value.hint
    assert len(str(caught.value)) < 400


def test_names_of_files_may_look_like_texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "a: b = {c}.yaml"
    (tmp_path / name).write_text("a: causal()\n")
    assert list(attndsl.load(name)) == ["a"]
    with pytest.raises(AttnDSLError, match="cannot read"):
        attndsl.load("no: such = {file}.yaml")
