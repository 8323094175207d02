"""Texts of version 0.1 become texts of today that compute what they did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attndsl.errors import AttnDSLError, TypeMismatchError
from attndsl.frontend import ParamSpec, TensorSpec
from attndsl.frontend.upgrade import upgrade_of, upgraded
from attndsl.pipeline import lower
from attndsl.source import Source

OLD = json.loads(Path(__file__).with_name("version_0_1.json").read_text("utf-8"))
"""Texts that this repository had in version 0.1 (``tools/upgraded.py --write``)."""
PRELUDE = """\
def alibi() = score - exp2(-8.0 * (h + 1) / heads) * (q - kv)
def softcap(c) = c * tanh(score / c)
def rel_bias(table) = score + table[h, q - kv + kv_len]
"""
"""That of 0.1. A program's own functions come first, so that its texts mean what they meant."""


def digest(text: str, declared: dict[str, Any]) -> str:
    names = {
        name: TensorSpec(tuple(dims), kind) if dims else ParamSpec(kind)
        for name, (kind, dims) in declared.items()
    }
    return lower(Source(text), names).digest


@pytest.mark.parametrize("row", OLD, ids=lambda row: f"{row['place']}")
def test_a_text_of_the_repository(row: dict[str, Any]) -> None:
    assert upgraded(Source(row["text"])) == row["new"]
    assert upgraded(Source(row["new"])) == row["new"]
    found = digest(row["new"], row["declared"])
    assert (found == digest(PRELUDE + row["text"], row["declared"])) is row["same"]
    if not row["same"]:
        # The penalty goes by abs(q - kv) now, which a causal mask does not need.
        assert "alibi()" in row["text"]
        around = PRELUDE.replace("* (q - kv)", "* abs(q - kv)")
        assert found == digest(around + row["text"], row["declared"])


def test_there_are_such_texts() -> None:
    assert len(OLD) > 150
    assert sum(not row["same"] for row in OLD) < 20


@pytest.mark.parametrize(
    ("text", "new"),
    [
        ("# alibi()\nscore=alibi( )# softcap(3)", "# alibi()\nscore=score + alibi( )# softcap(3)"),
        ("score = softcap(\n  # the cap (of 2)\n  2.0,\n)\r\n",
         "score = softcap(\n  # the cap (of 2)\n  score, 2.0,\n)\r\n"),
        ("score = softcap(alibi())", "score = softcap(score, score + alibi())"),
        ("score = -softcap(-alibi())", "score = -softcap(score, -(score + alibi()))"),
        ("score = (2 * alibi( # )\n  ))", "score = (2 * (score + alibi( # )\n  )))"),
        # A function that nothing here reads is of the version of the others.
        ("def f() = alibi()\nscore = softcap(2.0)",
         "def f() = score + alibi()\nscore = softcap(score, 2.0)"),
        ("def f() = alibi()", "def f() = alibi()"),
        # Functions of the program's own.
        ("def softcap(c) = c * score\nscore = softcap(2.0)\nmask = alibi() > 1",
         "def softcap(c) = c * score\nscore = softcap(2.0)\nmask = score + alibi() > 1"),
        ("def alibi() = score\nscore = alibi()\nscore = softcap(2.0)",
         "def alibi() = score\nscore = alibi()\nscore = softcap(score, 2.0)"),
        # Texts of today.
        ("score = score + alibi()\nmask = causal()", "score = score + alibi()\nmask = causal()"),
        ("score = softcap(score, 2.0) + alibi()", "score = softcap(score, 2.0) + alibi()"),
        ("", ""),
        ("param softcap: float\nscore = score * softcap", "param softcap: float\n"
         "score = score * softcap"),
    ],
)  # fmt: skip
def test_upgraded(text: str, new: str) -> None:
    assert upgraded(Source(text)) == new
    assert upgraded(Source(new)) == new


@pytest.mark.parametrize(
    "text",
    [
        "score = score + alibi()\nscore = softcap(30.0)",
        "bias = alibi()\nscore = score + bias\nscore = softcap(30.0)",
        "score = softcap(2.0)\nmask = score > alibi()",
    ],
)
def test_a_line_of_either_version_is_asked_about(text: str) -> None:
    with pytest.raises(TypeMismatchError) as caught:
        upgraded(Source(text))
    assert "stands beside the score" in caught.value.message
    assert caught.value.span is not None
    assert caught.value.span.text == "alibi()"


def test_a_parameter_that_hides_the_score_is_refused() -> None:
    with pytest.raises(TypeMismatchError, match="hides the score"):
        upgraded(Source("def f(score) = softcap(score)\nscore = f(2.0)"))


def test_errors_of_syntax_are_told() -> None:
    with pytest.raises(AttnDSLError, match="ends too early"):
        upgraded(Source("score = alibi() +"))


def test_imported_files_have_insertions_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "lib.attn").write_text("def far() = alibi()\ndef cap(c) = softcap(c)\n")
    text = 'import "lib.attn"\nscore = far()\nscore = cap(2.0) + softcap(3.0)\n'
    source = Source(text, "main.attn", file=str(tmp_path / "main.attn"))
    found = upgrade_of(source)
    assert upgraded(source) == text.replace("softcap(", "softcap(score, ")
    (other,) = (each for each in found.sources if each != source)
    assert [each.text for each in found.of(other)] == ["score + ", "score, "]
