"""Every snippet of the documentation runs, and what it says of the project is so."""

import contextlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from layers import LAYERS
from support.fork_server import path_with_command

from attndsl import config, errors
from attndsl.config import read_config
from attndsl.errors import AttnDSLError
from attndsl.foundation import bounded_io
from attndsl.frontend.builtin_functions import FLOAT_FUNCTIONS, NAMES
from attndsl.frontend.format import format_source
from attndsl.frontend.prelude import prelude_names
from attndsl.pipeline import check
from attndsl.source import Source

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KINDS = {"attn", "python", "yaml", "toml", "console", "shell", "text"}
CONFIGS = {"yaml", "toml"}


def _snippets(kind):
    """Snippets of one kind: page, rest of the info string, text."""
    return [
        pytest.param(page, info.strip(), text, id=f"{page.stem}-{number}")
        for page in PAGES
        for number, (found, info, text) in enumerate(FENCE.findall(page.read_text("utf-8")))
        if found == kind
    ]


def _config(kind, info):
    """Name of a configuration's file, and where its programs stand: ``train.yaml key=model``."""
    words = info.split()
    keys = [word.removeprefix("key=") for word in words if word.startswith("key=")]
    names = [word for word in words if not word.startswith("key=")]
    return names[0] if names else f"model.{kind}", keys[0] if keys else None


def _script(name):
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_snippet_is_of_a_kind_that_is_run(page):
    text = page.read_text("utf-8")
    assert text.count("\n```") == 2 * len(FENCE.findall(text))
    assert {kind for kind, _, _ in FENCE.findall(text)} <= KINDS


@pytest.mark.parametrize(("page", "info", "text"), _snippets("attn"))
def test_programs(page, info, text):
    if info == "error":
        with pytest.raises(AttnDSLError):
            check(Source(text), {})
        return
    assert info == ""
    check(Source(text), {})


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.attn")), ids=lambda p: p.name)
def test_example_programs(path):
    check(Source(path.read_text("utf-8")), {})
    assert format_source(path.read_text("utf-8")) == path.read_text("utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python(page, tmp_path, monkeypatch):
    # One after the other in one namespace, as they are read; configurations before them are files.
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for kind, info, text in FENCE.findall(page.read_text("utf-8")):
        if kind in CONFIGS:
            (tmp_path / _config(kind, info)[0]).write_text(text)
        elif kind == "python":
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(text, page.name, "exec"), names)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_configurations(page, kind, tmp_path):
    for found, info, text in FENCE.findall(page.read_text("utf-8")):
        name, key = _config(kind, info)
        if found != kind:
            continue
        if name == ".pre-commit-config.yaml":
            hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text("utf-8"))
            used = yaml.safe_load(text)["repos"][0]["hooks"]
            assert {hook["id"] for hook in used} == {hook["id"] for hook in hooks}
            continue
        (tmp_path / name).write_text(text)
        entries = read_config(tmp_path / name, key)
        assert entries
        for entry in entries:
            check(entry.source, entry.params)


@pytest.mark.parametrize(("page", "info", "text"), _snippets("console"))
def test_sessions(page, info, text, tmp_path):
    shutil.copy(ROOT / "examples" / "gemma2.attn", tmp_path)
    for kind, info, written in FENCE.findall(page.read_text("utf-8")):
        if kind in CONFIGS:
            (tmp_path / _config(kind, info)[0]).write_text(written)
    path = path_with_command()
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env={**os.environ, "PATH": path},
            capture_output=True, text=True,
        )  # fmt: skip
        out = done.stdout + done.stderr
        wanted = re.escape(expected.replace("[exit code 1]\n", "")).replace("\\.\\.\\.\\\n", ".*")
        code = 1 if "[exit code 1]" in expected else 0
        assert re.fullmatch(wanted, out, re.DOTALL), f"{command}\n{out}"
        assert done.returncode == code, f"{command}\n{out}"
        assert "Traceback" not in out


@pytest.mark.parametrize(("page", "info", "text"), _snippets("shell"))
def test_shell_commands_exist(page, info, text):
    # They set up environments and take minutes: what they name must exist.
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in text.splitlines():
        words = line.split()
        if words[0] == "make":
            assert words[1] in targets
        else:
            assert words[0] == ".venv/bin/python", line
            assert (ROOT / words[1]).exists(), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        assert path.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
            assert anchor in [
                re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads
            ], target


@pytest.mark.parametrize("name", ["language", "cheatsheet"])
def test_the_language_reference_names_everything(name):
    text = (ROOT / "docs" / f"{name}.md").read_text("utf-8")
    words = set(re.findall(r"\w+", text))
    assert set(prelude_names()) <= words
    assert set(NAMES) | set(FLOAT_FUNCTIONS) <= words
    counts = re.search(r"(\d+) prelude functions", (ROOT / "README.md").read_text("utf-8"))
    assert int(counts[1]) == len(prelude_names())


def test_the_guide_names_every_error_class():
    text = (ROOT / "docs" / "guide.md").read_text("utf-8")
    for name, found in vars(errors).items():
        if isinstance(found, type) and issubclass(found, AttnDSLError):
            assert f"`{name}`" in text or f"attndsl.{name}" in text, name


def test_the_limits_in_the_reference_are_those_of_the_code():
    from attndsl.frontend import limits

    text = (ROOT / "docs" / "language.md").read_text("utf-8").partition("## Limits")[2]
    numbers = [int(number) for number in re.findall(r"\d+", text)]
    assert numbers == [
        limits.MAX_SOURCE, limits.MAX_STATEMENTS, limits.MAX_NESTING, limits.MAX_EXPANSIONS,
        limits.MAX_DIMS, limits.MAX_IMPORTS, limits.MAX_IMPORT_DEPTH, limits.MAX_ERRORS,
    ]  # fmt: skip


