"""What is installed is all that is needed, as a wheel and as an editable installation."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from attndsl.foundation.fingerprint import source_fingerprint

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {"attndsl": "attndsl", "backends": "attndsl.backends", "grammar": "attndsl.grammar"}
DATA = {".lark", ".attn", ".json", ".typed"}
USE = """
import sys, torch, attndsl
assert attndsl.__file__.startswith(sys.argv[1]), attndsl.__file__
attn = attndsl.compile("causal() and q - kv < window", window=3)
q = k = v = torch.randn(1, 1, 5, 4)
assert attn(q, k, v).shape == q.shape
assert "def attention_forward" in attn.source()
"""


def _packages():
    """Every package by name, and its folder."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.parent.relative_to(ROOT / folder).parts
            found[".".join([package, *parts])] = path.parent
    return found


IMPORTED_AS = {"PyYAML": "yaml"}
OF_EXTRAS = {
    "lsprotocol": "attndsl/editors/language_server.py",
    "pygls": "attndsl/editors/language_server.py",
    "starlette": "attndsl/play/http_server.py",
    "torchtitan": "attndsl/torchtitan/",
    "transformers": "attndsl/hf/",
    "uvicorn": "attndsl/play/http_server.py",
}
"""Modules that only these files import as they are loaded."""
BY_RICH = "pygments"


def _imported(path):
    """Modules that a file imports as it is loaded."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]


def test_what_is_imported_is_a_dependency():
    """Other packages bring numpy along, or do not: torch 2.14 does not."""
    needs = SETTINGS["project"]["dependencies"]
    names = [re.match(r"[\w.-]+", need)[0] for need in needs]
    declared = {IMPORTED_AS.get(name, name) for name in names}
    missing = {
        (module, path.relative_to(ROOT).as_posix())
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for module in _imported(path)
        if module not in sys.stdlib_module_names
        and module not in {"attndsl", BY_RICH, *declared}
        and not path.relative_to(ROOT).as_posix().startswith(OF_EXTRAS.get(module, "no file"))
    }
    assert missing == set()


def test_every_package_is_listed():
    listed = SETTINGS["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(_packages())


def test_every_package_is_marked_as_one():
    for name, folder in _packages().items():
        assert (folder / "__init__.py").exists(), name


SHIPPED = ("a/bundle.json", "entries/b.txt", "code/c/d.cubin")
"""Files of the kinds that tools/shipped_kernels.py writes."""
CUT_OFF = ".triton-0.1-x7f/bundle/bundle.json"
"""A file of a build that was killed."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The project's wheel, built from a copy of what git would hold."""
    folder = tmp_path_factory.mktemp("wheel")
    skipped = shutil.ignore_patterns("__pycache__", "shipped")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=skipped)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    shipped = folder / "source" / "attndsl" / "shipped"
    for name in (*(f"triton-0.1/{name}" for name in SHIPPED), CUT_OFF):
        path = shipped / name
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    command = [
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
        "--wheel-dir", folder, folder / "source",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The folder that the wheel is installed into, alone."""
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
        "--target", folder, wheel,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_wheel_holds_every_module_and_data_file(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in DATA | {".py"} and "shipped" not in path.parts:
                inside = "/".join([*package.split("."), *path.relative_to(ROOT / folder).parts])
                assert inside in names, f"the wheel lacks {inside}"


def test_the_wheel_holds_shipped_kernels_if_they_are_there(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    found = {name for name in names if name.startswith("attndsl/shipped/")}
    assert found == {f"attndsl/shipped/triton-0.1/{name}" for name in SHIPPED}


def test_the_wheel_holds_nothing_else(wheel):
    for name in zipfile.ZipFile(wheel).namelist():
        top = name.split("/")[0]
        assert top == "attndsl" or top.endswith(".dist-info"), name


def _run(arguments, folder, cwd):
    # Without site's .pth files of this checkout's own installation coming first.
    env = {**os.environ, "PYTHONPATH": str(folder), "ATTNDSL_CACHE_DIR": str(cwd / "cache")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True
    )


def test_the_installed_wheel_works_from_an_empty_folder(installed, tmp_path):
    done = _run(["-c", USE, str(installed)], installed, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_installed_text_has_the_digest_of_the_checkout(installed, tmp_path):
    code = "from attndsl.foundation.fingerprint import source_fingerprint as f; print(f())"
    done = _run(["-c", code], installed, tmp_path)
    # Bytecode, which importing leaves there, counts for nothing.
    again = _run(["-c", code], installed, tmp_path)
    assert done.stdout == again.stdout == source_fingerprint() + "\n", done.stderr
    file = installed / "attndsl" / "grammar" / "prelude.attn"
    text = file.read_text("utf-8")
    file.write_text(text + "\n", "utf-8")
    try:
        changed = _run(["-c", code], installed, tmp_path)
    finally:
        file.write_text(text, "utf-8")
    assert changed.stdout not in ("", done.stdout)


@pytest.mark.parametrize(
    ("text", "code"), [("mask = natten2d(8, 8, 3, 3)\n", 0), ("mask = natten(8)\n", 1)]
)
def test_the_installed_command_works(installed, tmp_path, text, code):
    (tmp_path / "a.attn").write_text(text)
    done = _run([installed / "bin" / "attndsl", "check", "a.attn"], installed, tmp_path)
    assert done.returncode == code, done.stderr
    assert str(ROOT) not in done.stdout


def test_the_editable_installation_is_this_checkout(tmp_path):
    code = "import attndsl.backends.base, attndsl.grammar, attndsl as a; print(a.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).parent == ROOT / "attndsl"


@pytest.mark.parametrize("folder", ["backends", "grammar"])
def test_mapped_folders_refuse_their_bare_names(folder):
    done = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True
    )
    assert f"is the package attndsl.{folder}" in done.stderr


def test_constraints_pin_what_the_project_asks_for():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.split("==")[0].lower() for line in lines if not line.startswith("#")}
    project = SETTINGS["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *extras["dev"], *extras["docs"]]
    names = {ask.split(";")[0].strip().lower() for ask in asked}
    bare = {re.split(r"[<>=\[]", name)[0] for name in names}
    # torch's build for CUDA asks for a version of triton of its own.
    assert bare - pins == {"triton"}


def test_the_oldest_torch_asks_for_a_triton_that_the_project_takes():
    oldest = {}
    for ask in SETTINGS["project"]["dependencies"]:
        name, _, version = ask.split(";")[0].strip().partition(">=")
        if name in ("torch", "triton"):
            oldest[name] = tuple(map(int, version.split(".")))
    # torch's builds for CUDA ask for triton 3.5.x in torch 2.9 and for 3.6.0 in torch 2.10.
    assert oldest == {"torch": (2, 10), "triton": (3, 6)}


def test_the_version_is_one():
    import attndsl

    assert SETTINGS["project"]["version"] == attndsl.__version__
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {attndsl.__version__}" in changes
