"""The disk cache of generated kernels and lowered programs, safe with many processes at once.

An entry is ``KEY.py`` (readable, imported by backends; empty for lowered programs) and
``KEY.json``, where ``KEY`` is 64 hex digits. The first line of the ``.json`` holds the digest of
all other bytes of both files. The digest is compared before anything is parsed, so that a changed
entry is never used; it guards against accidents. Against those who may write there, the folder and
both files have to be this user's, and writable by nobody else (:mod:`.owned_folder`). The
``.json`` is published last, so that a writer killed half-way leaves nothing that would be read.
Files are written as ``KEY.py*.tmp`` and ``KEY.json*.tmp`` and renamed. What is damaged is reported,
removed and made again; what cannot be written is kept in memory, and so is all that is made after
this package's own files have changed. No call fails for the cache's sake.

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
import random
import re
import stat
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attndsl.backends.cache_entries import About, Entry
from attndsl.backends.key import FORMAT_VERSION
from attndsl.errors import CacheWarning, ConfigError
from attndsl.foundation.fingerprint import sources_changed
from attndsl.foundation.logs import LOG, tell_once

from .owned_folder import OwnedFolder, open_folder

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping

IMPORTED = "bundles"
"""The folder within the cache's that holds bundles which were imported (:mod:`.bundle_store`)."""
_KEY_LENGTH = 64
_ATTEMPTS = 4
"""Attempts of a writer, while others publish or remove the same entry."""
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
"""Characters of an entry's description, beyond which it is not shown."""


