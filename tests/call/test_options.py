"""The table of options, and what follows from it."""

import inspect
from pathlib import Path

import call_options

import attndsl
from attndsl.call.options import CALL_ARGUMENTS, IN_KEY, OPTIONS, InKey, options_in


def test_the_text_of_calls_follows_from_the_table():
    text = Path(call_options.TEXT).read_text("utf-8")
    assert call_options.written(text) == text
    assert [name for name, *_ in call_options.options()] == list(OPTIONS)


def test_another_option_changes_the_text(monkeypatch):
    real = call_options.options()
    monkeypatch.setattr(
        call_options, "options", lambda: [*real, ("foo", "int", "3", "Number of foos.")]
    )
    text = call_options.written(Path(call_options.TEXT).read_text("utf-8"))
    assert text.count("foo: int = 3") == 3
    assert "            foo: Number of foos.\n" in text


def test_the_signature_has_all_options():
    shown = inspect.signature(attndsl.Attention.__call__).parameters
    assert set(shown) - {"named"} == CALL_ARGUMENTS
    assert {name: shown[name].default for name in OPTIONS} == {
        name: x.default for name, x in OPTIONS.items()
    }


def test_each_option_says_what_part_of_the_signature_it_is():
    assert set(IN_KEY) == set(OPTIONS)
    assert {name for name, x in IN_KEY.items() if x is InKey.NOTHING} == {"return_lse", "out"}


def test_options_are_told_from_captures():
    how, location = options_in({"scale": 2.0, "q_offset": 3, "gain": 1, "captures": {}})
    assert (how.scale, location.q_offset, how.seed) == (2.0, 3, None)
