"""Real English text that every machine with Python has: documentation strings and licences."""

from __future__ import annotations

import ast
import inspect
import itertools
import sysconfig
import warnings
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
_SHORTEST = 80
_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


def gather(most: int = 800_000) -> str:
    """Up to ``most`` characters of :data:`ALPHABET`, the same each time on one machine.

    Standard library documentation in the order of its files, then licences of installed packages in
    the order of their names; each piece once.
    """
    seen: set[str] = set()
    pieces: list[str] = []
    size = 0
    for piece in itertools.chain(_documentation(), _licences()):
        kept = "".join(c for c in inspect.cleandoc(piece) if c in ALPHABET).strip()
        if len(kept) < _SHORTEST or kept in seen:
            continue
        seen.add(kept)
        pieces.append(kept)
        size += len(kept) + 2
        if size >= most:
            break
    return "\n\n".join(pieces)[:most]


def _documentation() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED & set(path.relative_to(root).parts):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Old escapes in these files.
                tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def _licences() -> Iterator[str]:
    for package in sorted(metadata.distributions(), key=lambda d: str(d.metadata["Name"]).lower()):
        for file in package.files or ():
            if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING", "NOTICE")):
                path = Path(str(package.locate_file(file)))
                if path.is_file():
                    yield path.read_text("utf-8", errors="ignore")
