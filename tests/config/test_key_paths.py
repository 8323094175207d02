"""Programs at a key of a larger configuration: how keys are written, and what may stand around."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import attndsl
from attndsl.config import MAX_DEPTH, MAX_NODES, read_config
from attndsl.config.key_paths import key_of, key_parts
from attndsl.errors import ArgumentError, AttnDSLError, ConfigError

YAML = """
# A training configuration.
seed: 3
model:
  width: 512
  layers:
    - attention: {first: causal()}
    - attention: {second: "q - kv < 3"}
  attention:
    global: causal()
    local:
      program: |
        mask = causal() and q - kv < window
        score = scor
      params: {window: 16}
  v1.2: {"a.b": {far: q - kv < 3}}
optimizer: {lr: 1.0e-3, betas: [0.9, .inf], steps: 1_000, when: 2001-01-01, what: !ours [1]}
"""
TOML = """
seed = 3
[model]
width = 512
[[model.layers]]
attention = {first = "causal()"}
[[model.layers]]
attention.second = "q - kv < 3"
[model.attention]
global = "causal()"
[model.attention.local]
program = "mask = causal() and q - kv < window"
params = {window = 16}
[model."v1.2"."a.b"]
far = "q - kv < 3"
[optimizer]
lr = 1e-3
betas = [0.9, inf]
big = 1e999
when = 2001-01-01
"""
JSON = json.dumps(
    {
        "model": {
            "layers": [{"attention": {"first": "causal()"}}, {"attention": {"second": "q < 3"}}],
            "attention": {"global": "causal()", "local": {"program": "q - kv < 16"}},
            "v1.2": {"a.b": {"far": "q - kv < 3"}},
        },
        "optimizer": {"lr": 1e-3, "betas": [0.9, float("inf")], "none": float("nan")},
    }
).replace('"model"', '"twice": 1, "twice": 2, "model"', 1)
FILES = {"yaml": YAML, "toml": TOML, "json": JSON}


@pytest.fixture(params=FILES)
def path(request, tmp_path):
    found = tmp_path / f"train.{request.param}"
    found.write_text(FILES[request.param])
    return found


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("model.attention", ["global", "local"]),
        ("'model'.\"attention\"", ["global", "local"]),
        ("model.layers.0.attention", ["first"]),
        ("model.layers.1.attention", ["second"]),
        ('model."v1.2"."a.b"', ["far"]),
        ("model.'v1.2'.'a.b'", ["far"]),
    ],
)
def test_programs_at_a_key(path, key, names):
    assert [entry.name for entry in read_config(path, key)] == names


def test_load_at_a_key(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(YAML.replace("scor\n", "score\n"))
    programs = attndsl.load(path, key="model.attention")
    assert list(programs) == ["global", "local"]
    assert programs["global"] == attndsl.compile("causal()")


def test_errors_at_a_key_name_lines_of_the_file(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_text(YAML)
    with pytest.raises(AttnDSLError) as caught:
        attndsl.load(path, key="model.attention")
    assert str(caught.value).startswith(f"{path}:14:9: 'scor' is not declared")


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_errors_at_a_key_name_the_program(tmp_path, suffix):
    path = tmp_path / f"train.{suffix}"
    path.write_text(FILES[suffix].replace("causal()", "causl()"))
    with pytest.raises(AttnDSLError) as caught:
        attndsl.load(path, key="model.attention")
    error = getattr(caught.value, "errors", [caught.value])[0]
    assert str(error).startswith(f"{path}:model.attention.global:1:1: there is no function 'causl'")


@pytest.mark.parametrize(
    ("key", "message", "hint"),
    [
        ("modl.attention", "has no key 'modl'", "did you mean 'model'? its keys are: "),
        ("model.atention", "has no key 'atention'", "did you mean 'attention'? its keys are: "),
        ("model.v1.2", "has no key 'v1'", "did you mean '\"v1.2\"'? its keys are: "),
        ("model.x", "'model' in ", "layers, attention"),
        ("model.layers.2", "is a list, and has no element '2'", "its elements are 0 to 1"),
        ("model.layers.a", "is a list, and has no element 'a'", "its elements are 0 to 1"),
        ("optimizer.lr.x", "is no mapping, and has no key 'x'", "it holds "),
        ("optimizer.lr", "'optimizer.lr' in ", "write 'name: program' entries"),
        ("model.layers", "'model.layers' in ", "programs stand at model.layers.0.attention"),
    ],
)
def test_a_key_that_leads_nowhere(path, key, message, hint):
    with pytest.raises(ConfigError) as caught:
        read_config(path, key)
    assert message in caught.value.message
    assert path.name in caught.value.message
    assert hint in caught.value.hint
    assert (caught.value.span is not None) == (path.suffix == ".yaml")


@pytest.mark.parametrize("key", ["", ".", "a.", ".a", "a..b", '"a', 'a."b"c', "'a", 3, ["a"]])
def test_what_is_no_key(path, key):
    with pytest.raises(ArgumentError, match="key"):
        read_config(path, key)


@given(st.lists(st.text().filter(lambda part: not {"'", '"'} <= set(part)), min_size=1))
def test_every_name_can_be_written(parts):
    assert key_parts(key_of(tuple(parts))) == tuple(parts)


def test_who_names_no_key_is_told_where_programs_stand(path):
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert caught.value.message == f"{path} is no mapping of names to programs"
    assert "key='model.attention' in Python or --key model.attention" in caught.value.hint


def test_who_names_too_short_a_key_is_told_a_longer_one(path):
    with pytest.raises(ConfigError) as caught:
        read_config(path, "model")
    assert caught.value.message == f"'model' in {path} is no mapping of names to programs"
    assert caught.value.hint.startswith("programs stand at model.attention: ")


def test_program_files_have_no_keys(tmp_path):
    path = tmp_path / "local.attn"
    path.write_text("causal()")
    assert list(attndsl.load(path)) == ["local"]
    with pytest.raises(ConfigError, match="is a program file, and has no key 'a'"):
        attndsl.load(path, key="a")


def test_programs_at_a_key_import_files_beside_theirs(tmp_path):
    (tmp_path / "near.attn").write_text("def near(n) = causal() and q - kv < n\n")
    path = tmp_path / "train.yaml"
    path.write_text('m:\n  a: |\n    import "near.attn"\n    mask = near(3)\n')
    assert list(attndsl.load(path, key="m")) == ["a"]
    with pytest.raises(AttnDSLError, match="this text stands in no file"):
        attndsl.load({"a": 'import "near.attn"\nmask = near(3)'})


def test_a_file_of_programs_is_told_its_own_errors(tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text("a: {program: causal(), parms: {w: 3}}\nb: {c: {program: causal()}}")
    with pytest.raises(AttnDSLError) as caught:
        read_config(path)
    assert "unknown key 'parms'" in str(caught.value)


def test_a_name_on_the_way_stands_once(tmp_path):
    for name, text in (
        ("a.yaml", "m: {a: causal()}\nm: {a: causal()}\n"),
        ("a.json", '{"m": {"a": "causal()"}, "m": {"a": "causal()"}}'),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="the key 'm' stands twice"):
            read_config(tmp_path / name, "m")


@pytest.mark.parametrize("suffix", FILES)
def test_the_rest_may_nest_to_a_limit(tmp_path, suffix):
    def text(depth):
        rest = "[" * depth + "]" * depth
        return {
            "yaml": f"rest: {rest}\nm: {{a: causal()}}\n",
            "toml": f"rest = {rest}\nm.a = 'causal()'\n",
            "json": f'{{"rest": {rest}, "m": {{"a": "causal()"}}}}',
        }[suffix]

    path = tmp_path / f"deep.{suffix}"
    path.write_text(text(MAX_DEPTH - 1))
    assert [entry.name for entry in read_config(path, "m")] == ["a"]
    path.write_text(text(MAX_DEPTH + 2))
    with pytest.raises(ConfigError, match="nests too deeply"):
        read_config(path, "m")


def test_the_rest_may_be_long_to_a_limit(tmp_path):
    path = tmp_path / "long.yaml"
    path.write_text(f"rest: [{'1, ' * 3000}]\nm: {{a: causal()}}\n")
    assert len(read_config(path, "m")) == 1
    many = {f"k{number}": number for number in range(8000)}
    path.write_text(json.dumps({**many, "m": {"a": "causal()"}}))
    assert len(read_config(path, "m")) == 1
    assert len(read_config({**many, "m": {"a": "causal()"}}, "m")) == 1
    path.write_text(f"rest: [{'1, ' * MAX_NODES}]\nm: {{a: causal()}}\n")
    with pytest.raises(ConfigError, match=f"more than {MAX_NODES} names and values"):
        read_config(path, "m")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", '{"m": {"a": {"program": "q < w", "params": {"w": NaN}}}}', "'NaN' is not JSON"),
        ("a.json", '{"m": {"a": {"program": "q", "params": {"w": 1e999}}}}', "too large"),
        ("a.json", '{"m": {"a": "causal()", "a": "causal()"}}', "'a' stands twice"),
        ("a.toml", "m.a = {program = 'q', params = {w = 1e999}}", "too large"),
        ("a.yaml", "m: {a: {program: q, params: {w: 1e999}}}", "not all names with numbers"),
    ],
)
def test_what_stands_at_the_key_is_held_to_the_form(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / name, "m")
