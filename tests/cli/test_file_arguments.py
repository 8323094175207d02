"""Folders and patterns as arguments of commands: what they stand for, and what they leave alone."""

from __future__ import annotations

import json
import os

import pytest

from attndsl.cli import file_arguments
from attndsl.cli.file_arguments import find_files
from attndsl.cli.usage_errors import UsageError

TRAIN = "model:\n  width: 8\n  attention:\n    a: causl()\n    b: causal()\n"
FILES = {
    "conf/a.attn": "causl()\n",
    "conf/model.yaml": "a: causal()\nb: {program: q - kv < w, params: {w: 3}}\n",
    "conf/sub/deep/c.attn": "causal()\n",
    "conf/sub/flat.json": '{"x": "kv <= q"}',
    "conf/sub/t.toml": 'b.program = "causal()"\n',
    "conf/train.yaml": TRAIN,
    "conf/typo.yaml": "a: {progam: causal()}\n",
    "conf/package.json": '{"name": "x", "version": "1"}',
    "conf/compose.yaml": "services: {web: {image: x}}\nversion: '3'\n",
    "conf/list.yaml": "- causal()\n",
    "conf/several.yaml": "a: 1\n---\nb: 2\n",
    "conf/broken.yaml": "a: {program: causal(\n",
    "conf/README.md": "causl()",
    "conf/.hidden/a.attn": "causl()",
    "conf/.b.attn": "causl()",
    "conf/node_modules/a.attn": "causl()",
    "conf/env/pyvenv.cfg": "",
    "conf/env/lib/a.attn": "causl()",
}
OURS = [
    "conf/a.attn", "conf/broken.yaml", "conf/model.yaml", "conf/sub/deep/c.attn",
    "conf/sub/flat.json", "conf/sub/t.toml", "conf/typo.yaml",
]  # fmt: skip
SUFFIXES = (".attn", ".yaml", ".yml", ".toml", ".json")


@pytest.fixture
def files(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree(FILES)


def test_a_folder_stands_for_the_programs_in_it(files):
    found = find_files(["conf"], SUFFIXES)
    assert found.files == OURS
    assert {x.file: x.reason for x in found.skipped} == {
        "conf/compose.yaml": "no programs stand at its root",
        "conf/list.yaml": "no programs stand at its root",
        "conf/package.json": "no programs stand at its root",
        "conf/several.yaml": "not YAML: but found another document",
        "conf/train.yaml": "no programs stand at its root; some stand at model.attention (--key)",
    }
    os.chdir("conf")
    assert find_files(["."], SUFFIXES).files == [name.removeprefix("conf/") for name in OURS]


def test_with_a_key_a_folder_stands_for_what_has_it(files):
    found = find_files(["conf"], SUFFIXES, "model.attention")
    programs = ["conf/a.attn", "conf/sub/deep/c.attn", "conf/train.yaml"]
    assert sorted(found.files) == sorted([*programs, "conf/broken.yaml"])
    reasons = {x.file: x.reason for x in found.skipped}
    assert reasons["conf/package.json"] == "nothing stands at model.attention"
    assert reasons["conf/model.yaml"].endswith("; some programs stand at its root")


def test_check_of_a_folder(attndsl, files):
    done = attndsl("check", "conf")
    assert done.code == 1
    assert done.out.startswith("conf/a.attn:1:1: there is no function 'causl'")
    assert "conf/broken.yaml:2:1: not YAML" in done.out
    assert "conf/typo.yaml:1:5: 'a' has an unknown key 'progam'" in done.out
    assert done.out.endswith("\n6 programs: 3 errors\n")
    assert "skipped conf/package.json: no programs stand at its root\n" in done.err
    found = json.loads(attndsl("check", "conf", "--json").out)
    assert len(found["skipped"]) == 5
    assert found["skipped"][0]["file"] == "conf/compose.yaml"


def test_what_is_named_is_held_to_the_form(attndsl, files):
    for argument in ("conf/package.json", "conf/pack*.json"):
        done = attndsl("check", argument)
        assert done.code == 1
        assert "'x' is not declared" in done.out
    assert attndsl("check", "conf", "conf/package.json").err.count("package.json") == 0


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("conf/*.attn", ["conf/a.attn"]),
        ("conf/**/*.attn", ["conf/a.attn", "conf/sub/deep/c.attn"]),
        ("**/*.attn", ["conf/a.attn", "conf/sub/deep/c.attn"]),
        ("c?nf/[a-b]*", ["conf/a.attn", "conf/broken.yaml"]),
        ("*/sub/flat.json", ["conf/sub/flat.json"]),
        ("*/sub/**/deep/*", ["conf/sub/deep/c.attn"]),
        ("conf/s*", ["conf/sub/deep/c.attn", "conf/sub/flat.json", "conf/sub/t.toml",
                     "conf/several.yaml"]),
        ("conf/sub/**", ["conf/sub/deep/c.attn", "conf/sub/flat.json", "conf/sub/t.toml"]),
        ("**", OURS),
    ],
)  # fmt: skip
def test_patterns(files, tmp_path, pattern, found):
    assert sorted(find_files([pattern], SUFFIXES).files) == sorted(found)
    whole = find_files([f"{tmp_path}/{pattern}"], SUFFIXES).files
    assert sorted(whole) == sorted(f"{tmp_path}/{name}" for name in found)