NOTHING = About()
"""Description of damaged entries, and of those of older versions."""


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One entry, as listings show it."""

    key: str
    kind: str
    """``forward``, ``backward``, ``program`` and the like; ``damaged`` where it cannot be used."""
    bytes: int
    used: float
    """Time of the last read, in seconds since the epoch."""
    about: About = NOTHING


@dataclass(frozen=True, slots=True)
class CacheRemoval:
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


class MemoryStore:
    """Entries in memory. Implements :class:`attndsl.backends.cache_entries.Store`."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        """Entries by their keys."""

    def load(self, key: str) -> Entry | None:
        """The entry of ``key``, or None."""
        return self.entries.get(key)

    def save(self, key: str, source: str, meta: Mapping[str, object]) -> Entry:
        """Keep an entry, with a name for its text that is no file."""
        # What was given may change, as nothing on disk does.
        own = json.loads(json.dumps(dict(meta)))
        # The same in all processes: compiled code holds the name.
        entry = self.entries[key] = Entry(Path("attndsl") / f"{key}.py", source, own)
        return entry


class KernelCache:
    """A folder of entries. Implements :class:`attndsl.backends.cache_entries.Store`."""

    def __init__(self, folder: Path, limit: int = 256 << 20, enabled: bool = True) -> None:
        """A cache in ``folder``, made (mode 0700) when first written.

        Args:
            folder: Where entries lie.
            limit: Bytes beyond which the least recently used entries are removed.
            enabled: False keeps entries in memory alone.
        """
        self.folder = folder
        self.limit = limit
        self.enabled = enabled
        self._memory = MemoryStore()
        self._warned: set[str] = set()

    def load(self, key: str) -> Entry | None:
        """The entry of ``key``, or None; a damaged one is reported and removed."""
        found = self._memory.load(key) or self._load(key)
        LOG.debug("cache: %s %s in %s", "found" if found else "no", key[:16], self.folder)
        return found

    def _load(self, key: str) -> Entry | None:
        if not self.enabled:
            return None
        try:
            with open_folder(self.folder) as folder:
                try:
                    return _read(folder, key)
                except ValueError as error:
                    what = f"the damaged cache entry {key[:16]} in {self.folder}"
                    self._warn(f"dropped {what}: {reason(error)}")
                    with contextlib.suppress(OSError):
                        _remove(folder, key)
        except (OSError, ConfigError) as error:
            self._warn_of(error)
        return None

    def save(self, key: str, source: str, meta: Mapping[str, object]) -> Entry:
        """Publish an entry; in memory alone where it cannot be kept in ``folder``."""
        if self.enabled:
            if sources_changed():
                tell_once(
                    "the files of attndsl are not those that this process has imported, or are in "
                    "an archive: what it makes is kept in memory alone"
                )
            elif (entry := self._published(key, source, meta)) is not None:
                self._memory.entries.pop(key, None)
                return entry
        return self._memory.save(key, source, meta)

    def _published(self, key: str, source: str, meta: Mapping[str, object]) -> Entry | None:
        described = entry_text(key, source, meta)
        try:
            with open_folder(self.folder, make=True) as folder:
                _write(folder, key, source, described)
                with contextlib.suppress(OSError):
                    if self._lists_after(len(source) + len(described)):
                        _evict(folder, self.limit)
        except (OSError, ConfigError) as error:
            self._warn(f"cannot keep kernels in {self.folder}: {reason(error)}; they are made anew")
            return None
        return Entry(self.folder / f"{key}.py", source, dict(meta))

    def entries(self) -> list[EntryInfo]:
        """All entries, the most recently used first; none of a folder that others may write to."""
        try:
            with open_folder(self.folder) as folder:
                found = [
                    EntryInfo(key, *_described(folder, key, files))
                    for key, files in _files(folder).items()
                    if f"{key}.json" in files.names
                ]
        except (OSError, ConfigError) as error:
            self._warn_of(error)
            return []
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> CacheRemoval:
        """Remove all entries.

        Raises:
            ConfigError: Entries cannot be removed.
        """
        return self._removal(0)

    def prune(self, limit: int | None = None) -> CacheRemoval:
        """Remove the least recently used entries beyond ``limit`` bytes.

        Raises:
            ConfigError: Entries cannot be removed.
        """
        return self._removal(self.limit if limit is None else limit)

    def _removal(self, limit: int) -> CacheRemoval:
        try:
            with open_folder(self.folder) as folder:
                removed = _evict(folder, limit)
                foreign = sorted(
                    name
                    for name, status in folder.scan()
                    if not _is_own(name, status) and name != IMPORTED
                )
        except FileNotFoundError:
            return CacheRemoval(0, 0, ())
        except (OSError, ConfigError) as error:
            hint = error.hint if isinstance(error, ConfigError) else None
            raise ConfigError(
                f"cannot remove entries of {self.folder}: {reason(error)}", hint=hint
            ) from error
        return CacheRemoval(len(removed), sum(files.bytes for files in removed), tuple(foreign))

    def make_folder(self) -> None:
        """Have the folder, with no rights for others.

        Raises:
            OSError, ConfigError: It cannot be had, or others may write to it.
        """
        open_folder(self.folder, make=True).close()

    def _lists_after(self, written: int) -> bool:
        """Draw by chance whether the writer of ``written`` bytes lists the folder."""
        return _CHANCE.random() * self.limit < written * _LISTINGS

    def _warn_of(self, error: OSError | ConfigError) -> None:
        """Tell why the folder is not read, unless nothing is there."""
        if isinstance(error, ConfigError):
            self._warn(f"{error.message}; not used")
        elif not isinstance(error, FileNotFoundError | NotADirectoryError):
            self._warn(f"cannot read kernels in {self.folder}: {reason(error)}; they are made anew")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, CacheWarning, stacklevel=3)


def reason(error: OSError | ValueError) -> str:
    """The message of an error, without a hint."""
    if isinstance(error, ConfigError):
        return error.message
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _files(folder: OwnedFolder) -> dict[str, _Files]:
    """The cache's files by key."""
    found: dict[str, _Files] = {}
    for name, status in folder.scan():
        if _is_own(name, status):
            key = name[:_KEY_LENGTH]
            before = found.get(key, _Files())
            found[key] = _Files(
                (*before.names, name),
                before.bytes + status.st_size,
                # Reading an entry touches its .json alone, which is younger than its .py.
                max(before.used, status.st_mtime),
            )
    return found


