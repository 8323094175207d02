"""Rows of a run put into a result file that has others.

No row with a figure is lost, or replaced by one without. Rows say their commit, since those of one
file may be of several.

Rows of two machines, or of two versions of torch or Triton, never share a file. Those of another
machine go into a file beside, whose name has the machine.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Row = dict[str, Any]
Results = dict[str, Any]
"""A result file, as ``common.write`` makes it."""


@dataclass(frozen=True)
class Machine:
    """Where a run measures."""

    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES has them."""
    name: str
    """Of one of them."""
    versions: dict[str, Any]
    """As ``common.versions`` says them."""

    def results(self, gpus: int) -> Results:
        """Those of a benchmark that needs so many GPUs, without rows."""
        # As scaling.py calls them, which is the one of several GPUs.
        name = f"{len(self.gpus)} x {self.name}" if gpus > 1 else self.name
        return {"machine": name, "versions": self.versions, "rows": []}


class Unreadable(Exception):
    """A result file that is none. It is left as it is."""


@dataclass(frozen=True)
class Shape:
    """How to read the rows of one benchmark."""

    same: tuple[str, ...]
    """Fields that say which row it is."""
    figure: str
    """A field without which a row has nothing to say."""

    def key(self, row: Row) -> str:
        """Which row it is."""
        return json.dumps([row.get(name) for name in self.same])

    def has_figure(self, row: Row) -> bool:
        """Whether it was measured."""
        return row.get(self.figure) is not None


def read(path: Path) -> Results | None:
    """A result file, or None where there is none.

    Raises:
        Unreadable: It is cut off, or no result file.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise Unreadable(f"{path} cannot be read: {error}") from None
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise Unreadable(f"{path} has no rows")
    if not isinstance(found.get("versions"), dict) or not isinstance(found.get("machine"), str):
        raise Unreadable(f"{path} does not say its machine and versions")
    return dict(found)


def place(stem: str, new: Results, folders: Sequence[Path]) -> tuple[Path, Results | None]:
    """The file in the first of ``folders`` that takes new results, and what is there.

    Args:
        stem: Of the benchmark's file.
        new: What was measured.
        folders: Where a run writes, and where committed results lie.

    Raises:
        Unreadable: A file in the way cannot be read.
    """
    for name in (f"{stem}.json", f"{stem}.{_slug(new)}.json"):
        found = first(name, folders)
        if found is None or _slug(found) == _slug(new):
            return folders[0] / name, found
    raise Unreadable(f"{folders[0] / name} is of another machine than its name says")


def first(name: str, folders: Sequence[Path]) -> Results | None:
    """What the first of ``folders`` that has the file says.

    Raises:
        Unreadable: See :func:`read`.
    """
    return next((found for folder in folders if (found := read(folder / name))), None)


def merged(old: Results | None, new: Results, shape: Shape) -> Results:
    """The results of both. New rows replace old ones, unless they say less."""
    rows: dict[str, Row] = {}
    for results in (old, new) if old else (new,):
        for row in results["rows"]:
            key = shape.key(row)
            if key not in rows or not _says_less(row, rows[key], shape):
                at = row.get("commit") or results["versions"].get("commit")
                rows[key] = {**row, "commit": at}
    return {**new, "rows": list(rows.values())}


def _says_less(row: Row, other: Row, shape: Shape) -> bool:
    """Whether ``row`` lacks the figure that ``other`` has, or both do and it has fewer fields."""
    measured = shape.has_figure(row), shape.has_figure(other)
    return measured == (False, True) or (measured == (False, False) and len(row) < len(other))


def _slug(results: Results) -> str:
    """Of the machine and what else decides about times."""
    versions = results["versions"]
    words = f"{results['machine']} torch {versions.get('torch')} triton {versions.get('triton')}"
    return re.sub(r"[^A-Za-z0-9.]+", "-", words).strip("-")
