"""The names of the package: reachable without imports of their own, and no others to mypy."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import attndsl

PACKAGE = Path(attndsl.__file__).parent


def test_modules_are_reachable_and_imported_when_used():
    code = (
        "import attndsl, sys\n"
        "assert attndsl.errors.ShapeError\n"
        "assert 'torch' not in sys.modules\n"
        "import torch\n"
        "assert 'attndsl.flex' not in sys.modules\n"
        "assert attndsl.flex.flex_attention\n"
        "assert {'errors', 'flex', 'nn', 'layout', 'compile'} <= set(dir(attndsl))\n"
        "from attndsl import *\n"
        "assert flex is attndsl.flex\n"
        "assert not hasattr(attndsl, 'nonsense')\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=120)


def test_completion_shows_the_public_names_alone():
    assert set(dir(attndsl)) == {*attndsl.__all__, "__version__"}
    assert all(hasattr(attndsl, name) for name in dir(attndsl))


def test_errors_are_looked_for_where_they_are():
    with pytest.raises(AttributeError) as caught:
        _ = attndsl.ShapeError
    assert str(caught.value) == (
        "module 'attndsl' has no attribute 'ShapeError': it is attndsl.errors.ShapeError"
    )
    for name in ("compil", "visible", "TYPE_CHECKED"):
        with pytest.raises(AttributeError, match=f"no attribute '{name}'$"):
            getattr(attndsl, name)


def test_type_checkers_know_the_names_and_no_others(tmp_path):
    """What the package's own file tells them; other modules are left out, since mypy is slow."""
    (tmp_path / "attndsl").mkdir()
    for name in ("__init__.py", "py.typed"):
        shutil.copy(PACKAGE / name, tmp_path / "attndsl")
    names = [name for name in attndsl.__all__ if name != "nonsense"]
    lines = ["import attndsl", *(f"attndsl.{name}" for name in names), "attndsl.nonsense"]
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n")
    command = [
        sys.executable, "-P", "-m", "mypy", "--ignore-missing-imports", "--no-site-packages",
        "--cache-dir", str(tmp_path / "cache"), "user.py",
    ]  # fmt: skip
    found = subprocess.run(
        command, cwd=tmp_path, timeout=300, capture_output=True, text=True, check=False
    )
    errors = [line for line in found.stdout.splitlines() if line.startswith("user.py")]
    assert errors == [
        f'user.py:{len(lines)}: error: Module has no attribute "nonsense"  [attr-defined]'
    ], found.stdout + found.stderr