def test_the_limits_of_configurations_are_those_of_the_code():
    text = (ROOT / "docs" / "configuration.md").read_text("utf-8").partition("## Limits")[2]
    numbers = [int(number) for number in re.findall(r"\d+", text.partition("\n## ")[0])]
    assert numbers == [
        bounded_io.MAX_TEXT >> 20, config.MAX_DEPTH, config.MAX_NODES, config.MAX_ENTRIES,
        config.MAX_KEYS, config.MAX_DESCRIPTION,
    ]  # fmt: skip


def test_the_figures_are_those_of_the_result_file(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = _script("table")
    for path, part in table.targets().items():
        text = path.read_text("utf-8")
        assert table.replace(text, part) == text, "run benchmarks/table.py --write"


def test_the_table_shows_what_the_file_says(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    table = _script("table")
    row = {"case": "full", "dtype": "bf16", "B": 1, "H": 2, "Hkv": 2, "S": 8, "D": 4}
    row |= {"cudnn_ms": None, "fa2_ms": 9.0}
    rows = [
        row | {"direction": "forward", "attndsl_ms": 1.234, "flex_ms": 2.0},
        row | {"direction": "backward", "attndsl_ms": 123.4, "flex_ms": None},
    ]
    results = {"machine": "GPU", "date": "2000-01-01", "rows": rows}
    results["versions"] = {"torch": "1", "triton": "2", "cudnn": 91900, "commit": "0123456789"}
    monkeypatch.setattr(table, "load", {"known": results}.get)
    text = table.tables("known")
    # Without cuDNN, which ran nothing at this shape, and FlexAttention's backward.
    assert "| full | 1.23 | 2 | 9 | 123 | 9 |" in text
    assert "on one GPU; torch 1, Triton 2, cuDNN 9.19; commit 0123456." in text
    assert "Batch 1, 2 heads, length 8, head dim 4, bf16:" in text
    assert "2000" not in text
    assert table.tables("none") == ""
    with pytest.raises(ValueError, match="missing"):
        table.replace("no marks", "x")


def test_the_picture_shows_every_panel(monkeypatch):
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pictures", pictures)
    spec.loader.exec_module(pictures)
    now, then = pictures.picture(), (ROOT / "docs" / "pictures.svg").read_text("utf-8")
    # Shades may round differently elsewhere; what is drawn may not.
    strip = re.compile(r'<rect x="\d+"[^>]*>')
    assert strip.sub("", now).split() == strip.sub("", then).split()
    for panel in pictures.PANELS:
        assert panel.title in then


def test_the_layers_on_the_page_are_those_of_the_imports():
    text = (ROOT / "docs" / "dev" / "architecture.md").read_text("utf-8").partition("## Layers")[2]
    kind, _, lines = FENCE.findall(text)[0]
    assert kind == "text"
    assert [set(line.split(", ")) for line in lines.splitlines()] == list(map(set, LAYERS))


@pytest.mark.parametrize("name", ["architecture", "kernels", "tiles"])
def test_files_that_pages_on_the_code_name_exist(name):
    text = FENCE.sub("", (ROOT / "docs" / "dev" / f"{name}.md").read_text("utf-8"))
    for found in re.findall(r"`([\w/]+/[\w/.]*)`", text):
        assert any((ROOT / folder / found).exists() for folder in ("", "attndsl")), found


def test_every_prelude_function_is_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    frontend = _script("frontend")
    assert set(frontend.PROGRAMS) == set(prelude_names())
    for name, text in frontend.PROGRAMS.items():
        assert f"{name}(" in text
    row = frontend.measure("causal", "causal()")
    assert row["read_us"] > 0
    assert row["lower_us"] > 0


def test_result_files_have_the_documented_form():
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        found = json.loads(path.read_text("utf-8"))
        chosen = {"seed", "modes", "peers", "quick", "left"} if path.stem == "against" else set()
        assert set(found) == {"benchmark", "machine", "date", "versions", "rows"} | chosen, path
        assert {"python", "torch", "triton", "cudnn", "attndsl", "commit"} <= set(found["versions"])
        assert found["rows"], path


def _code():
    """The modules of the package."""
    return [path for folder in ("attndsl", "backends") for path in (ROOT / folder).rglob("*.py")]


def _measurements():
    """Numbers of the entries of docs/dev/measured.md, each of which is there once."""
    text = (ROOT / "docs" / "dev" / "measured.md").read_text("utf-8")
    numbers = [int(number) for number in re.findall(r"^- \*\*M(\d+)\*\* ", text, re.MULTILINE)]
    assert numbers == list(range(1, 1 + len(numbers)))
    return set(numbers)


_REFERENCE = r"\b[Ss]ee\s+(?:#\s+)?M(\d+)\b"
"""How code and pages refer to an entry."""


def test_measurements_that_are_referred_to_are_there():
    for path in [*_code(), *PAGES]:
        for number in re.findall(_REFERENCE, path.read_text("utf-8")):
            assert int(number) in _measurements(), (path, number)


def test_every_measurement_is_named_in_the_code():
    code = [path.read_text("utf-8") for path in _code()]
    named = {int(number) for text in code for number in re.findall(_REFERENCE, text)}
    assert _measurements() <= named
