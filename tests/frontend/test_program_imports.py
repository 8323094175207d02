"""``import "window.attn"``: one text of several files, errors at their places, hostile files."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attndsl
from attndsl.errors import (
    AttnDSLError,
    ConfigError,
    LexError,
    LimitError,
    NameResolutionError,
    ParseError,
    ProgramErrors,
)
from attndsl.frontend import limits, read
from attndsl.frontend.format import format_source
from attndsl.frontend.parse import parse
from attndsl.frontend.program_imports import expand
from attndsl.frontend.statements import split_statements
from attndsl.pipeline import check, stages
from attndsl.source import Source

SECONDS = 1.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder that is the current one, of which the files of ``write`` are."""
    inner = tmp_path / "programs"
    inner.mkdir()
    monkeypatch.chdir(inner)
    return inner


def write(files: dict[str, str]) -> None:
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text, "utf-8", newline="")


def source(name: str) -> Source:
    return Source(Path(name).read_text("utf-8"), name, file=name)


def failure(name: str) -> AttnDSLError:
    with pytest.raises(AttnDSLError) as caught:
        check(source(name), {})
    assert len(str(caught.value)) < 20_000
    return caught.value


PARTS = {
    "main.attn": 'import "window.attn"\n# Later lines read what it binds.\nmask = near(q, kv)\n',
    "window.attn": 'param window: int = 8\nimport "lib/near.attn"  # a helper\nmask = causal()\n',
    "lib/near.attn": "# Distances.\ndef near(x, y) = abs(x - y) < window\n",
}
WHOLE = (
    "param window: int = 8\ndef near(x, y) = abs(x - y) < window\nmask = causal() and near(q, kv)"
)


def test_the_statements_of_a_file_stand_in_place_of_its_import(folder):
    write(PARTS)
    assert read(source("main.attn"), {}) == read(Source(WHOLE), {})
    assert expand(source("main.attn")).text == (
        "param window: int = 8\n# Distances.\ndef near(x, y) = abs(x - y) < window\n"
        "# a helper\nmask = causal()\n# Later lines read what it binds.\nmask = near(q, kv)\n"
    )


def test_a_compiled_program_has_the_whole_text_and_no_path(folder):
    write(PARTS)
    attention = attndsl.load(folder / "main.attn")["main"]
    alone = attndsl.compile(attention.text)
    assert attention == alone
    assert attention._spec == alone._spec
    assert "attn" not in attention._spec
    assert attention.lowered.digest == attndsl.compile(WHOLE).lowered.digest
    for name in PARTS:
        Path(name).unlink()
    assert pickle.loads(pickle.dumps(attention)) == attention


def test_configurations_import_beside_themselves(folder):
    write(PARTS)
    lines = '  program: |\n    import "main.attn"\n    score = softcap(score, cap)\n'
    entries = {"local": 'import "main.attn"; score = softcap(score, 5.0)'}
    write({"model.yaml": f"local:\n{lines}  params: {{cap: 5.0}}\n"})
    write({"model.json": json.dumps(entries)})
    digests = {
        attndsl.load(folder / f"model.{kind}")["local"].lowered.digest for kind in ("yaml", "json")
    }
    assert digests == {attndsl.compile(f"{WHOLE}\nscore = softcap(score, 5.0)").lowered.digest}


def test_every_stage_and_the_formatter_take_imports(folder):
    write(PARTS)
    assert stages(source("main.attn"), {}).keys() == stages(Source("causal()"), {}).keys()
    ragged = 'import   "window.attn";mask=near( q,kv)\n'
    assert format_source(ragged) == 'import "window.attn"; mask = near(q, kv)\n'
    for name, text in PARTS.items():
        assert format_source(text, name) == text


def test_a_file_counts_once(folder):
    write({"main.attn": 'import "a.attn"; import "b.attn"; import "./a.attn"; mask = x and y',
           "a.attn": 'import "c.attn"\nx = z < 3', "b.attn": 'import "c.attn"  # again\ny = z > 1',
           "c.attn": "z = q - kv\nmask = z > 0"})  # fmt: skip
    whole = "z = q - kv\nmask = z > 0\nx = z < 3\ny = z > 1\nmask = x and y"
    assert read(source("main.attn"), {}) == read(Source(whole), {})


