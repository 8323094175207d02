"""Folders whose files are run: opened once, and refused where others may have written them.

A path is walked part by part, and a link that another user has put there is refused. All that is
read, written or removed afterwards goes by the descriptor of the folder that was found, so that
whoever changes the path meanwhile changes nothing. A file is checked by its own descriptor and read
from that.

Systems without descriptors of folders, such as Windows, go by paths.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from attndsl.errors import ConfigError
from attndsl.foundation.bounded_io import read_open_file

if TYPE_CHECKING:
    from types import TracebackType

_HAS_DESCRIPTORS = {os.open, os.mkdir, os.stat, os.unlink, os.rename} <= os.supports_dir_fd
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_ITSELF = getattr(os, "O_PATH", 0)
"""Opens what may be passed and not listed, and with ``_NO_LINK`` a link; Linux has it."""
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_BINARY = getattr(os, "O_BINARY", 0)
# A named pipe without a writer would block in open() itself.
_READ = os.O_RDONLY | _BINARY | _NO_LINK | getattr(os, "O_NONBLOCK", 0)
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY
_SHARED_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40
"""The most links in one path, as in Linux."""
_TOKEN_BYTES = 8


class OwnedFolder:
    """An open folder that only this user may write to."""

    def __init__(self, path: Path, handle: int | None, of_root: bool) -> None:
        """Do as :func:`open_folder`, with a descriptor that is closed with the folder."""
        self.path = path
        self._handle = handle
        self._of_root = of_root
        try:
            found = os.stat(path if handle is None else handle)
            if not stat.S_ISDIR(found.st_mode):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            self._check(found, path)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> OwnedFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Give the descriptor back."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def within(self, name: str) -> OwnedFolder:
        """The folder ``name`` in it.

        Raises:
            OSError, ConfigError: As :func:`open_folder`; links are refused, whosever they are.
        """
        if self._handle is None:
            self._refuse_link(name)
            return OwnedFolder(self.path / name, None, self._of_root)
        return OwnedFolder(self.path / name, self._open(name, _FOLDER | _NO_LINK), self._of_root)

    def scan(self) -> list[tuple[str, os.stat_result]]:
        """Names of what lies in it, and what each is; of a link the link itself.

        Raises:
            OSError: It cannot be listed.
        """
        found = []
        with os.scandir(self.path if self._handle is None else self._handle) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # Another process has removed it.
                    found.append((entry.name, entry.stat(follow_symlinks=False)))
        return found

    def read(self, name: str, most: int) -> bytes:
        """The content of the file ``name``, which may lie in folders within.

        Raises:
            OSError: It is not there, or cannot be read.
            ConfigError: Others may write to it, it is a link or no file, or it holds more than
                ``most`` bytes.
        """
        folder, _, rest = name.partition("/")
        if rest:
            with self.within(folder) as inner:
                return inner.read(rest, most)
        handle = self._open(name, _READ)
        try:
            shown = f"{self.path}{os.sep}{name}"
            self._check(os.fstat(handle), shown)
            return read_open_file(handle, shown, most)
        finally:
            os.close(handle)

    def publish(self, name: str, content: bytes) -> None:
        """Put ``content`` at ``name`` so that readers see all of it or nothing.

        Raises:
            OSError: It cannot be written.
            ConfigError: There is a link of that name.
        """
        self._refuse_link(name)
        # Letters and digits, by which the cache knows what killed writers leave.
        made = f"{name}{os.urandom(_TOKEN_BYTES).hex()}.tmp"
        handle = os.open(self._at(made), _WRITE, 0o600, dir_fd=self._handle)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            places = {"src_dir_fd": self._handle, "dst_dir_fd": self._handle}
            os.replace(self._at(made), self._at(name), **places)
        except BaseException:
            with suppress(OSError):
                os.unlink(self._at(made), dir_fd=self._handle)
            raise

    def touch(self, name: str) -> None:
        """Mark a file as used now.

        Raises:
            OSError: It is not there.
        """
        os.utime(self._at(name), dir_fd=self._handle)

    def remove(self, name: str) -> None:
        """Remove a file that is there. A folder or a link of this name stays.

        Raises:
            OSError: It cannot be removed.
        """
        with suppress(FileNotFoundError):
            if stat.S_ISREG(self._status(name).st_mode):
                os.unlink(self._at(name), dir_fd=self._handle)

    def remove_tree(self, name: str) -> None:
        """Remove a folder and all that lies in it.

        Raises:
            OSError: It cannot be removed.
        """
        shutil.rmtree(self._at(name), dir_fd=self._handle)

    def _at(self, name: str) -> str:
        """The name that system calls get beside the descriptor."""
        return name if self._handle is not None else os.path.join(self.path, name)

    def _status(self, name: str) -> os.stat_result:
        return os.stat(self._at(name), dir_fd=self._handle, follow_symlinks=False)

    def _open(self, name: str, flags: int) -> int:
        if not _NO_LINK:
            self._refuse_link(name)
        try:
            return os.open(self._at(name), flags, dir_fd=self._handle)
        except OSError:
            self._refuse_link(name)
            raise

    def _refuse_link(self, name: str) -> None:
        with suppress(FileNotFoundError):
            if stat.S_ISLNK(self._status(name).st_mode):
                raise ConfigError(
                    f"{self.path / name} is a link", hint="put what it leads to in its place"
                )

    def _check(self, found: os.stat_result, name: object) -> None:
        """Refuse what others may have written."""
        own = not hasattr(os, "getuid") or found.st_uid == os.getuid()
        if not (own or (self._of_root and found.st_uid == 0)) or found.st_mode & _SHARED_WRITE:
            raise ConfigError(
                f"{name} belongs to another user or is writable by others",
                hint="chown it to the user that runs, and chmod -R go-w the folder",
            )


def open_folder(path: Path, make: bool = False, of_root: bool = False) -> OwnedFolder:
    """Open the folder at ``path``; the caller closes it.

    Args:
        path: Where it is.
        make: Whether to make it and the folders above it, with no rights for others.
        of_root: Whether it and its files may be root's as well.

    Raises:
        OSError: It is not there, or cannot be opened or made.
        ConfigError: Others may write to it, or a link of another user leads there.
    """
    if not (_HAS_DESCRIPTORS and _ITSELF):
        return OwnedFolder(path, _opened(path, make), of_root)
    handle, links = None, 0
    waiting = [*reversed(path.parts)] or ["."]
    try:
        while waiting:
            part = waiting.pop()
            try:
                inner = _inner(part, handle, make)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP) or links == _MOST_LINKS:
                    raise
                links += 1
                waiting += reversed(_target(part, handle))
                continue
            if handle is not None:
                os.close(handle)
            handle = inner
    except BaseException:
        if handle is not None:
            os.close(handle)
        raise
    return OwnedFolder(path, handle, of_root)


def _inner(part: str, handle: int | None, make: bool) -> int:
    """A descriptor of the folder ``part`` in that of ``handle``; a link is an error."""
    flags = _FOLDER | _NO_LINK
    try:
        return os.open(part, flags, dir_fd=handle)
    except FileNotFoundError:
        if not make:
            raise
        with suppress(FileExistsError):
            os.mkdir(part, 0o700, dir_fd=handle)
        return os.open(part, flags, dir_fd=handle)
    except PermissionError:
        # Folders such as /home, where nobody may look around. Not in the first place: that would
        # have no folder mounted that is mounted when it is looked into.
        return os.open(part, flags | _ITSELF, dir_fd=handle)


def _target(part: str, handle: int | None) -> tuple[str, ...]:
    """The parts of what the link ``part`` in the folder of ``handle`` leads to."""
    # Opened, so that the link whose owner is looked at is the one that is read.
    link = os.open(part, _ITSELF | _NO_LINK, dir_fd=handle)
    try:
        found = os.fstat(link)
        if not stat.S_ISLNK(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), part)
        _check_link(found, part)
        return Path(os.readlink("", dir_fd=link)).parts
    finally:
        os.close(link)


def _check_link(found: os.stat_result, name: object) -> None:
    """Refuse links of others, who may turn them at any time."""
    if hasattr(os, "getuid") and found.st_uid not in (0, os.getuid()):
        raise ConfigError(f"{name} is a link of another user", hint="name the folder itself")


def _opened(path: Path, make: bool) -> int | None:
    """A descriptor of a folder, or None for systems without; by its path."""
    for each in (*reversed(path.parents), path):
        if make:
            with suppress(FileExistsError):
                os.mkdir(each, 0o700)
        found = os.stat(each, follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            _check_link(found, each)
    return os.open(path, _FOLDER) if _HAS_DESCRIPTORS else None
