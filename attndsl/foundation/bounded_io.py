"""Files and standard input as bytes and as text, never more of them than a stated number of bytes.

Devices, sockets and folders are refused, since some never end. A pipe is read as standard input is,
but a pipe without a writer is refused, since reading it would never begin.
"""

from __future__ import annotations

import os
import stat
import sys
from typing import TYPE_CHECKING

from attndsl.errors import ConfigError

if TYPE_CHECKING:
    from os import PathLike

MAX_TEXT = 1 << 20
"""Bytes of a program file or of a configuration."""
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_CLOEXEC", 0)
    # A named pipe without a writer would block in open() itself.
    | getattr(os, "O_NONBLOCK", 0)
)


def read_bytes(path: str | PathLike[str], most: int, pipes: bool = True) -> bytes:
    """All bytes of the regular file at ``path``, or with ``pipes`` of the pipe.

    Raises:
        OSError: The file cannot be opened or read.
        ConfigError: It is neither a regular file nor a pipe with a writer, or it holds more than
            ``most`` bytes.
    """
    # Before open(), which has effects on some devices.
    _check_kind(path, os.stat(path).st_mode, pipes)
    handle = os.open(path, _FLAGS)
    with os.fdopen(handle, "rb", buffering=0) as stream:
        mode = os.fstat(handle).st_mode
        _check_kind(path, mode, pipes)
        content = _first_of_pipe(path, handle, most + 1) if stat.S_ISFIFO(mode) else b""
        while len(content) <= most and (more := stream.read(most + 1 - len(content))):
            content += more
    return _bounded(content, os.fspath(path), most)


def read_open_file(handle: int, name: str, most: int) -> bytes:
    """All bytes of the regular file ``name`` that is open as ``handle``.

    Raises:
        OSError: It cannot be read.
        ConfigError: It is no regular file, or it holds more than ``most`` bytes.
    """
    found = os.fstat(handle)
    _check_kind(name, found.st_mode, pipes=False)
    content = b""
    # Its size says what is not read at all. What it has grown by since is not read to its end.
    if found.st_size <= most:
        while len(content) <= most and (more := os.read(handle, most + 1 - len(content))):
            content += more
    return _bounded(content, name, most, found.st_size)


def read_text(path: str | PathLike[str], pipes: bool = True) -> str:
    """The text of the file at ``path``, which is UTF-8, with or without a byte order mark.

    Line endings stay as they are. ``pipes`` says whether it may be a pipe.

    Raises:
        ConfigError: The file cannot be read, is of the wrong kind or too large, or is not UTF-8.
    """
    name = os.fspath(path)
    try:
        content = read_bytes(path, MAX_TEXT, pipes)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot read {name}: {error}") from error  # A NUL in the name.
    return _decoded(content, name)


def read_standard_input() -> str:
    """The text of standard input, which is UTF-8 whatever the locale.

    Raises:
        ConfigError: It is closed, cannot be read, is too large, or is not UTF-8.
    """
    name = "<stdin>"
    if sys.stdin is None or sys.stdin.closed:
        raise ConfigError(f"cannot read {name}: it is closed")
    try:
        content = sys.stdin.buffer.read(MAX_TEXT + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {name}: {error.strerror or error}") from error
    return _decoded(_bounded(content, name, MAX_TEXT), name)


def _check_kind(path: str | PathLike[str], mode: int, pipes: bool) -> None:
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{os.fspath(path)} is a folder", hint="name a file in it")
    if not (stat.S_ISREG(mode) or (pipes and stat.S_ISFIFO(mode))):
        hint = "name a file, or - for standard input" if pipes else "name a file"
        raise ConfigError(f"{os.fspath(path)} is no regular file", hint=hint)


def _first_of_pipe(path: str | PathLike[str], handle: int, most: int) -> bytes:
    """The content of a pipe now; reads of ``handle`` wait for its writer from then on."""
    try:
        content = os.read(handle, most)
    except BlockingIOError:
        content = None
    if content == b"":
        raise ConfigError(
            f"{os.fspath(path)} is an empty pipe that nobody writes to",
            hint="start its writer first, or name a file",
        )
    os.set_blocking(handle, True)
    return content or b""


def _bounded(content: bytes, name: str, most: int, size: int = 0) -> bytes:
    if max(len(content), size) > most:
        raise ConfigError(
            f"{name} is larger than {most} bytes", hint="split it, or move data to tensors"
        )
    return content


def _decoded(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
