"""The files that a command's arguments stand for: files, folders and patterns. Never imports torch.

A folder stands for the program files and configurations in it and below it. Hidden files and
folders are left out, and so are virtual environments and what other package managers fill. Links to
folders are not followed, and links to files only where these lie in the folder too.

A pattern such as ``conf/*.yaml`` stands for what it matches, as if all of that were named.
"""

from __future__ import annotations

import fnmatch
import os
import sys
from typing import TYPE_CHECKING, NamedTuple

from attndsl.config import SUFFIXES, why_foreign
from attndsl.errors import visible

from .usage_errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_FILES = 10_000
"""Files that the arguments of a command may stand for."""
MAX_LOOKS = 200_000
"""Files and folders that are looked at to find them."""
_MAGIC = frozenset("*?[")
_FOREIGN = frozenset({"__pycache__", "node_modules"})
_ENVIRONMENT = "pyvenv.cfg"
"""Marks a virtual environment."""


class Skipped(NamedTuple):
    """A file in a folder that is left alone."""

    file: str
    reason: str


class Files(NamedTuple):
    """Files that the arguments of a command stand for, and files left alone."""

    files: list[str]
    """Each once, in the order of the arguments; those of a folder are sorted."""
    skipped: list[Skipped]


def is_pattern(argument: str) -> bool:
    """Return True if ``argument`` is a pattern of file names and nothing of that name exists."""
    return not _MAGIC.isdisjoint(argument) and not os.path.lexists(argument)


def find_files(arguments: Sequence[str], suffixes: Sequence[str], key: str | None = None) -> Files:
    """The files that ``arguments`` stand for.

    Args:
        arguments: Files, folders, patterns, and ``-``.
        suffixes: Of the files of folders.
        key: Where programs stand in configurations, which decides what is one in a folder.

    Raises:
        UsageError: An argument stands for no file, or for more than anybody has.
    """
    search = _Search(tuple(suffixes), key)
    for argument in arguments:
        names = _matches(argument, search) if is_pattern(argument) else [argument]
        kept = [search.take(name) for name in names]
        if not any(kept):
            left = search.skipped[-1] if search.skipped else None
            raise UsageError(
                f"'{argument}' matches no program file",
                hint=f"programs are in {', '.join(f'*{suffix}' for suffix in suffixes)}"
                if left is None
                else f"left alone: {left.file}, since {left.reason}",
            )
    return Files(list(search.found), [x for x in search.skipped if x.file not in search.found])


def tell_skipped(skipped: Sequence[Skipped]) -> None:
    """Say on standard error which files are left alone, and why."""
    for each in skipped:
        print(f"skipped {visible(each.file)}: {visible(each.reason)}", file=sys.stderr)


class _Search:
    """Search through files and folders, with limits on their number."""

    def __init__(self, suffixes: tuple[str, ...], key: str | None) -> None:
        self.suffixes = suffixes
        self.key = key
        self.found: dict[str, None] = {}
        self.skipped: list[Skipped] = []
        self.looks = 0

    def take(self, name: str) -> bool:
        """Keep a file, or all of a folder that are of use; False if there are none."""
        if name == "-" or not os.path.isdir(name):
            self._keep(name)
            return True
        kept = False
        root = os.path.realpath(name)
        for entry in self.walk(name):
            if not entry.name.lower().endswith(self.suffixes) or entry.is_dir():
                continue
            if self.leads_out(entry, root):
                continue
            if not entry.is_file():
                self.skip(entry.path, "it is a link to nothing, or no file")
                continue
            config = entry.name.lower().endswith(SUFFIXES)
            reason = why_foreign(entry.path, self.key) if config else None
            if reason is not None:
                self.skip(entry.path, reason)
            else:
                self._keep(_shown(entry.path))
                kept = True
        return kept

    def leads_out(self, entry: os.DirEntry[str], root: str) -> bool:
        """Return True, and note the file as skipped, if it is a link to one outside of ``root``."""
        inside = os.path.realpath(entry.path).startswith(os.path.join(root, ""))
        if inside or not entry.is_symlink():
            return False
        self.skip(entry.path, "it is a link out of the folder")
        return True

    def skip(self, path: str, reason: str) -> None:
        """Leave a file alone."""
        found = Skipped(_shown(path), reason)
        if found not in self.skipped:
            self.skipped.append(found)

    def walk(self, folder: str) -> Iterator[os.DirEntry[str]]:
        """Everything in ``folder`` and below it, sorted, that is neither hidden nor foreign."""
        waiting = [iter(self.entries(folder))]
        while waiting:
            entry = next(waiting[-1], None)
            if entry is None:
                waiting.pop()
                continue
            yield entry
            if entry.is_dir(follow_symlinks=False):
                waiting.append(iter(self.entries(entry.path)))

    def entries(self, folder: str) -> list[os.DirEntry[str]]:
        """Sorted entries of ``folder``; none if the folder is not the user's own work."""
        try:
            with os.scandir(folder) as entries:
                found = sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            self.skip(folder, f"cannot be read: {error.strerror or error}")
            return []
        self.looks += len(found)
        if self.looks > MAX_LOOKS:
            raise UsageError(
                f"there are more than {MAX_LOOKS} files to look at", hint="name smaller folders"
            )
        names = {entry.name for entry in found}
        return [] if _ENVIRONMENT in names else [e for e in found if not _is_left_out(e.name)]

    def _keep(self, name: str) -> None:
        self.found[name] = None
        if len(self.found) > MAX_FILES:
            raise UsageError(
                f"there are more than {MAX_FILES} files of programs", hint="name smaller folders"
            )


def _shown(path: str) -> str:
    """A path as people write it, and as other software knows it."""
    return path.removeprefix(os.path.join(os.curdir, ""))


def _is_left_out(name: str) -> bool:
    return name.startswith(".") or name in _FOREIGN


def _matches(pattern: str, search: _Search) -> list[str]:
    """The files and folders that ``pattern`` matches.

    ``**`` stands for folders within each other. At the end it says what a folder stands for anyway.
    """
    drive, tail = os.path.splitdrive(pattern)
    found = [drive + os.sep if tail.startswith(("/", os.sep)) else drive]
    root = None
    parts = [part for part in tail.replace(os.sep, "/").split("/") if part]
    while parts and parts[-1] == "**":
        parts.pop()
    for part in parts:
        if root is None and not _MAGIC.isdisjoint(part):
            root = os.path.realpath(found[0] or ".") if found else ""
        if part == "**":
            found = [name for base in found for name in _folders(base, search)]
        elif root is None or _MAGIC.isdisjoint(part):
            joined = (os.path.join(base, part) for base in found)
            found = [name for name in joined if os.path.lexists(name)]
        else:
            found = [name for base in found for name in _named(base, part, root, search)]
    return list(dict.fromkeys(name or "." for name in found))


def _named(base: str, part: str, root: str, search: _Search) -> Iterator[str]:
    """Paths in the folder ``base`` whose names match ``part``, without links that lead out."""
    for entry in search.entries(base or ".") if os.path.isdir(base or ".") else ():
        if not fnmatch.fnmatchcase(entry.name, part) or (entry.is_symlink() and entry.is_dir()):
            continue
        if not search.leads_out(entry, root):
            yield os.path.join(base, entry.name)


def _folders(base: str, search: _Search) -> Iterator[str]:
    """``base`` and all folders below it."""
    yield base
    for entry in search.walk(base or ".") if os.path.isdir(base or ".") else ():
        if entry.is_dir(follow_symlinks=False):
            yield entry.path if base else os.path.relpath(entry.path)