def test_a_file_may_be_called_like_a_pattern(attndsl, tree):
    tree({"a[1]*.attn": "causal()"})
    assert attndsl("check", "a[1]*.attn").out == "1 program: no errors\n"


@pytest.mark.parametrize("argument", ["*.yaml", "none/*", "empty", "empty/**", "none.attn"])
def test_arguments_that_stand_for_nothing(attndsl, tree, argument):
    tree({"empty/x.txt": "", "a.attn": "causal()"})
    done = attndsl("check", argument)
    assert (done.code, done.out) == (2, "")
    assert "matches no program file" in done.err or "there is no file" in done.err
    tree({"empty/x.json": "{}"})
    assert "left alone: empty/x.json, since no programs" in attndsl("check", "empty").err


def test_links_are_not_followed_out(attndsl, tree, tmp_path):
    tree({"conf/a.attn": "causal()", "other/secret.attn": "secrets", "conf/sub/b.txt": "causal()"})
    conf = tmp_path / "conf"
    (conf / "out.attn").symlink_to(tmp_path / "other/secret.attn")
    (conf / "in.attn").symlink_to("sub/b.txt")
    (conf / "folder").symlink_to(tmp_path / "other")
    (conf / "sub/back").symlink_to(conf)
    for argument in ("conf", "conf/*.attn", "conf/**"):
        done = attndsl("check", argument)
        assert done.out == "2 programs: no errors\n", argument
        assert "skipped conf/out.attn: it is a link out of the folder" in done.err
    with pytest.raises(UsageError):
        find_files(["conf/fold*/*"], SUFFIXES)
    (conf / "gone.attn").symlink_to("nowhere")
    assert (
        "skipped conf/gone.attn: it is a link to nothing, or no file"
        in attndsl("check", "conf").err
    )
    # What is named by itself is read as ever.
    assert "secrets" in attndsl("check", "conf/out.attn").out


def test_folders_that_cannot_be_read_are_told(attndsl, tree, monkeypatch):
    tree({"conf/a.attn": "causal()", "conf/sub/b.attn": "causl()"})
    scan = os.scandir

    def closed(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", closed)
    assert "skipped conf/sub: cannot be read: Permission denied" in attndsl("check", "conf").err


def test_there_is_an_end_to_it(files, monkeypatch):
    monkeypatch.setattr(file_arguments, "MAX_FILES", 6)
    with pytest.raises(UsageError, match="more than 6 files of programs"):
        find_files(["conf"], SUFFIXES)
    monkeypatch.setattr(file_arguments, "MAX_LOOKS", 10)
    for argument in ("conf", "**/*.attn"):
        with pytest.raises(UsageError, match="more than 10 files to look at"):
            find_files([argument], SUFFIXES)


def test_fmt_takes_folders_and_patterns(attndsl, tree, tmp_path):
    tree({"conf/a.attn": "q>=kv", "conf/sub/b.attn": "q  >= kv\n", "conf/c.yaml": "a: q>=kv\n"})
    assert attndsl("fmt", "--check", "conf").out.count("would reformat") == 2
    assert attndsl("fmt", "conf/*.attn").out == "reformatted conf/a.attn\n"
    assert attndsl("fmt", "conf").out == "reformatted conf/sub/b.attn\n"
    assert (tmp_path / "conf/c.yaml").read_text() == "a: q>=kv\n"
    done = attndsl("fmt", "conf/*.yaml")
    assert done.code == 2
    assert "is a configuration file" in done.err
    assert "configurations" not in attndsl("fmt", "--help").out


def test_other_kinds_of_files_are_no_programs(attndsl, tree):
    tree({"README.md": "# Programs\n\nSome text.\n", "a.py": "x = 1\n", "a.attn": "causal()\n"})
    done = attndsl("check", "README.md", "a.py", "a.attn")
    assert done.code == 1
    assert "README.md is Markdown and no program" in done.out
    assert "a.py is Python and no program" in done.out
    assert done.out.endswith("1 program: 2 errors\n")
    for command in ("explain", "show"):
        done = attndsl(command, "README.md")
        assert (done.code, done.err.splitlines()[0]) == (1, "README.md is Markdown and no program")
