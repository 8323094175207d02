"""What a configuration says of its programs to people."""

from __future__ import annotations

import json

import jsonschema
import pytest

import attndsl
from attndsl.cli.program_inputs import read_program
from attndsl.config import MAX_DESCRIPTION, read_config
from attndsl.errors import ConfigError

TEXT = "Rows near\nthe diagonal, \N{SNOWMAN}."
FILES = {
    "a.yaml": "a: {program: causal(), description: 'Rows near\n\n  the diagonal, \N{SNOWMAN}.'}",
    "a.toml": f"a = {{program = 'causal()', description = {json.dumps(TEXT)}}}",
    "a.json": json.dumps({"a": {"program": "causal()", "description": TEXT}}),
}


@pytest.mark.parametrize("name", FILES)
def test_descriptions_are_kept(tmp_path, name):
    path = tmp_path / name
    path.write_text(FILES[name], "utf-8")
    assert read_config(path)[0].description == TEXT
    assert read_program(str(path), None).description == TEXT
    assert attndsl.load(path) == attndsl.load({"a": "causal()"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "the description of '<mapping>:a' is no text: 3"),
        (["x"], "the description of '<mapping>:a' is no text: a list"),
        ("x" * (MAX_DESCRIPTION + 1), "has more than 4096 characters"),
        ("\ud800", "holds half a letter"),
    ],
)
def test_descriptions_are_texts_to_a_limit(value, message):
    with pytest.raises(ConfigError, match=message):
        read_config({"a": {"program": "causal()", "description": value}})
    with pytest.raises(ConfigError, match="has no program"):
        read_config({"a": {"description": "x"}})


def test_the_schema_knows_them():
    from importlib import resources

    text = resources.files("attndsl.grammar").joinpath("config.schema.json").read_text("utf-8")
    schema = json.loads(text)
    jsonschema.validate({"a": {"program": "causal()", "description": TEXT}}, schema)
    for bad in (3, "x" * (MAX_DESCRIPTION + 1)):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"a": {"program": "causal()", "description": bad}}, schema)
