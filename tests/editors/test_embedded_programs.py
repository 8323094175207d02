"""The programs of a file, and where each of their characters stands in it."""

import re

import pytest

from attndsl.config import read_config
from attndsl.editors.embedded_programs import MAX_CONFIG, program_at, programs_in
from attndsl.editors.text_positions import Point, lines_of

YAML = """\
a:
  program: |
    mask = causal()
    # a comment

    score = (score +
        1.0)
b: q >= kv
c: 'q >= kv and
   kv < 3'
d: "q >= kv\\nand kv < 3; \\
    h == 1"
e: >
   mask = q
   >= kv

   score = 3.0
f: &anchor |2
    q >= kv
g: *anchor
h: !!str
  q >= kv
"""
TOML = """\
# "q >= kv"
a = 'q >= kv'
b = "q >= kv"
[c]
program = '''
mask = causal()
  score = score + 1
'''
[d]
program = \"\"\"
mask = causal() \\
   and true # "
\"\"\"
"""
JSON = """\
{"a": "q >= kv\\nand kv < 3", "b": {"program": "q >= kv", "description": "q"},
 "q >= kv": "kv < 2 # \\ud83d\\ude00 x", "c": "# \\u00e9\\t\\nq >= kv"}
"""


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.toml", TOML), ("a.json", JSON)])
def test_each_word_of_a_program_is_found_in_the_file(name, text, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    found = programs_in(text, str(path))
    assert found.errors == ()
    assert [(p.name, p.source.text) for p in found.programs] == [
        (entry.name, entry.text) for entry in read_config(path)
    ]
    for program in found.programs:
        # A letter that the file spells otherwise is where it is spelled.
        for word in re.finditer(r"[!-~]+", program.source.text):
            start, end = program.in_file(word.start(), word.end())
            assert text[start:end] == word[0], program.name
            assert program.in_program(start) == word.start()
        places = program.places
        assert list(places) == sorted(places)
        assert len(places) == len(program.source.text) + 1


def test_a_program_file_is_one_program():
    found = programs_in("q >= kv", "/x/a.attn")
    (program,) = found.programs
    assert (program.name, program.in_file(2, 4), program.in_program(3)) == ("a", (2, 4), 3)
    assert program.source.file == "/x/a.attn"
    assert programs_in("q >= kv", "Untitled-1.attn").programs[0].source.file is None


def test_equal_texts_stand_in_their_order():
    text = "a = 'q >= kv'\nb = 'q >= kv'\n"
    starts = [program.in_file(0, 1)[0] for program in programs_in(text, "x.toml").programs]
    assert starts == [5, 19]


def test_the_program_at_a_place():
    found = programs_in(YAML, "x.yaml")
    program, offset = program_at(found, YAML.index("causal()"))
    assert (program.name, program.source.text[offset:][:6]) == ("a", "causal")
    assert program_at(found, 0) is None
    assert program_at(found, YAML.index("b: q")) is None


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("model:\n  attention:\n    a: causal()\n    b: {program: q >= kv}\n", ["a", "b"]),
        ("model:\n  a: causal()\n  b: nginx\n", []),
        ("x:\n  - run: test q >= 3\n    name: b\n", []),
        ("layers:\n  - {a: causal()}\n  - {b: q >= kv}\n", ["a", "b"]),
        ('x:\n  "a\'b\\"c": {d: causal()}\n  e: {f: causal()}\n', ["d", "f"]),
        ('x:\n  "a.\'\\"c": {d: causal()}\n  e: {f: causal()}\n', ["f"]),
        ("image: nginx\n", []),
        ("- a\n- b\n", []),
        ("", []),
        ("a: [\n", []),
    ],
)
def test_what_is_taken_for_programs(text, keys):
    found = programs_in(text, "x.yaml")
    assert [program.name for program in found.programs] == keys
    assert found.errors == ()


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("x.yaml", "a: {program: q >= kv\nb: ]", ": ]"),
        ("x.toml", "a = 'x'\nb = program = 3\n", "program = 3"),
        ("x.json", '{"program": "q >= kv",}', "}"),
    ],
)
def test_a_broken_file_that_speaks_of_programs(name, text, place):
    found = programs_in(text, name)
    (error,) = found.errors
    assert text[error.span.start :].startswith(place)


def test_large_files_are_not_read():
    text = "a:\n  program: q >= kv\n" + "# x\n" * (MAX_CONFIG // 4)
    found = programs_in(text, "x.yaml")
    assert found.programs == ()
    assert "is not checked here" in found.errors[0].message
    assert programs_in("x: 1\n" * (MAX_CONFIG // 4), "x.yaml") == ((), ())


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_places_there_and_back(encoding):
    text = "aé🙂b\r\nc\rd\n\u2028🙂e"
    lines = lines_of(text, encoding)
    for offset, character in enumerate(text):
        point = lines.point(offset)
        if character != "\n" or text[offset - 1] != "\r":
            assert lines.offset(point) == offset, (offset, point)
    assert lines.point(len(text)).line == 3
    assert lines.offset(Point(99, 0)) == len(text)
    assert lines.offset(Point(0, 99)) == 4
    assert lines.offset(Point(-1, 5)) == 0
    assert lines.point(3) == (0, {"utf-8": 7, "utf-16": 4, "utf-32": 3}[encoding])