def test_errors_name_the_file_that_they_are_in(folder):
    write(PARTS)
    write({"window.attn": 'import "lib/near.attn"\nparam window: int\nmask = caual() and x\n',
           "lib/near.attn": "# Distances.\ndef near(x, y) = abs(x - z) < window\n"})  # fmt: skip
    write({"main.attn": 'mask = nope\nimport "window.attn"\nmask = near(q, kv)\nwindow = 3\n'})
    found = failure("main.attn")
    assert isinstance(found, ProgramErrors)
    places = {(e.span.source.name, e.span.line, e.span.column, e.span.text) for e in found.errors}
    assert places == {
        ("main.attn", 1, 8, "nope"),
        ("main.attn", 4, 1, "window"),
        ("window.attn", 3, 8, "caual()"),
        ("window.attn", 3, 20, "x"),
        ("lib/near.attn", 2, 26, "z"),
    }
    assert "'window' is already bound in line 2 of window.attn" in str(found)
    assert "lib/near.attn:2:26: 'z' is not declared\n    def near(x, y) = abs(x - z)" in str(found)


def test_syntax_errors_of_all_files_come_at_once(folder):
    write(
        {"main.attn": 'import "a.attn"\nimport "b.attn"', "a.attn": "x = = 1", "b.attn": "y = (1"}
    )
    found = failure("main.attn")
    assert isinstance(found, ProgramErrors)
    assert [(e.span.source.name, type(e)) for e in found.errors] == [
        ("a.attn", ParseError), ("b.attn", ParseError)
    ]  # fmt: skip


def test_errors_of_calls_point_into_the_imported_file(folder):
    import torch

    # A name of its own: a node has the place of the first program that wrote it in this process.
    write({"main.attn": 'import "t.attn"\nmask = causal()', "t.attn": "\n\ntensor lone[n]: int\n"
           "score = score + lone[q]\n"})  # fmt: skip
    attention = attndsl.load("main.attn", checked=True, backend="reference")["main"]
    for again in (attention, pickle.loads(pickle.dumps(attention))):
        x = torch.zeros(1, 1, 4, 8)
        with pytest.raises(AttnDSLError) as caught:
            again(x, x, x, lone=torch.zeros(2, dtype=torch.int32))
        assert caught.value.span is not None
        assert (caught.value.span.source.name, caught.value.span.line) == ("t.attn", 4)


@pytest.mark.parametrize(
    ("text", "kind", "message", "hint"),
    [
        ('import "x.attn"', ConfigError, "'x.attn' cannot be found", "attndsl.load("),
        ("import x", ParseError, "'x' cannot stand here", 'write import "FILE.attn"'),
        ("import x.attn", ParseError, "'x' cannot stand here", 'write import "FILE.attn"'),
        ("import 'x.attn'", LexError, "''' is not part of the language", 'import "FILE.attn"'),
        ('import "x#.attn"', LexError, "'\"' is not part of the language", 'import "FILE.attn"'),
        ("import", ParseError, "the statement ends too early", 'write import "FILE.attn"'),
        ('import "x.attn" as x', ParseError, "'as' cannot stand here", 'write import "FILE.attn"'),
        ('mask = import "x.attn"', ParseError, "'import' cannot stand", "in a line of its own"),
        ('score = "x"', LexError, "'\"' is not part of the language", "without quotes"),
        ('"x.attn"', LexError, "'\"' is not part of the language", "without quotes"),
    ],
)
def test_an_import_is_a_line_of_a_file(text, kind, message, hint):
    with pytest.raises(kind) as caught:
        read(Source(text), {})
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.span.line == 1


def test_texts_of_no_file_import_nothing(folder):
    write(PARTS)
    with pytest.raises(ConfigError, match="this text stands in no file"):
        attndsl.compile('import "main.attn"')
    with pytest.raises(ProgramErrors, match="2 errors"):
        attndsl.compile('import "main.attn"\nimport "window.attn"\nmask = near(q, kv)')


