"""Anchors, aliases and merge keys of YAML, and numbers that YAML writes in its own ways."""

from __future__ import annotations

import pytest

import attndsl
from attndsl.config import MAX_NODES, read_config
from attndsl.errors import AttnDSLError, ConfigError

ALIASES = """
base: &base {window: 16, cap: 5.0}
text: &text |
  mask = causal() and q - kv < window
  score = softcap(score, cap)
near: &near {program: *text, params: *base, description: near rows}
attention:
  first: *near
  second: {program: *text, params: {<<: *base, window: 1e3}}
  third:
    <<: *near
    params: {window: &wide 32, cap: 1}
  fourth: {program: *text, params: {window: *wide, cap: 1}}
  fifth: {<<: [{params: {cap: 2, window: 2}}, *near], description: both}
"""


@pytest.fixture
def read(tmp_path):
    """``read(text, key)``: the entries of a file of that text, by name."""

    def found(text, key=None):
        path = tmp_path / "a.yaml"
        path.write_text(text)
        return {entry.name: entry for entry in read_config(path, key)}

    return found


def _params(entry):
    return {name: bound.value for name, bound in entry.params.items()}


def test_aliases_stand_for_what_they_name(read, tmp_path):
    found = read(ALIASES, "attention")
    text = "mask = causal() and q - kv < window\nscore = softcap(score, cap)\n"
    assert all(entry.text == text for entry in found.values())
    assert {name: _params(entry) for name, entry in found.items()} == {
        "first": {"window": 16, "cap": 5.0},
        "second": {"window": 1000.0, "cap": 5.0},
        "third": {"window": 32, "cap": 1},
        "fourth": {"window": 32, "cap": 1},
        "fifth": {"window": 2, "cap": 2},
    }
    assert found["third"].description == "near rows"
    assert found["fifth"].description == "both"
    assert len(attndsl.load(tmp_path / "a.yaml", key="attention")) == 5


def test_errors_point_to_the_anchor(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(ALIASES.replace("softcap", "softcp"))
    with pytest.raises(AttnDSLError) as caught:
        attndsl.load(path, key="attention")
    assert {error.span.line for error in caught.value.errors} == {5}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a: &x |\n  causl()\n", 2),
        ("a: &x\n  |\n  causl()\n", 3),
        ("a: !!str &x\n  >-\n  causl()\n", 3),
        ("a: &x\n  causl()\n", 2),
        ("a:\n  &x 'causl()'\n", 2),
    ],
)
def test_lines_of_texts_with_anchors(tmp_path, text, line):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(AttnDSLError, match="causl") as caught:
        attndsl.load(path)
    assert caught.value.span.line == line


def test_a_merge_key_in_quotes_is_a_name(read):
    with pytest.raises(ConfigError, match="unknown key '<<'"):
        read("a: {'<<': {program: causal()}, program: causal()}")
    assert list(read("'<<': causal()")) == ["<<"]


def test_the_programs_themselves_may_be_merged(read):
    found = read("all: &all {a: causal(), b: causal()}\nm: {<<: *all, b: q - kv < 3}", "m")
    assert {name: entry.text for name, entry in found.items()} == {
        "a": "causal()",
        "b": "q - kv < 3",
    }


def _laughs(first: str, between: str, last: str) -> str:
    lines = [f"x0: &x0 {first}"]
    for number in range(1, 12):
        lines.append(
            f"x{number}: &x{number} {between.replace('*', ', '.join([f'*x{number - 1}'] * 9))}"
        )
    return "\n".join(lines) + f"\nm: {last.replace('*', '*x11')}\n"


LAUGHS = {
    "lists": (_laughs("[q, q]", "[*]", "{a: {program: *}}"), "is no text: a list"),
    "params": (_laughs("{w: 1}", "{<<: [*]}", "{a: {program: q, params: *}}"), "aliases written"),
    "merges": (_laughs("{a: causal()}", "{<<: [*]}", "*"), "aliases written out"),
    "a circle": ("m: &m {a: causal(), <<: *m}", "merge keys nest too deeply"),
    "a circle of entries": ("m: &m {a: *m}", "unknown key 'a'"),
    "no mapping": ("m: {<<: 3, a: causal()}", "a merge key names what is no mapping"),
    "no mappings": ("m: {a: {<<: [{program: q}, 3]}}", "a merge key names what is no mapping"),
    "no anchor": ("m: {a: *x}", "undefined alias"),
    "many": ("t: &t q\nm: {" + ", ".join(f"a{i}: *t" for i in range(1100)) + "}", "1000 entries"),
    "many keys": (
        "t: &t {program: q, params: {" + ", ".join(f"w{i}: 1" for i in range(100)) + "}}\n"
        "m: {" + ", ".join(f"a{i}: *t" for i in range(70)) + "}",
        "more than 6000 keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAUGHS)
def test_aliases_expand_to_a_limit(read, name, quickest):
    text, message = LAUGHS[name]

    def refuse() -> None:
        with pytest.raises(ConfigError, match=message) as caught:
            read(text, "m")
        assert len(str(caught.value)) < 2000

    assert quickest(refuse) < 2.0


def test_aliases_elsewhere_are_nobodys_business(read):
    text = (
        _laughs("[q, q]", "[*]", "*").replace("m:", "rest:") + "circle: &c [*c]\nm: {a: causal()}"
    )
    assert list(read(text, "m")) == ["a"]
    assert MAX_NODES < 9**11


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("1e3", 1000.0), ("-1E+2", -100.0), (".5e1", 5.0), ("2.e1", 20.0), ("1.0e+3", 1000.0),
        ("16.0", 16.0), ("1_000", 1000), ("0x10", 16), ("true", True), (".inf", float("inf")),
        ("'1e3'", None), ("1e3x", None), ("e3", None), ("1:30", None), ("'16'", None), ("", None),
    ],
)  # fmt: skip
def test_numbers(read, written, number):
    text = f"a: {{program: q - kv < w, params: {{w: {written}}}}}"
    if number is None:
        with pytest.raises(ConfigError, match="not all names with numbers"):
            read(text)
    else:
        value = read(text)["a"].params["w"].value
        assert (value, type(value)) == (number, type(number))
