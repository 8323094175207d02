"""The disk cache of generated kernels and lowered programs, safe with many processes at once.

An entry is ``KEY.py`` (readable, imported by backends; empty for lowered programs) and
``KEY.json``, which holds the digest of the ``.py`` and is published last, so that a writer killed
half-way leaves nothing that would be read. Files are written under another name and renamed; a lock
keeps two writers of one entry apart. What cannot be read is reported, removed and made again; what
cannot be written is kept in a folder of this process alone. No call fails for the cache's sake.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock

from attndsl.backends.base import Entry
from attndsl.backends.key import FORMAT_VERSION
from attndsl.errors import CacheWarning

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_LOCK_SECONDS = 5.0
_SHARED_WRITE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True)
class EntryInfo:
    """One entry, as listings show it."""

    key: str
    kind: str
    """``forward``, ``backward`` or ``program``."""
    bytes: int
    used: float
    """When it was last read, in seconds since the epoch."""


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
        private = self._read(self._private, key) if self._private else None
        if private is not None or not self._enabled or not self._trusted():
            return private
        try:
            return self._read(self.folder, key)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self._warn(f"dropped the damaged cache entry {key[:16]} in {self.folder}: {error}")
            self._remove(key)
            return None

    def save(self, key: str, source: str, meta: Mapping[str, object]) -> Entry:
        """Publish an entry; in this process's own folder where ``folder`` cannot be written."""
        if self._enabled:
            try:
                self._make_folder()
                with filelock.FileLock(self.folder / "lock", timeout=_LOCK_SECONDS, mode=0o600):
                    entry = self._write(self.folder, key, source, meta)
                    self._evict()
                return entry
            except (OSError, filelock.Timeout) as error:
                self._warn(f"cannot keep kernels in {self.folder}: {error}; they are made anew")
        if self._private is None:
            self._private = Path(tempfile.mkdtemp(prefix="attndsl-"))
            weakref.finalize(self, shutil.rmtree, self._private, ignore_errors=True)
        return self._write(self._private, key, source, meta)

    def entries(self) -> list[EntryInfo]:
        """All entries, the most recently used first."""
        found = []
        for path in self._files("*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                head = json.loads(path.read_text("utf-8"))
                size = path.stat().st_size + path.with_suffix(".py").stat().st_size
                kind = str(head["meta"].get("kind", "kernel"))
                found.append(EntryInfo(path.stem, kind, size, path.stat().st_mtime))
        return sorted(found, key=lambda entry: -entry.used)

    def clear(self) -> int:
        """Remove all entries; how many there were."""
        keys = {path.stem for pattern in ("*.json", "*.py") for path in self._files(pattern)}
        for key in keys:
            self._remove(key)
        for path in self._files("*.tmp"):
            path.unlink(missing_ok=True)
        return len(keys)

    def prune(self, limit: int | None = None) -> int:
        """Remove the least recently used entries beyond ``limit`` bytes; how many were removed."""
        return self._evict(self.limit if limit is None else limit)

    def _files(self, pattern: str) -> Iterator[Path]:
        return self.folder.glob(pattern) if self.folder.is_dir() else iter(())

    def _read(self, folder: Path, key: str) -> Entry | None:
        head_path, path = folder / f"{key}.json", folder / f"{key}.py"
        if not head_path.exists():
            return None
        head = json.loads(head_path.read_text("utf-8"))
        if head["format"] != FORMAT_VERSION or head["key"] != key:
            raise ValueError("it is of another format")
        source = path.read_text("utf-8")
        if _digest(source) != head["sha256"]:
            raise ValueError("its text is not the one that was written")
        meta = head["meta"]
        if not isinstance(meta, dict):
            raise TypeError("its description is damaged")
        with contextlib.suppress(OSError):
            os.utime(head_path)
        return Entry(path, source, meta)

    def _write(self, folder: Path, key: str, source: str, meta: Mapping[str, object]) -> Entry:
        head: dict[str, Any] = {
            "format": FORMAT_VERSION,
            "key": key,
            "sha256": _digest(source),
            "meta": dict(meta),
        }
        path = folder / f"{key}.py"
        _publish(path, source)
        _publish(folder / f"{key}.json", json.dumps(head, indent=1))
        return Entry(path, source, dict(meta))

    def _make_folder(self) -> None:
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

    def _remove(self, key: str) -> None:
        for suffix in (".json", ".py"):
            with contextlib.suppress(OSError):
                (self.folder / f"{key}{suffix}").unlink(missing_ok=True)

    def _evict(self, limit: int | None = None) -> int:
        limit = self.limit if limit is None else limit
        with contextlib.suppress(OSError):
            if sum(path.stat().st_size for path in self._files("*")) <= limit:
                return 0
        removed, total = 0, 0
        for entry in self.entries():
            total += entry.bytes
            if total > limit:
                self._remove(entry.key)
                removed += 1
        return removed

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, CacheWarning, stacklevel=3)


def _publish(path: Path, text: str) -> None:
    """Put ``text`` at ``path`` so that readers see all of it or nothing."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
