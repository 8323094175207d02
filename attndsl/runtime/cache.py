"""The disk cache of generated kernels and lowered programs, safe with many processes at once.

An entry is ``KEY.py`` (readable, imported by backends; empty for lowered programs) and
``KEY.json``, where ``KEY`` is 64 hex digits. The first line of the ``.json`` holds the digest of
all other bytes of both files. The digest is compared before anything is parsed, so that a changed
entry is never used; it guards against accidents, not against those who may write there. The
``.json`` is published last, so that a writer killed half-way leaves nothing that would be read.
Files are written as ``KEY.py*.tmp`` and ``KEY.json*.tmp`` and renamed. What cannot be read is
reported, removed and made again; what cannot be written is kept in a folder of this process alone.
No call fails for the cache's sake.

There is no lock: no process waits for another, however many write at once. Two writers of one key
mostly have one text. A ``.py`` that holds the text already stays, so that these two differ in the
``.json`` alone. A writer that finds another text in the ``.py`` after both files are published
publishes them once more, so that the last writer leaves a whole entry.

Some writers list the folder, to remove what exceeds the limit. Whether a writer does so is drawn:
on average, the folder is listed once while a 64th of the limit is written, by whichever processes.
Between two listings the folder may exceed the limit, by more than a tenth with a chance of 0.2%.

Regular files of these names are the cache's. Other files, folders and links in its folder are never
read, removed, replaced or counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import stat
import tempfile
import warnings
import weakref
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attndsl.backends.base import About, Entry
from attndsl.backends.key import FORMAT_VERSION
from attndsl.errors import CacheWarning, ConfigError
from attndsl.logs import LOG
from attndsl.reading import read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

IMPORTED = "bundles"
"""The folder within the cache's that holds bundles which were imported (:mod:`.bundled`)."""
_KEY_LENGTH = 64
_ATTEMPTS = 4
"""Of a writer, while others publish or remove the same entry."""
_SHARED_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OWN = re.compile(rf"[0-9a-f]{{{_KEY_LENGTH}}}\.(?:json|py)(?:[0-9a-z_]+\.tmp)?")
"""Names of the cache's files, those of writers that were killed included."""
_HEAD = re.compile(rb'\{"sha256": "([0-9a-f]{64})",')
_LISTINGS = 64
"""Listings of the folder, on average, while as many bytes as the limit are written."""
_CHANCE = random.SystemRandom()
"""Apart from the generator that programs seed, of which forked processes would draw the same."""
_MAX_FILE = 1 << 28
"""Bytes of a file of an entry."""
_MOST_SAID, _MOST_OF_KIND = 200, 20
"""Characters of what an entry says of itself, beyond which it is not shown."""