def _evict(folder: OwnedFolder, limit: int) -> list[_Files]:
    """Remove the least recently used entries, so that at most ``limit`` bytes stay.

    Raises:
        OSError: A file cannot be removed.
    """
    removed, total = [], 0
    for key, files in sorted(_files(folder).items(), key=lambda item: -item[1].used):
        total += files.bytes
        if total > limit or not limit:
            _remove(folder, key, files.names)
            removed.append(files)
    return removed


def _remove(folder: OwnedFolder, key: str, more: Iterable[str] = ()) -> None:
    """Remove the entry of ``key``, and files of its writers that were killed."""
    # The .json first: without it the others are no entry.
    for name in dict.fromkeys((f"{key}.json", f"{key}.py", *more)):
        folder.remove(name)


def _is_own(name: str, status: os.stat_result) -> bool:
    return _OWN.fullmatch(name) is not None and stat.S_ISREG(status.st_mode)


def _read(folder: OwnedFolder, key: str) -> Entry:
    """The entry of ``key`` in ``folder``, marked as used.

    Raises:
        OSError: It is not there, or cannot be read.
        ValueError: It is not as it was written, or others may have written it.
    """
    entry = _verified(folder, key)
    with contextlib.suppress(OSError):
        folder.touch(f"{key}.json")
    return entry


def _verified(folder: OwnedFolder, key: str) -> Entry:
    content, source = (folder.read(f"{key}{end}", _MAX_FILE) for end in (".json", ".py"))
    return verified_entry(folder.path / f"{key}.py", key, content, source)


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


def _described(folder: OwnedFolder, key: str, files: _Files) -> tuple[str, int, float, About]:
    """Kind, bytes, time of last use and description of an entry, for a listing."""
    try:
        meta = _verified(folder, key).meta
    except (OSError, ValueError):
        return "damaged", files.bytes, files.used, NOTHING
    kind, about = described_entry(meta)
    return kind, files.bytes, files.used, about


def described_entry(meta: Mapping[str, object]) -> tuple[str, About]:
    """The kind of an entry, and its description."""
    kind = meta.get("kind", "kernel")
    shown = kind if isinstance(kind, str) and len(kind) <= _MOST_OF_KIND else "kernel"
    return shown, _about(meta.get("about"))


def _about(found: object) -> About:
    """Description of an entry; fields of another type, or too long, have their defaults."""
    given = found if isinstance(found, dict) else {}
    kept: dict[str, Any] = {}
    for each in fields(About):
        value = given.get(each.name)
        # Bools are ints to Python.
        if type(value) is type(each.default) and len(str(value)) <= _MOST_SAID:
            kept[each.name] = value
    return About(**kept)


def _write(folder: OwnedFolder, key: str, source: str, described: str) -> None:
    text, content = f"{key}.py", source.encode()
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            if not _holds(folder, text, content):
                folder.publish(text, content)
            folder.publish(f"{key}.json", described.encode())
        except FileNotFoundError:  # Another process has removed what was half written.
            if attempt == _ATTEMPTS:
                raise
        else:
            if _holds(folder, text, content):
                break


def entry_text(key: str, source: str, meta: Mapping[str, object]) -> str:
    """Text of an entry's ``.json``: the line of the digest, then format, key and ``meta``."""
    described = {"format": FORMAT_VERSION, "key": key, "meta": dict(meta)}
    # Without the opening brace, which the line of the digest has.
    rest = json.dumps(described, indent=1).removeprefix("{\n")
    return f'{{"sha256": "{_digest(rest.encode(), source.encode())}",\n{rest}'


def _holds(folder: OwnedFolder, name: str, content: bytes) -> bool:
    """Tell whether ``content`` is that of the file ``name``."""
    try:
        return folder.read(name, len(content)) == content
    except (OSError, ValueError):
        return False


def _digest(rest: bytes, source: bytes) -> str:
    """SHA-256, in hex, of all bytes of an entry except the line of the digest."""
    # The length keeps bytes from moving from one file to the other unseen.
    return hashlib.sha256(b"%d\n%b%b" % (len(rest), rest, source)).hexdigest()
