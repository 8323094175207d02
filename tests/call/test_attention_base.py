"""Names of compiled programs, as profiles and logs show them."""

from __future__ import annotations

import copy
import pickle

import pytest

import attndsl
from attndsl.source import Source

TEXT = "# Gemma 2\nparam w: int = 8\nmask = causal() and q - kv < w\n"
SHORT = "mask = causal() and q - kv < w"


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("local", "local"),
        ("gemma2.local", "gemma2.local"),
        ("<program>", SHORT),
        ("layers/local", SHORT),
        ("local.attn", SHORT),
        ("model.yaml", SHORT),
        ("C:\\model", SHORT),
    ],
)
def test_names_are_no_files(name, shown):
    attention = attndsl.compile(TEXT, name=name)
    assert attention.name == shown
    for again in (pickle.loads(pickle.dumps(attention)), copy.deepcopy(attention)):
        assert again.name == shown


def test_names_of_programs_without_one_are_their_texts(tmp_path):
    assert attndsl.compile("causal()").name == "causal()"
    long = attndsl.compile(" and ".join(f"q - kv != {n}" for n in range(40))).name
    assert len(long) == 60
    assert long.startswith("q - kv != 0 and q - kv != 1")
    path = tmp_path / "model.yaml"
    path.write_text(f"local: |\n  {TEXT.splitlines()[-1]}\n  param w: int = 3\nfar: causal()\n")
    programs = attndsl.load(path)
    assert {key: program.name for key, program in programs.items()} == {
        "local": "local", "far": "far",
    }  # fmt: skip
    # A name is where a program was written, as a file is: it does not make another of it.
    assert programs["far"] == attndsl.compile("causal()")
    assert Source("x", "a.yaml", 3, "key").label == "key"
