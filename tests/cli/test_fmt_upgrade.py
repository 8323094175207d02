"""``attndsl fmt --upgrade``: files of version 0.1, of all kinds."""

from __future__ import annotations

import json

import pytest

YAML = """\
# A model.
model:
  layers: 2  # of them
  attention:
    flow: {program: softcap(50.0)}
    plain: alibi()  # far keys count less
    block: &block |
      # ALiBi
      mask = causal()   # as it was
      score = 2*alibi()
    quoted: "score = softcap(5.0); mask = causal()"
    single: 'alibi()'
    folded: >
      mask = causal();
      score = alibi()
    again: *block
    entry:
      description: softcap(2.0) is no program here
      params: {cap: 3.0}
      program: |
        param cap: float
        score = softcap(cap)
"""
NEW_YAML = """\
# A model.
model:
  layers: 2  # of them
  attention:
    flow: {program: 'softcap(score, 50.0)'}
    plain: 'score + alibi()'  # far keys count less
    block: &block |
      # ALiBi
      mask = causal()   # as it was
      score = 2*(score + alibi())
    quoted: "score = softcap(score, 5.0); mask = causal()"
    single: 'score + alibi()'
    folded: >
      mask = causal();
      score = score + alibi()
    again: *block
    entry:
      description: softcap(2.0) is no program here
      params: {cap: 3.0}
      program: |
        param cap: float
        score = softcap(score, cap)
"""
TOML = """\
[a]
program = '''
mask = causal()
score = softcap(3.0)  # \u00e9
'''
[b]
program = "alibi()"
"""


def test_configurations_keep_their_layout(attndsl, tree, tmp_path):
    tree({"conf/a.yaml": YAML, "conf/b.toml": TOML, "conf/other.yaml": "lr: 0.1\nname: alibi()\n"})
    path = tmp_path / "conf/c.json"
    path.write_text(
        '{"a": "mask = causal()\\nscore = softcap(3.0)\\t# \\u00e9\\nscore = alibi()*2"}'
    )
    done = attndsl("fmt", "--upgrade", "--check", "conf")
    assert (done.code, done.out.count("would upgrade")) == (1, 3)
    done = attndsl("fmt", "--upgrade", "--diff", "conf/b.toml")
    assert done.code == 1
    assert '-program = "alibi()"\n+program = "score + alibi()"\n' in done.out
    assert (tmp_path / "conf/a.yaml").read_text() == YAML
    done = attndsl("fmt", "--upgrade", "conf")
    assert done.out == "upgraded conf/b.toml\nupgraded conf/c.json\nupgraded conf/a.yaml\n"
    assert (tmp_path / "conf/a.yaml").read_text() == NEW_YAML
    assert (tmp_path / "conf/b.toml").read_text() == TOML.replace(
        "softcap(", "softcap(score, ").replace("alibi()", "score + alibi()")  # fmt: skip
    assert path.read_text() == (
        '{"a": "mask = causal()\\nscore = softcap(score, 3.0)\\t# \\u00e9\\n'
        'score = (score + alibi())*2"}'
    )
    assert (tmp_path / "conf/other.yaml").read_text() == "lr: 0.1\nname: alibi()\n"
    assert attndsl("fmt", "--upgrade", "conf")[:2] == (0, "")
    assert attndsl("fmt", "--upgrade", "--check", "conf")[:2] == (0, "")
    assert attndsl("check", "conf/b.toml", "conf/c.json").code == 0
    assert attndsl("check", "conf/a.yaml", "--key", "model.attention").code == 0


def test_entries_with_errors_are_told_and_others_written(attndsl, tree, tmp_path):
    text = 'near: softcap(3.0)\nfar:\n  program: alibi()\n  params: {w: "${w}"}\n'
    tree({"a.yaml": text})
    done = attndsl("fmt", "--upgrade", "a.yaml")
    assert done.code == 1
    assert done.out == "upgraded a.yaml\n"
    assert "'far'" in done.err
    assert (tmp_path / "a.yaml").read_text() == text.replace("softcap(3.0)", "softcap(score, 3.0)")


def test_program_files_keep_their_bytes(attndsl, tmp_path):
    path = tmp_path / "a.attn"
    path.write_bytes(b"mask=q>=kv   # as it was\r\nscore =alibi()\r\n\r\n\r\n")
    assert attndsl("fmt", "--upgrade", path.name)[:2] == (0, "upgraded a.attn\n")
    assert path.read_bytes() == b"mask=q>=kv   # as it was\r\nscore =score + alibi()\r\n\r\n\r\n"


def test_imported_files_are_read_as_their_programs_mean_them(attndsl, tree, tmp_path):
    files = {
        "far.attn": "def far() = alibi()\n",
        "main.attn": 'import "far.attn"\nmask = causal()\nscore = far()\n',
        "own/lib.attn": "def twice() = 2 * softcap(3.0)\n",
        "own/main.attn": 'def softcap(c) = c * score\nimport "lib.attn"\nscore = twice()\n',
    }
    tree(files)
    done = attndsl("fmt", "--upgrade", "main.attn")
    assert done.code == 2
    assert "far.attn has calls of version 0.1 and is not among the files" in done.err
    assert attndsl("fmt", "--upgrade", ".")[:2] == (0, "upgraded far.attn\n")
    files["far.attn"] = "def far() = score + alibi()\n"
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_nothing_is_written_where_a_program_is_unclear(attndsl, tree, tmp_path):
    tree({"a.attn": "score = alibi()\n", "b.attn": "score = score + alibi()\nscore = softcap(2)\n"})
    done = attndsl("fmt", "--upgrade", "a.attn", "b.attn")
    assert done.code == 1
    assert "b.attn:1:17: 'alibi' stands beside the score here" in done.err
    assert (tmp_path / "a.attn").read_text() == "score = alibi()\n"


@pytest.mark.parametrize("text", ['{"a": "softcap(2.0)"}', '{"a": "alibi()", "b": "alibi()"}'])
def test_json_stays_json(attndsl, tree, tmp_path, text):
    tree({"a.json": text})
    assert attndsl("fmt", "--upgrade", "a.json").code == 0
    new = json.loads((tmp_path / "a.json").read_text())
    assert set(new.values()) <= {"softcap(score, 2.0)", "score + alibi()"}


def test_without_the_option_configurations_are_refused(attndsl, tree):
    tree({"a.yaml": "a: softcap(2.0)\n"})
    assert attndsl("fmt", "a.yaml").code == 2