HOSTILE = {
    "/etc/passwd": "leads out of the folder",
    "/etc/x.attn": "leads out of the folder",
    "../secret.attn": "leads out of the folder",
    "sub/../../secret.attn": "leads out of the folder",
    "a/..": "leads out of the folder",
    "..": "leads out of the folder",
    "": "is no program file",
    ".": "is no program file",
    ".attn": "is no program file",
    "notes.txt": "is no program file",
    "x.ATTN": "is no program file",
    "..\\secret.attn": "holds '\\' or ':'",
    "C:secret.attn": "holds '\\' or ':'",
    "link.attn": "is a link out of the folder",
    "away/secret.attn": "is a link out of the folder",
    "loop.attn": "cannot read loop.attn",
    "other.attn": "is a link to a file that is no program file",
    "missing.attn": "cannot read missing.attn: No such file or directory",
    "folder.attn": "folder.attn is a folder",
    "pipe.attn": "pipe.attn is no regular file",
    "zero.attn": "is a link out of the folder",
    "large.attn": "large.attn is larger than 1048576 bytes",
    "latin.attn": "latin.attn is not UTF-8 text",
    "long.attn": "with this import the program has",
    f"{'n' * 4000}.attn": "cannot read",
    "e\N{COMBINING ACUTE ACCENT}.attn": "No such file or directory",
    "main.attn": "the file imports itself: main.attn -> main.attn",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_refused_and_say_why(folder, name, quickest):
    (folder.parent / "secret.attn").write_text("mask = causal()")
    Path("link.attn").symlink_to(folder.parent / "secret.attn")
    Path("away").symlink_to(folder.parent)
    Path("zero.attn").symlink_to("/dev/zero")
    Path("loop.attn").symlink_to("loop.attn")
    Path("notes.txt").write_text("mask = causal()")
    Path("other.attn").symlink_to("notes.txt")
    Path("folder.attn").mkdir()
    os.mkfifo("pipe.attn")
    Path("large.attn").write_bytes(b" " * ((1 << 20) + 1))
    Path("latin.attn").write_bytes(b"# \xe9")
    Path("long.attn").write_bytes(b" " * 20_000)
    write({"main.attn": f'mask = causal()\nimport "{name}"'})

    def refuse() -> None:
        found = failure("main.attn")
        assert HOSTILE[name] in found.message
        assert found.span is not None
        assert (found.span.source.name, found.span.line, found.span.column) == ("main.attn", 2, 1)
        assert len(str(found)) < 10_000

    assert quickest(refuse) < SECONDS


def test_links_within_the_folder_are_followed(folder):
    write({"main.attn": 'import "a.attn"\nimport "lib/b.attn"', "real/b.attn": 'import "c.attn"',
           "real/c.attn": "mask = causal()"})  # fmt: skip
    Path("a.attn").symlink_to("real/c.attn")
    Path("lib").symlink_to("real")
    assert expand(source("main.attn")).text.split() == ["mask", "=", "causal()"]
    # A file in a folder sees that folder alone.
    write({"top.attn": "mask = causal()", "real/b.attn": 'import "../top.attn"'})
    assert "leads out of the folder" in failure("main.attn").message
    Path("real/up.attn").symlink_to("../top.attn")
    write({"real/b.attn": 'import "up.attn"'})
    found = failure("main.attn")
    assert "is a link out of the folder" in found.message
    assert found.span.source.name == "lib/b.attn"


def test_control_characters_in_names_are_refused(folder):
    write({"main.attn": 'import "a\0b.attn"\nimport "a\x1b31m.attn"'})
    found = failure("main.attn")
    assert all(isinstance(error, LexError) for error in found.errors)
    assert "\x1b" not in str(found)


def test_cycles_say_their_chain(folder):
    write({"main.attn": 'import "a.attn"', "a.attn": 'import "b/b.attn"',
           "b/b.attn": 'import "c.attn"', "b/c.attn": 'import "b.attn"'})  # fmt: skip
    found = failure("main.attn")
    assert found.message == "the file imports itself: b/b.attn -> b/c.attn -> b/b.attn"
    assert found.span.source.name == "b/c.attn"


def test_a_missing_file_hints_at_the_nearest(folder):
    write({"main.attn": 'import "lib/windw.attn"', "lib/window.attn": ""})
    assert failure("main.attn").hint == "did you mean 'window.attn'?"


def test_chains_and_crowds_are_bounded(folder, quickest):
    most = limits.MAX_IMPORT_DEPTH
    for n in range(most + 1):
        write({f"d{n}.attn": f'import "d{n + 1}.attn"'})
    write({f"d{most}.attn": "causal()", "main.attn": 'import "d1.attn"'})
    assert expand(source("main.attn")).text == "causal()"
    write({"main.attn": 'import "d0.attn"'})

    def refuse(message: str) -> None:
        found = failure("main.attn")
        assert isinstance(found, LimitError)
        assert message in found.message

    assert quickest(lambda: refuse("more than 16 imports in a chain")) < SECONDS
    for n in range(limits.MAX_IMPORTS + 1):
        write({f"f{n}.attn": f"x{n} = {n}"})
    lines = [f'import "f{n}.attn"' for n in range(limits.MAX_IMPORTS)]
    write({"main.attn": "\n".join([*lines, *lines[:50]])})
    assert len(split_statements(expand(source("main.attn")))[0]) == limits.MAX_IMPORTS
    write({"main.attn": "\n".join([*lines, f'import "f{limits.MAX_IMPORTS}.attn"'])})
    assert quickest(lambda: refuse("more than 100 imported files")) < SECONDS
    write({"main.attn": "".join(f'import "f{n}.attn"\n' for n in range(10_000))})
    assert quickest(lambda: refuse("characters; at most 16384 are allowed")) < SECONDS


def test_all_files_together_are_one_program_of_its_size(folder, quickest):
    write({f"f{n}.attn": f"# {'x' * 5000}\na{n} = 1" for n in range(4)})
    write({"main.attn": "".join(f'import "f{n}.attn"\n' for n in range(4))})
    found = failure("main.attn")
    assert isinstance(found, LimitError)
    assert found.span.line == 4
    write({f"{n}.attn": "\n".join(f"{n}{i}=1" for i in range(1005)) for n in "bc"})
    write({"main.attn": 'import "b.attn"\nimport "c.attn"\n'})
    assert "has 2010 statements; at most 2000" in failure("main.attn").message


def test_names_of_files_command_no_terminal(folder):
    name = "x\u202e.attn"
    write({name: "mask = nope", "main.attn": 'import "y.attn"', "y.attn": f'import "{name}"'})
    assert "\u202e" not in str(failure("main.attn"))


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_any_cut_of_a_program_into_files_is_that_program(tmp_path_factory, data):
    """And each statement knows the line of the file that it stands in."""
    folder = tmp_path_factory.mktemp("cut")
    separators = st.sampled_from(["\n", ";", "  # why\n", "\n\n", "\n# alone\n", " ;\n", "\r\n"])
    count = 0

    def file(depth: int) -> tuple[str, list[str], list[tuple[str, str]]]:
        """A new file's name, its statements and where each is, by its file and text."""
        nonlocal count
        name = f"f{count}.attn"
        count += 1
        text, statements, places = "", [], []
        for _ in range(data.draw(st.integers(0, 3))):
            text += data.draw(st.sampled_from(["", "  "]))
            if depth and data.draw(st.booleans()):
                inner, found, where = file(depth - 1)
                text += f'import "{inner}"'
                statements += found
                places += where
            else:
                count += 1
                statements.append(f"a{count} = (q\n + {count})")
                places.append((name, statements[-1]))
                text += statements[-1]
            text += data.draw(separators)
        text += data.draw(st.sampled_from(["", "# end", "\n", "z = 1  # last"]))
        if "z = 1" in text:
            text = text.replace("z = 1", f"z{count} = 1")
            statements.append(f"z{count} = 1")
            places.append((name, statements[-1]))
        (folder / name).write_text(text, newline="")
        return name, statements, places

    name, statements, places = file(3)
    path = folder / name
    whole = expand(Source(path.read_bytes().decode(), name, file=str(path)))
    found = parse(whole).statements
    assert [x.span.text for x in found] == statements
    assert [Path(x.span.source.name).name for x in found] == [file for file, _ in places]
    for x in found:
        written = (folder / Path(x.span.source.name).name).read_bytes().decode()
        assert x.span.source.text == written
    again = parse(Source(whole.text)).statements
    assert [x.span.text for x in again] == statements


def test_a_fragment_of_functions_is_a_program_to_check(folder):
    write({"lib.attn": "def near(x) = x < 3\ndef far(x) = not near(x)\n"})
    check(source("lib.attn"), {})
    write({"lib.attn": "def near(x) = x < 3\ndef near(x) = x\ndef f(a, a) = 1\n"})
    assert len(failure("lib.attn").errors) == 2
    assert type(failure("lib.attn").errors[0]) is NameResolutionError
