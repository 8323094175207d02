"""``attndsl check`` passes exactly what ``attndsl.load`` does, and both have the same errors.

Of generated configurations: good ones, bad ones, and texts that somebody has damaged.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import attndsl
from attndsl.cli.check_command import check, describe
from attndsl.cli.error_formats import Format
from attndsl.errors import AttnDSLError, flatten

NAMES = ["w", "name", "exact", "backend", "checked", "first_line", "text", "params", "q", "no name"]
GOOD = [
    "causal()", "q - kv < 3", "param w: int\nmask = q - kv < w", "param p: float\nscore * p",
    "tensor t[heads]: float\nscore = score * t[h]", "# nothing", "",
    {"program": "param w: int\nmask = q - kv < w", "params": {"w": 16.0}},
    {"program": "score = score * name + exact", "params": {"name": 0.5, "exact": 3}},
    {"program": "param on: bool\nmask = on or q > kv", "params": {"on": True}, "description": "x"},
    {"program": "q - kv < backend", "params": {"backend": 1e3}, "description": "\N{SNOWMAN}\nx"},
]  # fmt: skip
TEXTS = [
    "q - kv < w", "param w: int\nmask = q - kv < w", "score = score * w", "causl()", "q >= ",
    "param name: int = 3; mask = q - kv < name", "mask = q >= kv\nmask = ((", "\N{SNOWMAN}",
    "score = scor\nsink = q", "score = tanh(where(q > kv, score, -inf))", "param w: int = 2.5",
    "mask = q < w\nscore = score * first_line + backend", "x = 1; " * 3, "q" * 70,
]  # fmt: skip
numbers = st.one_of(
    st.integers(-3, 40), st.sampled_from([16.0, 0.5, 1e3, 1e30, -0.0, math.inf, math.nan, 2**63]),
    st.booleans(),
)  # fmt: skip
junk = st.sampled_from([None, "${x}", "1e3", [1], {"a": 1}, ""])
params = st.dictionaries(st.sampled_from(NAMES), st.one_of(numbers, numbers, numbers, junk))
good = st.sampled_from(GOOD)
bad = st.one_of(
    st.sampled_from(TEXTS),
    st.fixed_dictionaries(
        {"program": st.sampled_from(TEXTS)},
        optional={"params": params, "description": st.one_of(st.text(max_size=20), junk)},
    ),
    st.fixed_dictionaries(
        {}, optional={"program": junk, "params": st.one_of(params, junk), "progam": numbers}
    ),
    junk,
    numbers,
)
names = st.text("abz.\"'<é\n", max_size=4)
programs = st.one_of(
    st.dictionaries(names, good, max_size=4),
    st.dictionaries(names, st.one_of(good, good, good, bad), max_size=4),
)
cases = st.one_of(
    programs.map(lambda whole: (whole, None)),
    programs.map(lambda whole: ({"m": whole}, "m")),
    st.builds(lambda whole, rest: ({"rest": rest, "m": {"a.b": whole}}, 'm."a.b"'), programs, junk),
    st.tuples(
        st.one_of(programs, junk, st.fixed_dictionaries({"m": programs, "lr": numbers})),
        st.sampled_from([None, "m", "lr", "m.0", "m.a"]),
    ),
)
"""Configurations, and where in them programs stand."""


def _toml(value, depth=0):
    """``value`` as a TOML value; what TOML lacks is left to its reader to refuse."""
    if isinstance(value, dict):
        pairs = [f"{json.dumps(key)} = {_toml(inner, depth + 1)}" for key, inner in value.items()]
        return "\n".join(pairs) if depth == 0 else "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(inner, depth + 1) for inner in value) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)


WRITERS = {
    "json": json.dumps,
    "toml": _toml,
    "yaml": yaml.safe_dump,
    "yml": lambda value: yaml.safe_dump(value, default_flow_style=True, allow_unicode=True),
}


@st.composite
def damaged(draw, text):
    """``text``, of which some letters are left out, written twice, or others."""
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(text)))
        end = draw(st.integers(at, min(len(text), at + 3)))
        put = draw(
            st.sampled_from(["", "'", '"', ":", "{", "}", "\n", " ", "&x ", "*x", "<<", "[", ","])
        )
        text = text[:at] + put + text[draw(st.sampled_from([at, end])) :]
    return text


def verdict_of_check(path, key):
    """Errors that ``attndsl check`` reports."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = check([str(path)], {}, Format.JSON, key)
    found = json.loads(out.getvalue())
    assert code == (0 if found["ok"] else 1)
    assert found["ok"] == (not found["errors"])
    return found["errors"]


def verdict_of_load(path, key):
    """The same of ``attndsl.load``."""
    try:
        attndsl.load(str(path), key=key)
    except AttnDSLError as error:
        return [describe(str(path), each) for each in flatten(error)]
    return []


@pytest.mark.parametrize("suffix", WRITERS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_check_and_load_agree(tmp_path, suffix, data):
    whole, key = data.draw(cases, "whole and key")
    text = WRITERS[suffix](whole)
    path = tmp_path / f"model.{suffix}"
    path.write_text(data.draw(st.one_of(st.just(text), damaged(text)), "text"), "utf-8")
    assert verdict_of_check(path, key) == verdict_of_load(path, key)


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_a_mapping_is_refused_for_what_its_file_is(tmp_path_factory, case):
    whole, key = case
    text = json.dumps(whole)
    assume(isinstance(whole, dict) and not {"NaN", "Infinity"} & set(re.findall(r"\w+", text)))
    path = tmp_path_factory.mktemp("agreement") / "model.json"
    path.write_text(text, "utf-8")
    try:
        attndsl.load(whole, key=key)
    except AttnDSLError as error:
        found = [each.message.replace("<mapping>", str(path)) for each in flatten(error)]
    else:
        found = []
    assert [each["message"] for each in verdict_of_load(path, key)] == found