NOTHING = About()
"""What damaged entries, and those of older versions, say of themselves."""


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One entry, as listings show it."""

    key: str
    kind: str
    """``forward``, ``backward``, ``program`` and the like; ``damaged`` where it cannot be used."""
    bytes: int
    used: float
    """When it was last read, in seconds since the epoch."""
    about: About = NOTHING


@dataclass(frozen=True, slots=True)
class Removal:
    """The result of a removal."""

    entries: int
    """Entries that were removed."""
    bytes: int
    """Bytes of the files that were removed."""
    foreign: tuple[str, ...]
    """Names of files that are not the cache's; they were left alone."""


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one key."""

    names: tuple[str, ...] = ()
    bytes: int = 0
    used: float = 0.0


class KernelCache:
    """A folder of entries. Implements :class:`attndsl.backends.base.Store`."""

    def __init__(self, folder: Path, limit: int = 256 << 20, enabled: bool = True) -> None:
        """A cache in ``folder``, made (mode 0700) when first written.

        Args:
            folder: Where entries lie.
            limit: Bytes beyond which the least recently used entries are removed.
            enabled: False keeps entries in a folder of this process alone.
        """
        self.folder = folder
        self.limit = limit
        self._enabled = enabled
        self._private: Path | None = None
        self._warned: set[str] = set()

    def load(self, key: str) -> Entry | None:
        """The entry of ``key``, or None; a damaged one is reported and removed."""
        found = self._load(key)
        LOG.debug("cache: %s %s in %s", "found" if found else "no", key[:16], self.folder)
        return found

    def _load(self, key: str) -> Entry | None:
        private = _read(self._private, key) if self._private else None
        if private is not None or not self._enabled or not self._trusted():
            return private
        try:
            return _read(self.folder, key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._warn(f"dropped the damaged cache entry {key[:16]} in {self.folder}: {error}")
            with contextlib.suppress(OSError):
                self._remove(key)
            return None

    def save(self, key: str, source: str, meta: Mapping[str, object]) -> Entry:
        """Publish an entry; in this process's own folder where ``folder`` cannot be written."""
        if self._enabled:
            try:
                self.make_folder()
                entry = _write(self.folder, key, source, meta)
            except OSError as error:
                self._warn(f"cannot keep kernels in {self.folder}: {error}; they are made anew")
            else:
                with contextlib.suppress(OSError):
                    if self._lists_after(_size(entry.path)):
                        self._evict(self.limit)
                return entry
        if self._private is None:
            self._private = Path(tempfile.mkdtemp(prefix="attndsl-"))
            weakref.finalize(self, shutil.rmtree, self._private, ignore_errors=True)
        return _write(self._private, key, source, meta)

    def entries(self) -> list[EntryInfo]:
        """All entries, the most recently used first."""
        found = [
            EntryInfo(key, *_described(self.folder, key, files))
            for key, files in self._files().items()
            if f"{key}.json" in files.names
        ]
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> Removal:
        """Remove all entries.

        Raises:
            ConfigError: Entries cannot be removed.
        """
        return self._removal(0)

    def prune(self, limit: int | None = None) -> Removal:
        """Remove the least recently used entries beyond ``limit`` bytes.

        Raises:
            ConfigError: Entries cannot be removed.
        """
        return self._removal(self.limit if limit is None else limit)

    def _removal(self, limit: int) -> Removal:
        removed: list[_Files] = []
        try:
            removed = self._evict(limit)
            foreign = sorted(
                each.name
                for each in _scan(self.folder)
                if not _is_own(each) and each.name != IMPORTED
            )
        except OSError as error:
            raise ConfigError(
                f"cannot remove entries of {self.folder}: {error.strerror or error}"
            ) from error
        return Removal(len(removed), sum(files.bytes for files in removed), tuple(foreign))

    def _files(self) -> dict[str, _Files]:
        """The cache's files by key."""
        found: dict[str, _Files] = {}
        for each in _scan(self.folder):
            if not _is_own(each):
                continue
            with contextlib.suppress(FileNotFoundError):  # Another process has removed it.
                status, key = each.stat(), each.name[:_KEY_LENGTH]
                before = found.get(key, _Files())
                found[key] = _Files(
                    (*before.names, each.name),
                    before.bytes + status.st_size,
                    # Reading an entry touches its .json alone, which is younger than its .py.
                    max(before.used, status.st_mtime),
                )
        return found

    def make_folder(self) -> None:
        """Have the folder, with no rights for others.

        Raises:
            OSError: It cannot be had, or others may write to it.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not self._trusted():
            raise PermissionError("others may write to it")

    def _trusted(self) -> bool:
        """Whether only this user can have written what lies there (entries are imported)."""
        try:
            found = self.folder.stat()
        except OSError:
            return False
        own = not hasattr(os, "getuid") or found.st_uid == os.getuid()
        if own and not found.st_mode & _SHARED_WRITE:
            return True
        self._warn(f"{self.folder} belongs to another user or is writable by others; not used")
        return False

    def _lists_after(self, written: int) -> bool:
        """Whether the writer of ``written`` bytes lists the folder, drawn by chance."""
        return _CHANCE.random() * self.limit < written * _LISTINGS

    def _remove(self, key: str, more: Iterable[str] = ()) -> None:
        """Remove the entry of ``key``, and files of its writers that were killed."""
        # The .json first: without it the others are no entry.
        for name in dict.fromkeys((f"{key}.json", f"{key}.py", *more)):
            path = self.folder / name
            # A folder or a link of this name is not the cache's.
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISREG(path.lstat().st_mode):
                    path.unlink()

    def _evict(self, limit: int) -> list[_Files]:
        """Remove the least recently used entries, so that at most ``limit`` bytes stay.

        Raises:
            OSError: A file cannot be removed.
        """
        removed, total = [], 0
        for key, files in sorted(self._files().items(), key=lambda item: -item[1].used):
            total += files.bytes
            if total > limit or not limit:
                self._remove(key, files.names)
                removed.append(files)
        return removed

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, CacheWarning, stacklevel=3)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return list(entries)


def _size(path: Path) -> int:
    """Bytes of the entry whose text is at ``path``."""
    return path.stat().st_size + path.with_suffix(".json").stat().st_size


def _is_own(entry: os.DirEntry[str]) -> bool:
    return _OWN.fullmatch(entry.name) is not None and entry.is_file(follow_symlinks=False)


def _read(folder: Path, key: str) -> Entry | None:
    """The entry of ``key`` in ``folder``, marked as used, or None where there is no such entry.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not as it was written.
    """
    path = folder / f"{key}.json"
    if not os.path.lexists(path):
        return None
    entry = _verified(folder, key)
    with contextlib.suppress(OSError):
        os.utime(path)
    return entry


def _verified(folder: Path, key: str) -> Entry:
    path = folder / f"{key}.py"
    content, source = (_read_file(each) for each in (folder / f"{key}.json", path))
    return verified_entry(path, key, content, source)


def verified_entry(path: Path, key: str, content: bytes, source: bytes) -> Entry:
    """The entry of ``key`` that the contents of its two files are.

    Raises:
        ValueError: It is not as it was written.
    """
    first, _, rest = content.partition(b"\n")
    head = _HEAD.fullmatch(first)
    if head is None:
        raise ValueError("it is of another format")
    if _digest(rest, source) != head[1].decode():
        raise ValueError("it is not the one that was written")
    try:
        described = json.loads(content)
        form, own, meta = (described[name] for name in ("format", "key", "meta"))
    except (RecursionError, KeyError, TypeError) as error:
        raise ValueError("it is of another form") from error
    if form != FORMAT_VERSION or own != key or not isinstance(meta, dict):
        raise ValueError("it is of another format or of another key")
    return Entry(path, source.decode(), meta)


def _read_file(path: Path) -> bytes:
    if path.is_symlink():
        raise ValueError(f"{path.name} is a link")
    return read_bytes(path, _MAX_FILE)


def _described(folder: Path, key: str, files: _Files) -> tuple[str, int, float, About]:
    """What a listing shows of an entry."""
    try:
        meta = _verified(folder, key).meta
    except (OSError, ValueError):
        return "damaged", files.bytes, files.used, NOTHING
    kind, about = described_entry(meta)
    return kind, files.bytes, files.used, about


def described_entry(meta: Mapping[str, object]) -> tuple[str, About]:
    """The kind of an entry, and what it says of itself."""
    kind = meta.get("kind", "kernel")
    shown = kind if isinstance(kind, str) and len(kind) <= _MOST_OF_KIND else "kernel"
    return shown, _about(meta.get("about"))


def _about(found: object) -> About:
    """What an entry says of itself, as far as it is of the form that is written."""
    given = found if isinstance(found, dict) else {}
    kept: dict[str, Any] = {}
    for each in fields(About):
        value = given.get(each.name)
        # Bools are ints to Python.
        if type(value) is type(each.default) and len(str(value)) <= _MOST_SAID:
            kept[each.name] = value
    return About(**kept)


def _write(folder: Path, key: str, source: str, meta: Mapping[str, object]) -> Entry:
    path = folder / f"{key}.py"
    described = entry_text(key, source, meta)
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if not _holds(path, source):
                _publish(path, source)
            _publish(folder / f"{key}.json", described)
        except FileNotFoundError:  # Another process has removed what was half written.
            if attempt == _ATTEMPTS:
                raise
        else:
            if _holds(path, source):
                break
    return Entry(path, source, dict(meta))


def entry_text(key: str, source: str, meta: Mapping[str, object]) -> str:
    """What the ``.json`` of an entry holds."""
    described = {"format": FORMAT_VERSION, "key": key, "meta": dict(meta)}
    # Without the opening brace, which the line of the digest has.
    rest = json.dumps(described, indent=1).removeprefix("{\n")
    return f'{{"sha256": "{_digest(rest.encode(), source.encode())}",\n{rest}'


def _holds(path: Path, text: str) -> bool:
    """Whether ``text`` is the content of the file at ``path``."""
    try:
        return _read_file(path) == text.encode()
    except (OSError, ValueError):
        return False


def _publish(path: Path, text: str) -> None:
    """Put ``text`` at ``path`` so that readers see all of it or nothing.

    Raises:
        OSError: It cannot be written, or something of that name is not a file of the cache.
    """
    if path.is_symlink():
        raise FileExistsError(f"{path.name} is a link")
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _digest(rest: bytes, source: bytes) -> str:
    """Of all bytes of an entry except the line of the digest."""
    # The length keeps bytes from moving from one file to the other unseen.
    return hashlib.sha256(b"%d\n%b%b" % (len(rest), rest, source)).hexdigest()
